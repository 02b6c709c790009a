"""What is told to torch's exporter as a whole says in ONNX what it says in PyTorch."""

from __future__ import annotations

from collections import Counter

import onnx
import pytest
import torch
from torch import nn

from hamlet.export import translations
from hamlet.export.onnx import export_mind, export_onnx
from hamlet.ort import open_unchecked
from hamlet.town import Town, load_pack
from stages.agent import OUTPUTS
from tests.serving.exported import untrained

NODES, IMAGINING_NODES = 549, 262  # of think() on the first level, in and beside its branch


class Told(nn.Module):
    """Every operator of `translations`."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.plain = nn.GRUCell(3, 4), nn.GRUCell(3, 4, bias=False)
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, x, h, i):
        columns, last = x.unbind(1), h.unbind(-1)[-1]
        stacked = [torch.stack(columns, at) for at in (0, 1, -1)]
        stacked += [torch.stack([h, h + 1], at) for at in (0, 1, 2)]
        picked = h.index_select(1, torch.tensor([3, 0])), h.index_select(0, i % 1)
        whole = (h.round().long() * (h > 0)).unsqueeze(1)
        kinds = (h > 0, whole, h * (h > 0))
        asked = [f(y, -1, k) for y in kinds for f in (torch.any, torch.all) for k in (False, True)]
        g, h = self.plain(x, h), self.cell(x, h)
        a, b, c = x > 0, x < 0.5, i + 3
        one, rows = nn.functional.one_hot(i, 5), x @ self.weight.T
        both, either = (a & b, i & c), (a | b, i | c)
        less = (1.5 - x, 2 - i, 1.5 - i, torch.rsub(x, 2, alpha=3), torch.rsub(i, 2, alpha=3))
        deep = torch.stack([h, 2 * h, 3 * h], 1)
        moved = [deep.movedim(*axes) for axes in ((1, -1), (-1, 1), (2, -2), (0, 0))]
        joined = torch.cat([x, 2 * x], 1)  # of which parts are cut out whole, in part, and across
        cut = [joined[:, a:b] + 1 for a, b in ((3, 6), (3, 5), (2, 4), (0, 3))]
        more = (g, last, *stacked, *picked, *asked, *moved, *cut)
        return *more, h, *less, x.square(), *both, *either, one, x.long(), rows, i.expand(i.numel())


class Mutating(nn.Module):
    """What changes in place must be taken apart, or the change would be lost."""

    def forward(self, x, h, i):
        y = x * 2
        y[:, 0] = 7
        y.add_(1)
        return (y,)


class Unknown(nn.Module):
    """`aten::to.other` is in no table."""

    def forward(self, x, h, i):
        return (i.to(x), h * 2)


@pytest.mark.parametrize("kind", [Told, Mutating, Unknown])
def test_it_says_the_same_at_any_batch(kind):
    module = kind().eval()

    def inputs(batch: int) -> dict[str, torch.Tensor]:
        rng = torch.Generator().manual_seed(batch)
        floats = [torch.randn(batch, n, generator=rng) for n in (3, 4)]
        return dict(zip("xhi", [*floats, torch.randint(5, (batch,), generator=rng)], strict=True))

    with torch.no_grad():
        names = [f"out{k}" for k in range(len(module(*inputs(4).values())))]
        session = open_unchecked(export_onnx(module, inputs(4), names).SerializeToString())
        for batch in (1, 4, 7):
            given = inputs(batch)
            found = session.run(names, {k: x.numpy() for k, x in given.items()})
            for ours, theirs in zip(module(*given.values()), found, strict=True):
                assert theirs.dtype == ours.numpy().dtype
                torch.testing.assert_close(torch.from_numpy(theirs), ours, rtol=1e-5, atol=1e-6)


def test_what_is_told_is_not_taken_apart(monkeypatch):
    taken = []
    monkeypatch.setattr(
        translations.ExportedProgram, "run_decompositions", lambda *_, **__: taken.append(1)
    )
    module, batch = Told().eval(), torch.export.Dim("batch", min=1, max=64)
    examples = (torch.randn(4, 3), torch.randn(4, 4), torch.tensor([0, 1, 2, 3]))
    with torch.no_grad():
        shapes = ({0: batch},) * 3
        program = torch.export.export(module, examples, dynamic_shapes=shapes, strict=False)
        translations.translated(program, 20)
    assert not taken


@pytest.mark.slow
def test_a_whole_mind_is_not_taken_apart_and_has_few_nodes(monkeypatch, tmp_path):
    """Nothing in think() is unknown to the exporter: it would take twice as long."""
    taken = []
    monkeypatch.setattr(
        translations.ExportedProgram, "run_decompositions", lambda *_, **__: taken.append(1)
    )
    mind, inputs = untrained(Town(load_pack("l4_contention"), num_layouts=4))
    export_mind(mind, inputs, OUTPUTS, tmp_path / "agent.onnx")
    assert not taken
    graph = onnx.load(tmp_path / "agent.onnx").graph
    choice = next(node for node in graph.node if node.op_type == "If")
    imagination = max((a.g for a in choice.attribute), key=lambda g: len(g.node))
    # At batch 1 every node costs some microseconds: see that there are not more of them.
    assert len(graph.node) <= NODES
    assert len(imagination.node) <= IMAGINING_NODES
    assert not [node for node in graph.node if node.op_type == "Identity"]


class Lean(nn.Module):
    """What is told in few nodes: at batch 1 a served tick costs as many as it has."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(64, 64)  # of weights that are folded only up to FOLDED numbers

    def forward(self, x, h):
        x = torch.cat([h, x, x], 1)[:, 64:128]  # what was put together for nothing
        a, b, _ = x.split([1, 1, 62], 1)[2].unflatten(1, (31, 2))[:, :3].unbind(1)
        return self.cell(x, h), torch.stack((a, b)), torch.stack((a, b), 1), (x > 0).all(-1)


def test_what_is_told_is_told_in_few_nodes():
    given = {"x": torch.randn(4, 64), "h": torch.randn(4, 64)}
    graph = export_onnx(Lean().eval(), given, ["next", "first", "second", "all"]).graph
    kinds = Counter(node.op_type for node in graph.node)
    assert kinds["Gemm"] == 3  # both gates at once
    assert kinds["Sigmoid"] == 1
    assert kinds["Gather"] == 2  # of unbind, what is used
    assert kinds["Slice"] == 1  # of what was not put together just before
    assert kinds["Concat"] == 3  # of the cell's input and state, and of either stack
    assert not {"Unsqueeze", "Squeeze", "Cast"} & kinds.keys()
