"""A world model whose weights ranks share is that of a single process, and is saved whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from hamlet.learning import distributed
from hamlet.learning.sharded import shard
from hamlet.learning.train_world_model import train_world_model
from hamlet.modules.contracts import LOOK, TownShape
from hamlet.modules.world_model import WorldModel
from hamlet.params import load_params
from hamlet.town import Town, load_pack

PARAMS = load_params(Path(__file__).parents[2] / "params.yaml", "tiny").world_model
LATENT, STEPS = 4, 8


class Kept:
    """A trainer's log that keeps the losses, and stops where it is told to."""

    def __init__(self, stop: int) -> None:
        self.stop, self.losses = stop, []

    def steps(self, total, start):
        return range(start, min(total, self.stop))

    def record(self, step, metrics):
        self.losses.append(torch.stack([metrics["loss"], metrics["grad_norm"]]))


def lived(shape: TownShape) -> TensorDict:
    """Random experience [24, 6, N] of the right shapes."""
    rng = torch.Generator().manual_seed(1)
    size, d = (24, 6, shape.num_agents), 2 * shape.num_affordances + LOOK + LATENT

    def noise(*more: int) -> torch.Tensor:
        return torch.rand(*size, *more, generator=rng)

    fields = {
        "mean": noise(d), "log_std": -4 * noise(d), "known_state": noise(shape.self_dim),
        "action": torch.randint(shape.num_actions, size, generator=rng),
        "legal": noise(shape.num_actions) < 0.5, "reward": noise(), "done": noise() < 0.05,
        "alive": noise() < 0.9, "value": noise(),
    }  # fmt: skip
    return TensorDict(fields, batch_size=size)


def trained(checkpoint: str, shard: bool, stop: int = STEPS) -> dict[str, torch.Tensor]:
    """The weights after the training, and its losses; a checkpoint after every step."""
    shape = TownShape.of(Town(load_pack("l4_contention"), num_layouts=8))
    params = PARAMS.model_copy(update={"steps": STEPS, "batch": 16, "shard": shard})
    log, worlds = Kept(stop), torch.arange(6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.monotonic", iter(range(0, 10**6, 100)).__next__)
        model = train_world_model(
            lived(shape), worlds, shape, LATENT, params, 3, Path(checkpoint), log
        )
    assert not any(hasattr(x, "full_tensor") for x in model.state_dict().values())
    return {**model.state_dict(), "losses": torch.stack(log.losses)}


@pytest.mark.slow
def test_two_ranks_that_share_the_weights_are_one_process(ranks, tmp_path):
    torch.set_num_threads(1)
    alone = trained(str(tmp_path / "alone.pt"), True)
    assert distributed.ranks() == 1
    both = ranks.run(2, trained, str(tmp_path / "both.pt"), True)
    for name, expected in alone.items():
        for found in both:
            torch.testing.assert_close(found[name], expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(both[0]["losses"], both[1]["losses"])


def test_what_they_save_is_whole_and_any_number_of_ranks_goes_on_with_it(ranks, tmp_path):
    torch.set_num_threads(1)
    file = str(tmp_path / "half.pt")
    alone = trained(str(tmp_path / "alone.pt"), False)
    ranks.run(2, trained, file, True, STEPS // 2)
    saved = torch.load(file, weights_only=True)  # no part of a tensor could be read so
    assert saved["step"] == STEPS // 2
    shapes = {name: x.shape for name, x in alone.items() if name != "losses"}
    assert {name: x.shape for name, x in saved["parts"]["model"].items()} == shapes
    half = (tmp_path / "half.pt").read_bytes()
    ends = [trained(file, False)]
    (tmp_path / "half.pt").write_bytes(half)
    ends += ranks.run(2, trained, file, True)
    for end in ends:
        end["losses"] = torch.cat([alone["losses"][: STEPS // 2], end["losses"]])
        for name, expected in alone.items():
            torch.testing.assert_close(end[name], expected, atol=1e-5, rtol=1e-5)


def held() -> dict[str, torch.Tensor]:
    """How many weights this rank holds of a model that is shared."""
    model = WorldModel(TownShape.of(Town(load_pack("l4_contention"), num_layouts=8)), LATENT, 16, 2)
    total = sum(p.numel() for p in model.parameters())
    shard(model, model.layers, "members_step", torch.device("cpu"))
    mine = sum(p.to_local().numel() for p in model.parameters())
    return {"total": torch.tensor(total), "mine": torch.tensor(mine)}


def test_each_rank_holds_a_part(ranks):
    told = ranks.run(3, held)
    assert sum(int(each["mine"]) for each in told) == told[0]["total"]
    assert max(int(each["mine"]) for each in told) < 0.7 * told[0]["total"]
