"""Ranks over real sockets are one process that has all the rows. Whole stages: test_torchrun.py."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from ranks import Ranks
from tensordict import TensorDict
from torch import nn

from hamlet.artifacts import HamletError
from hamlet.learning import distributed
from hamlet.learning.buffer import RolloutBuffer
from hamlet.learning.checkpoint import Checkpoint
from hamlet.learning.distributed import all_gather, local_shard, noise, sum_gradients
from hamlet.learning.gathered_critic import OF_AGENTS, gathered_features
from hamlet.learning.losses import (
    entropy_of,
    normalise,
    ppo_policy_loss,
    value_loss,
    weighted_mean,
    weighted_means,
)
from hamlet.learning.rollout import learn
from hamlet.learning.sequences import SequenceReader
from hamlet.learning.update import Update
from hamlet.modules.categorical import log_prob_of
from hamlet.modules.contracts import TownShape
from hamlet.modules.critic import Critic, privileged_features
from hamlet.town import Scripted, Town, load_pack

CLOSE = {"atol": 1e-6, "rtol": 1e-5}


pytestmark = pytest.mark.usefixtures("one_thread")


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# ------------------------------------------------------------------------------------------------
# Rows


def everything() -> dict[str, torch.Tensor]:
    """Rows [6, 4] of every type that a state holds."""
    x = torch.arange(24).view(6, 4)
    kinds = (torch.uint8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64)
    made = {str(kind): (x * 3 % 50).to(kind) for kind in kinds}
    return made | {"bool": x % 3 == 0, "empty": torch.zeros(6, 0)}


def there_and_back(dim):
    back = all_gather(local_shard(everything(), dim), dim)
    kept = all_gather(local_shard(TensorDict(everything(), batch_size=[6]))["bool"])
    torch.manual_seed(5)
    drawn = noise(local_shard(torch.zeros(3, 12), 1), 1)
    return {"back": back, "kept": kept, "noise": all_gather(drawn, 1), "next": torch.rand(2)}


@pytest.mark.parametrize(("count", "dim"), [(2, 0), (3, 0), (2, 1)])
def test_parts_make_the_whole_and_noise_is_drawn_once(ranks, count, dim):
    rows = everything()
    torch.manual_seed(5)
    drawn, after = torch.randn_like(torch.zeros(3, 12)), torch.rand(2)
    for seen in ranks.run(count, there_and_back, dim):
        assert seen["back"].keys() == rows.keys()
        for name, value in rows.items():
            assert seen["back"][name].dtype == value.dtype
            assert torch.equal(seen["back"][name], value), name
        assert torch.equal(seen["kept"], rows["bool"])
        assert torch.equal(seen["noise"], drawn)
        assert torch.equal(seen["next"], after)


def leave():
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_ends_is_an_error_at_once(tmp_path):
    own = Ranks(tmp_path)
    with pytest.raises(AssertionError, match=r"\{0: -9\}"):
        own.run(1, leave)
    own.close()


def buffered(ticks, slots):
    buffer = RolloutBuffer(ticks)
    for t in range(ticks):
        buffer.add({"id": local_shard(torch.arange(slots) + t * slots)})
    generator = torch.Generator().manual_seed(8)
    return [[b["id"] for b in buffer.minibatches(5, generator)] for _ in range(2)]


def test_ranks_share_the_very_minibatches_of_one_process(ranks):
    expected = buffered(7, 12)
    found = ranks.run(3, buffered, 7, 12)
    sizes = set()
    for epoch, parts in enumerate(expected):
        for number, one in enumerate(parts):
            of_ranks = [seen[epoch][number] for seen in found]
            sizes |= {len(rows) for rows in of_ranks}
            assert torch.equal(torch.cat(of_ranks).sort().values, one.sort().values)
    assert len(sizes) > 1  # or the weighing by rows is not put to the test


def test_alone_nothing_is_done():
    rows = torch.zeros(3)
    assert local_shard(rows) is rows
    assert all_gather(rows) is rows
    assert distributed.all_reduce_sum(rows, rows)[0] is rows
    assert distributed.local_count(7, "lanes") == 7
    assert not torch.distributed.is_initialized()


def uneven():
    with pytest.raises(HamletError, match=r"^policy.worlds is 7, which 2 ranks cannot share.*: "):
        distributed.local_count(7, "policy.worlds")
    return distributed.local_count(8, "policy.worlds")


def test_what_cannot_be_shared_is_told(ranks):
    assert ranks.run(2, uneven) == [4, 4]


# ------------------------------------------------------------------------------------------------
# Sums, gradients, updates


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 16), nn.Tanh())
        self.logits, self.value = nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, x):
        hidden = self.body(x)
        return self.logits(hidden).float(), self.value(hidden).squeeze(-1).float()


def actor():
    torch.manual_seed(1)
    return Actor()


def ppo(model):
    """Every loss and moment that trainers use, on rows of which many do not count."""

    def loss(x, action, old, advantage, returns, weight):
        logits, value = model(x)
        normal = normalise(advantage, weight)
        policy, told = ppo_policy_loss(log_prob_of(logits, action), old, normal, weight, 0.2)
        fit, more = value_loss(value, torch.zeros_like(value), returns, weight, 0.2)
        both = weighted_means(
            {"entropy": (entropy_of(logits), weight), "norm": (value.square(), 1 - weight)}
        )
        return policy + fit - 0.1 * both["entropy"] + 0.01 * both["norm"], told | more | both

    return loss


def batches(count, rows=48):
    """The whole batches; the first third of the rows counts far less often than the rest."""
    rng = torch.Generator().manual_seed(2)
    for _ in range(count):
        x = torch.randn(rows, 5, generator=rng)
        action = torch.randint(3, (rows,), generator=rng)
        old = -torch.rand(rows, generator=rng) - 0.7
        odds = torch.where(torch.arange(rows) < rows // 3, 0.1, 0.9)
        weight = (torch.rand(rows, generator=rng) < odds).float()
        yield (
            x, action, old, x[:, 0] + 2 * torch.randn(rows, generator=rng), x.sum(-1), weight
        )  # fmt: skip


def trained(steps, **options):
    model = actor()
    update = Update(ppo(model), model.parameters(), learning_rate=0.01, **options)
    told = [update(*local_shard(batch)) for batch in batches(steps)]
    names = [name for name in told[0] if name != "compile_active"]
    return {
        "weights": weights(model),
        "told": {name: torch.stack([t[name] for t in told]) for name in names},
        "compiled": update.compile_active,
        "skipped": update.skipped_steps,
    }


@pytest.mark.parametrize("count", [2, 3])
def test_twenty_updates_equal_those_of_one_process_and_so_does_what_is_told(ranks, count):
    expected = trained(20)
    found = ranks.run(count, trained, 20)
    for seen in found:
        torch.testing.assert_close(seen["weights"], expected["weights"], atol=1e-5, rtol=0)
        torch.testing.assert_close(seen["told"], expected["told"], atol=1e-5, rtol=1e-4)
        assert torch.equal(seen["weights"], found[0]["weights"])  # to the bit
        for name, values in seen["told"].items():
            assert torch.equal(values, found[0]["told"][name]), name


def learned(slots):
    """Two epochs from a buffer of 4 ticks, in 4 minibatches; and how many messages they took."""
    batch = next(iter(batches(1, 4 * slots)))
    names = ("x", "action", "old", "advantage", "returns", "weight")
    model, buffer, sent = actor(), RolloutBuffer(4), []
    for t in range(4):
        rows = {name: x.unflatten(0, (4, slots))[t] for name, x in zip(names, batch, strict=True)}
        buffer.add(local_shard(rows))
    loss = ppo(model)
    update = Update(
        lambda rows: loss(*(rows[name] for name in names)), model.parameters(), learning_rate=0.01
    )
    told = ("all_gather", "all_reduce", "broadcast")
    with pytest.MonkeyPatch.context() as patch:
        for name in told:
            send = getattr(torch.distributed, name)
            patch.setattr(
                torch.distributed, name,
                lambda *given, send=send, name=name: sent.append(name) or send(*given),
            )  # fmt: skip
        last = learn(update, [buffer], 2, 4, torch.Generator().manual_seed(3))
    return {"weights": weights(model), "loss": last["loss"], "sent": sent}


@pytest.mark.parametrize(("slots", "shared"), [(96, False), (6144, True)])
def test_small_minibatches_are_learned_whole_by_every_rank(ranks, slots, shared):
    """96 of them are not worth the messages that 2 x 4 updates take; the bits are one process's."""
    expected = learned(slots)
    assert not expected["sent"]
    for seen in ranks.run(2, learned, slots):
        messages = sorted(set(seen["sent"]))
        if shared:
            assert messages == ["all_reduce"]
            torch.testing.assert_close(seen["weights"], expected["weights"], atol=1e-5, rtol=0)
        else:
            assert messages == ["all_gather", "broadcast"]
            assert len(seen["sent"]) == 7  # six fields, once; the weights, once
            assert torch.equal(seen["weights"], expected["weights"])
            assert torch.equal(seen["loss"], expected["loss"])


