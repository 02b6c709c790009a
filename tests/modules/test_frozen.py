"""A frozen graph is its module, at every batch size, and knows none of its classes."""

from __future__ import annotations

import re
import typing

import pytest
import torch

from hamlet.artifacts import HamletError
from hamlet.export.frozen import Flat, freeze, load_frozen, prove_parity, quiet
from hamlet.modules.contracts import LOOK
from hamlet.modules.perception import Perception
from hamlet.modules.policy import Policy, PolicyAct, PolicyEnded, PolicyPrior, PolicyWeigh
from hamlet.modules.social import Social
from hamlet.modules.world_model import WorldModel


def rows(module: str, shape, batch: int, rng: torch.Generator) -> dict[str, torch.Tensor]:
    """Random legal inputs of one tick, by name."""
    m, d, places = shape.num_others, 2 * shape.num_affordances + 4, 2 * shape.num_affordances

    def real(*size):
        return torch.randn(batch, *size, generator=rng)

    def whole(high, *size):
        return torch.randint(high, (batch, *size), generator=rng)

    features = {
        "mean": real(d), "log_std": real(places), "known_state": real(shape.self_dim).sigmoid(),
        "rivals": real(shape.num_goals).abs(), "ahead": real(shape.num_affordances, 3).abs(),
        "pursued": whole(shape.num_goals + 1),
        "moved": whole(shape.num_actions + 1),
    }  # fmt: skip
    others = {
        "cues": whole(2, m, shape.num_cues).float(),
        "visible": whole(2, m).bool(),
        "others_offset": real(m, 2) / 4,
    }
    return {
        "perception": {
            "view": whole(shape.num_cell_codes, 5, 5).to(torch.uint8),
            "occupancy": whole(3, 5, 5).to(torch.uint8),
            "self_state": real(shape.self_dim).sigmoid(),
            **others,
            "recurrent_state": torch.zeros(batch, 16 + shape.num_cells),
        },
        "world_model": {
            "mean": real(d), "log_std": real(d), "known_state": features["known_state"],
            "action": whole(shape.num_actions),
        },
        "social": {
            "mean": real(d), "log_std": real(d), "known_state": features["known_state"],
            **others, "others_action": whole(shape.num_actions + 1, m),
            "recurrent_state": torch.zeros(batch, m, 17 + shape.num_affordances),
        },
        "prior": features,
        "ended": {
            "known_state": features["known_state"], "goal": whole(shape.num_goals),
            "age": whole(10),
        },
        "weigh": {
            "prior": real(shape.num_goals), "candidates": whole(shape.num_goals, 3),
            "returns": real(3), "confidence": real(3).sigmoid(),
        },
        "act": {**features, "goal": whole(shape.num_goals)},
    }[module]  # fmt: skip


def make(name: str, shape):
    """The module with weights that say something, and state input -> state output."""
    targets = (torch.rand(shape.num_goals, 8) > 0.8) * 0.95
    hours = torch.rand(shape.lifespan + 1, shape.num_affordances, 3)
    menu = torch.rand(shape.num_affordances, 17)
    policy = Policy(shape, 2 * shape.num_affordances + 4, 24, targets, hours, menu, 4, 0.2)
    modules = {
        "perception": (Perception(shape, 16, 4), {6: 4}),
        "world_model": (WorldModel(shape, 4 - LOOK, 24, 3), {}),
        "social": (Social(shape, 16), {7: 5}),
        "prior": (PolicyPrior(policy), {}),
        "ended": (PolicyEnded(policy), {}),
        "weigh": (PolicyWeigh(policy), {}),
        "act": (PolicyAct(policy), {}),
    }
    module, states = modules[name]
    for parameter in module.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    return module.eval(), states


def write(name, shape, path, upstream=None):
    module, states = make(name, shape)
    inputs = rows(name, shape, 4, torch.Generator().manual_seed(0))
    with torch.no_grad():
        produced = tuple(module(*inputs.values()))
    freeze(
        module, inputs, [f"o{i}" for i in range(len(produced))], path,
        kind=name, pack="p" * 64, upstream=upstream or {}, extra={},
    )  # fmt: skip
    return module, states


