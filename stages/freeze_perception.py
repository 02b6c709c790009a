"""freeze_perception: export one tick of module A and prove that the graph is the module."""

from __future__ import annotations

import torch
from torch import Tensor

from hamlet.artifacts import HamletError, check_card, write_json
from hamlet.export.frozen import freeze, load_frozen, prove_parity
from hamlet.modules.contracts import BeliefDistribution, TownShape
from hamlet.modules.perception import Perception
from hamlet.town import load_pack
from stages import paths
from stages.common import stage

TOLERANCE = 1e-5


def example_inputs(
    shape: TownShape, recurrent_dim: int, batch: int, rng: torch.Generator
) -> dict[str, Tensor]:
    """Random legal inputs of one tick of perception, by name."""
    m, view = shape.num_others, (batch, shape.view_side, shape.view_side)
    return {
        "view": torch.randint(shape.num_cell_codes, view, generator=rng).to(torch.uint8),
        "occupancy": torch.randint(3, view, generator=rng).to(torch.uint8),
        "self_state": torch.rand(batch, shape.self_dim, generator=rng),
        "cues": torch.randint(2, (batch, m, shape.num_cues), generator=rng).float(),
        "visible": torch.rand(batch, m, generator=rng) > 0.5,
        "others_offset": torch.rand(batch, m, 2, generator=rng) - 0.5,
        "recurrent_state": torch.zeros(batch, recurrent_dim),
    }


def main() -> None:
    with stage("freeze_perception") as s:
        pack = load_pack(s.params.town.pack).content_hash
        card = check_card(paths.PERCEPTION_WEIGHTS, expect_pack=pack)
        shape = TownShape.from_dict(card["town"])
        module = Perception(shape, card["hidden"], card["latent"])
        module.load_state_dict(torch.load(paths.PERCEPTION_WEIGHTS, weights_only=True))
        module.cache_odds()
        rng = torch.Generator().manual_seed(s.params.seed)
        freeze(
            module,
            example_inputs(shape, module.recurrent_dim, 4, rng),
            BeliefDistribution._fields,
            paths.PERCEPTION,
            kind="perception",
            pack=pack,
            upstream={"dataset": card["upstream"]["dataset"], "weights": card["sha256"]},
            extra={
                "town": shape.to_dict(),
                "belief_dim": module.belief_dim,
                "latent": module.latent,
                "recurrent_dim": module.recurrent_dim,
            },
        )
        frozen, _ = load_frozen(paths.PERCEPTION, pack)
        parity = prove_parity(
            module,
            frozen,
            lambda batch, rng: tuple(
                example_inputs(shape, module.recurrent_dim, batch, rng).values()
            ),
            state_inputs={6: 4},
            ticks=s.params.freeze_perception.parity_ticks,
            seed=s.params.seed,
        )
        numbers = {f"parity_{name}": value for name, value in parity.items()}
        write_json(paths.metrics("freeze_perception"), numbers)
        s.run.metrics(numbers)
        if max(parity.values()) > TOLERANCE:
            paths.PERCEPTION.unlink()
            raise HamletError(
                f"the frozen perception differs from the module by {max(parity.values()):.2g}",
                "report it with `hamlet doctor`: this torch build exports a wrong graph",
            )


if __name__ == "__main__":
    main()