def drifted():
    """Ranks on machines whose processors round differently."""
    model = actor()
    with torch.no_grad():
        model.logits.bias += distributed.rank()
    distributed.take_from(model.parameters())
    return weights(model)


def test_the_first_ranks_weights_are_taken_by_all(ranks):
    for seen in ranks.run(2, drifted):
        assert torch.equal(seen, weights(actor()))


@pytest.mark.slow
def test_compiled_it_is_the_same(ranks):
    expected = trained(20)
    for seen in ranks.run(2, compiled, 20):
        assert seen["compiled"]
        torch.testing.assert_close(seen["weights"], expected["weights"], atol=1e-5, rtol=0)
        torch.testing.assert_close(seen["told"], expected["told"], atol=1e-5, rtol=1e-4)


def compiled(steps):
    return trained(steps, compile=True)


def overflowing():
    """fp16, where one rank alone meets an infinity: all skip that step."""
    torch.manual_seed(1)
    model = nn.Linear(5, 1)

    def loss(x, y, weight):
        return weighted_mean((model(x).squeeze(-1).float() - y).square(), weight), {}

    update = Update(loss, model.parameters(), learning_rate=0.0, precision="fp16")
    rows = torch.Generator().manual_seed(3)
    kept = []
    for step in range(16):
        if step == 12:  # the scaler has found its scale
            update.set_learning_rate(0.01)
            update.skipped_steps = 0
        x = torch.randn(8, 5, generator=rows)
        y = x.sum(-1)
        if step == 14 and distributed.rank() == 1:
            x = x * torch.inf
        update(*local_shard((x, y, torch.ones(8))))
        kept.append(weights(model))
    return {"kept": torch.stack(kept), "skipped": update.skipped_steps}