@pytest.mark.parametrize(
    "name", ["perception", "world_model", "social", "prior", "ended", "weigh", "act"]
)
def test_frozen_equals_eager_at_batch_1_7_256(name, shape, tmp_path):
    module, states = write(name, shape, tmp_path / "m.pt2")
    frozen, card = load_frozen(tmp_path / "m.pt2", "p" * 64)
    worst = prove_parity(
        module,
        frozen,
        lambda batch, rng: tuple(rows(name, shape, batch, rng).values()),
        states,
        ticks=8,
        seed=3,
    )
    assert worst.keys() == {"batch_1", "batch_7", "batch_256"}
    assert max(worst.values()) <= 1e-5
    assert {entry["shape"][0] for entry in card["schema"]["inputs"]} == {"batch"}


def test_what_was_frozen_can_be_exported_once_more(shape, tmp_path):
    """As the agent does, without tracing Python: `torch.export` of a loaded graph."""
    write("perception", shape, tmp_path / "m.pt2")
    frozen, _ = load_frozen(tmp_path / "m.pt2")
    inputs = tuple(rows("perception", shape, 4, torch.Generator().manual_seed(0)).values())
    with torch.no_grad():
        again = torch.export.export(Flat(frozen), inputs, strict=False).module()
        for ours, theirs in zip(again(*inputs), frozen(*inputs), strict=True):
            assert torch.equal(ours, theirs)


def test_a_second_file_asks_no_class_for_its_types_again(shape, tmp_path, monkeypatch):
    write("social", shape, tmp_path / "m.pt2")
    load_frozen(tmp_path / "m.pt2")
    asked, ask = [], typing.get_type_hints
    monkeypatch.setattr(typing, "get_type_hints", lambda *a, **k: asked.append(a) or ask(*a, **k))
    load_frozen(tmp_path / "m.pt2")
    assert not asked


def test_an_export_keeps_nobodys_stack_and_what_comes_after_it_does():
    module, inputs = torch.nn.Linear(3, 2), (torch.zeros(4, 3),)

    def stacks() -> list[str]:
        nodes = torch.export.export(module, inputs, strict=False).graph.nodes
        return [node.stack_trace for node in nodes if node.stack_trace]

    with quiet():
        assert not stacks()
    assert stacks()


def test_parity_tells_another_module_apart(shape, tmp_path):
    """The proof can fail: one weight moved is a difference."""
    module, states = write("social", shape, tmp_path / "m.pt2")
    frozen, _ = load_frozen(tmp_path / "m.pt2")
    with torch.no_grad():
        module.heads.bias[0] += 0.01
    worst = prove_parity(
        module, frozen, lambda b, rng: tuple(rows("social", shape, b, rng).values()),
        states, ticks=2, seed=3,
    )  # fmt: skip
    assert min(worst.values()) > 1e-4


def test_the_same_weights_are_the_same_bytes_and_hold_no_path(shape, tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        torch.manual_seed(4)
        write("social", shape, tmp_path / folder / "m.pt2")
    one, two = ((tmp_path / f / "m.pt2").read_bytes() for f in ("one", "two"))
    assert one == two
    assert not re.search(rb"/(pipeline|hamlet)/|\.py\b|tmp/", one)


def test_gradients_reach_the_inputs_and_not_the_weights(shape, tmp_path):
    write("world_model", shape, tmp_path / "m.pt2")
    frozen, _ = load_frozen(tmp_path / "m.pt2")
    values = list(rows("world_model", shape, 5, torch.Generator().manual_seed(1)).values())
    values[0].requires_grad_()
    frozen(*values)[3].sum().backward()
    assert values[0].grad.abs().sum() > 0
    assert all(not p.requires_grad and p.grad is None for p in frozen.parameters())
    assert frozen.train() is frozen
    assert not frozen.training


@pytest.mark.parametrize("spoil", ["flip", "pack", "card", "file"])
def test_a_wrong_file_is_refused_before_it_is_opened(shape, tmp_path, spoil, monkeypatch):
    path = tmp_path / "m.pt2"
    write("ended", shape, path)
    opened = []
    monkeypatch.setattr(torch.export, "load", opened.append)
    if spoil == "flip":
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif spoil == "card":
        path.with_name("m.pt2.json").unlink()
    elif spoil == "file":
        path.unlink()
    with pytest.raises(HamletError, match=r"m\.pt2"):
        load_frozen(path, "q" * 64 if spoil == "pack" else None)
    assert not opened