def test_an_overflow_of_one_rank_skips_the_step_of_all(ranks):
    first, second = ranks.run(2, overflowing)
    assert first["skipped"] == second["skipped"] == 1
    assert torch.equal(first["kept"], second["kept"])
    assert torch.equal(first["kept"][14], first["kept"][13])
    assert not torch.equal(first["kept"][15], first["kept"][14])
    assert first["kept"].isfinite().all()


# ------------------------------------------------------------------------------------------------
# Checkpoints


def followed(path, stop_at, steps=10):
    """A recurrent learner over lanes, with noise; its weights, state and where it began."""
    torch.manual_seed(3)
    model = nn.GRUCell(2, 4)
    rows = torch.Generator().manual_seed(9)
    data = TensorDict(
        {
            "x": torch.randn(12, 5, 3, 2, generator=rows),
            "action": torch.zeros(12, 5, 3, dtype=torch.int64),
            "first": torch.zeros(12, 5, dtype=torch.bool),
        },
        batch_size=[12, 5],
    )
    lanes = SequenceReader(data, torch.arange(5), 6, 4, torch.Generator().manual_seed(4))
    state = torch.zeros(distributed.local_count(6, "lanes") * 3, 4)
    carried = []

    def loss(chunk, state):
        for t in range(4):
            state = model(chunk["x"][t], state)
        carried[:] = [state.detach()]
        error = (state - noise(state, 0)).square().mean(-1)
        return weighted_mean(error, (chunk["x"][0, :, 0] > 0).float()), {}

    update = Update(loss, model.parameters(), learning_rate=0.05)
    parts = {"model": model, "update": update, "lanes": lanes, "rng": torch.default_generator}
    saved = Checkpoint(path, parts, interval=0.0)
    start, extra = saved.load()
    state = extra.get("state", state)
    for step in range(start, stop_at or steps):
        update(lanes.read(), state)
        state = carried[0]
        saved.save(step + 1, {"step": step}, {"state": state})
    return {"weights": weights(model), "state": all_gather(state), "start": start}


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 2), (2, 3)])
def test_any_number_of_ranks_goes_on_from_a_checkpoint(ranks, tmp_path, before, after):
    file = tmp_path / "cut.pt"

    def run(count, path, stop_at):
        if count == 1:
            return [followed(path, stop_at)]
        return ranks.run(count, followed, path, stop_at)

    expected = followed(tmp_path / "whole.pt", None)
    run(before, file, 5)
    found = run(after, file, None)
    for seen in found:
        assert seen["start"] == 5
        torch.testing.assert_close(seen["weights"], expected["weights"], **CLOSE)
        torch.testing.assert_close(seen["state"], expected["state"], **CLOSE)
    if before == after:
        untouched = run(after, tmp_path / "untouched.pt", None)
        assert torch.equal(untouched[0]["weights"], found[0]["weights"])
        assert torch.equal(untouched[0]["state"], found[0]["state"])


def apart(folder):
    """Machines that share no disk: only the first rank finds the file."""
    path = folder / f"{distributed.rank()}.pt"
    if distributed.rank():
        with pytest.raises(HamletError, match=r"would go on from step 0.*share the folder"):
            Checkpoint(path, {}).load()
    else:
        torch.save({"step": 3, "parts": {}, "extra": {}, "rows": {}}, path)
        Checkpoint(path, {}).load()
    return 0


def test_ranks_that_find_different_checkpoints_say_so(ranks, tmp_path):
    ranks.run(2, apart, tmp_path)


# ------------------------------------------------------------------------------------------------
# One world's agents on different ranks


def played():
    """A town, its shape, the true state [B] after a while of play, and returns [B, N]."""
    town = Town(load_pack("l4_contention"), num_layouts=8)
    state = town.reset(3, 6)
    players = Scripted(town, ["expert"], 0)
    memory = players.reset(state)
    for _ in range(40):
        actions, _, memory = players.act(state, memory)
        state = town.step_and_reset_core(state, actions)
    rng = torch.Generator().manual_seed(6)
    returns = torch.randn(6, town.num_agents, generator=rng)
    weight = (torch.rand(6, town.num_agents, generator=rng) < 0.6).float()
    return town, TownShape.of(town), state, returns, weight


def judged(wrongly=False):
    """Value and gradients of the critic's loss; agents of a world live on different ranks.

    Args:
        wrongly: every rank takes the loss of all agents, not of its own.
    """
    town, shape, state, returns, weight = played()
    torch.manual_seed(1)
    critic = Critic(shape, 16)
    state = TensorDict(dict(state.items()), batch_size=state.batch_size)
    for name in OF_AGENTS:
        state[name] = local_shard(state[name], 1).clone()
    state["meters"].requires_grad_()
    if distributed.ranks() == 1:
        features = privileged_features(town, shape, state)
    else:
        features = gathered_features(town, shape, state)
    values = critic(features)
    own = (values, torch.zeros_like(values), local_shard(returns, 1), local_shard(weight, 1))
    if wrongly:
        everyone = all_gather(values, 1)
        loss = ((everyone - returns).square() * weight).sum() / weight.sum()
    else:
        loss, _ = value_loss(*own, clip=1e9)
    loss.backward()
    sum_gradients(critic.parameters())
    return {
        "values": all_gather(values.detach(), 1),
        "loss": loss.detach(),
        "critic": torch.cat([p.grad.flatten() for p in critic.parameters()]),
        "meters": all_gather(state["meters"].grad, 1),
    }


@pytest.mark.parametrize("count", [2, 4])
def test_the_critic_of_a_world_on_many_ranks_is_that_of_one_process(ranks, count):
    expected = judged()
    assert expected["critic"].abs().max() > 0.01
    assert expected["meters"].abs().max() > 1e-4
    for seen in ranks.run(count, judged):
        for name, value in expected.items():
            torch.testing.assert_close(seen[name], value, atol=1e-6, rtol=0, msg=name)


def test_a_loss_that_every_rank_takes_whole_counts_as_often_as_there_are_ranks(ranks):
    """What `whole` warns of: its gradient is summed over the ranks."""
    expected = judged(wrongly=True)
    for seen in ranks.run(2, judged, True):
        torch.testing.assert_close(seen["values"], expected["values"], **CLOSE)
        torch.testing.assert_close(seen["critic"], 2 * expected["critic"], **CLOSE)
        torch.testing.assert_close(seen["meters"], 2 * expected["meters"], **CLOSE)


def test_parts_are_equal_in_order_and_joined_are_the_whole():
    rows = {"a": torch.arange(12).view(6, 2), "b": (torch.arange(6), torch.arange(18).view(6, 3))}
    parts = [distributed.shard(rows, k, 3) for k in range(3)]
    assert parts[1]["a"].tolist() == [[4, 5], [6, 7]]
    assert parts[2]["b"][0].tolist() == [4, 5]
    whole = distributed.joined(parts)
    assert torch.equal(whole["a"], rows["a"])
    assert all(torch.equal(x, y) for x, y in zip(whole["b"], rows["b"], strict=True))
    columns = [distributed.shard(rows["a"], k, 2, 1) for k in range(2)]
    assert columns[1].tolist() == [[1], [3], [5], [7], [9], [11]]
    assert torch.equal(distributed.joined(columns, 1), rows["a"])
    assert distributed.shard(rows, 0, 1) is rows
