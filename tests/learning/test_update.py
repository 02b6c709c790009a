"""The update step shared by every learner: its guarded compilation, its scaler, its optimizer."""

from __future__ import annotations

import copy
import subprocess
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from hamlet.artifacts import HamletError
from hamlet.learning import update as update_module
from hamlet.learning.compiling import compiled, inductor_options, with_room
from hamlet.learning.precision import DTYPES, autocast, set_precision
from hamlet.learning.update import Update, fused_adam, to_device


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    torch.set_num_threads(1)


def learner(**options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))

    def loss(x, y):
        error = (model(x).squeeze(-1).float() - y).square().mean()
        return error, {"error": error}

    return model, loss, Update(loss, model.parameters(), learning_rate=0.01, **options)


def batches(count, size=32):
    rng = torch.Generator().manual_seed(2)
    for _ in range(count):
        x = torch.randn(size, 5, generator=rng)
        yield x, x.sum(-1) + torch.randn(size, generator=rng) / 10


def settle(update, x, y):
    """Let the scaler find a scale that fp16 can hold, without learning anything."""
    update.set_learning_rate(0.0)
    for _ in range(12):
        update(x, y)
    update.set_learning_rate(0.01)
    update.skipped_steps = 0


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_one_step_is_clip_then_adam():
    model, _, update = learner(max_grad_norm=0.5)
    twin = copy.deepcopy(model)
    adam = torch.optim.AdamW(twin.parameters(), lr=0.01, eps=1e-5, weight_decay=0.0)
    for x, y in batches(5):
        told = update(x, y)
        adam.zero_grad()
        (twin(x).squeeze(-1) - y).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        adam.step()
        torch.testing.assert_close(told["grad_norm"], norm)
        assert told.keys() == {"loss", "grad_norm", "compile_active", "error"}
        assert not any(value.requires_grad for value in told.values())
    torch.testing.assert_close(weights(model), weights(twin))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_compile_error_falls_back_once_and_steps_once(monkeypatch, where):
    """As a real one: it shows at the first call, perhaps when gradients are half there."""
    calls = []

    def broken(loss, **options):
        assert options["fullgraph"]

        def compiled(*batch):
            calls.append(1)
            if where == "forward":
                raise RuntimeError("inductor has no such kernel\nand a long story")
            value, told = loss(*batch)
            value.register_hook(
                lambda _: (_ for _ in ()).throw(RuntimeError("inductor has no such kernel"))
            )
            return value, told

        return compiled

    expected, _, eager = learner()
    monkeypatch.setattr(update_module.torch, "compile", broken)
    model, _, update = learner(compile=True)
    assert update.compile_active
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        told = [update(x, y)["compile_active"] for x, y in batches(4)]
    assert not any(told)  # already the first step was made by the eager loss
    ours = [w for w in caught if "eager from now on" in str(w.message)]
    assert len(ours) == 1
    assert "inductor has no such kernel" in str(ours[0].message)
    assert "\n" not in str(ours[0].message)
    assert len(calls) == 1
    assert not update.compile_active
    for x, y in batches(4):
        eager(x, y)
    torch.testing.assert_close(weights(model), weights(expected), atol=0, rtol=0)
    steps = {float(state["step"]) for state in update.optimizer.state.values()}
    assert steps == {4.0}


def test_an_error_of_the_eager_loss_is_not_swallowed():
    def loss(x):
        raise ValueError("a bug")

    update = Update(loss, [nn.Parameter(torch.zeros(1))], learning_rate=0.1)
    with pytest.raises(ValueError, match="a bug"):
        update(torch.zeros(1))


def test_an_injected_inf_skips_the_step_and_is_counted():
    model, _, update = learner(precision="fp16")
    inf = torch.tensor(float("inf"))
    feed = list(batches(6))
    settle(update, *feed[0])
    for i, (x, y) in enumerate(feed):
        before = weights(model)
        scale = update.scaler.get_scale()
        update(x, y * inf if i in (2, 4) else y)
        skipped = i in (2, 4)
        assert torch.equal(weights(model), before) == skipped
        assert (update.scaler.get_scale() < scale) == skipped
    assert update.skipped_steps == 2
    assert weights(model).isfinite().all()


def test_the_scaler_leaves_the_gradient_norm_unscaled():
    """Clipping sees gradients of the loss itself: fp16's norm is fp32's, nearly."""
    ((x, y),) = batches(1)
    norms = []
    for precision in ("fp32", "fp16"):
        _, _, update = learner(precision=precision)
        settle(update, x, y)
        norms.append(update(x, y)["grad_norm"].item())
    assert norms[1] == pytest.approx(norms[0], rel=0.02)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_it_learns_in_every_precision_and_rollouts_share_it(precision):
    model, _, update = learner(precision=precision)
    seen = []
    model[0].register_forward_hook(lambda _m, _i, out: seen.append(out.dtype))
    errors = [update(x, y)["error"].item() for x, y in batches(300)]
    assert sum(errors[-20:]) < 0.2 * sum(errors[:20])
    with autocast(precision, "cpu"):
        model(torch.zeros(1, 5))
    assert set(seen) == {DTYPES[precision]}
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_fused_and_foreach_take_the_same_steps():
    model, _, update = learner()
    assert update.optimizer.defaults["fused"]
    twin, _, other = learner()
    other.optimizer = torch.optim.AdamW(
        twin.parameters(), lr=0.01, eps=1e-5, weight_decay=0.0, foreach=True
    )
    for i, (x, y) in enumerate(batches(50)):
        for one in (update, other):
            one.set_learning_rate(0.01 * (1 - i / 50))
            one(x, y)
    torch.testing.assert_close(weights(model), weights(twin), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", [{"device": "meta"}, {"dtype": torch.complex64}])
def test_where_fused_is_not_supported_foreach_is_taken(kind):
    optimizer = fused_adam([nn.Parameter(torch.zeros(3, **kind))], 0.01)
    assert optimizer.defaults["foreach"]
    assert not optimizer.defaults["fused"]


def test_a_learning_rate_of_zero_changes_nothing():
    model, _, update = learner()
    before = weights(model)
    update.set_learning_rate(0.0)
    for x, y in batches(2):
        update(x, y)
    assert torch.equal(weights(model), before)


def test_a_saved_update_goes_on_exactly():
    model, _, update = learner(precision="fp16")
    feed = list(batches(8))
    for x, y in feed[:4]:
        update(x, y)
    saved = copy.deepcopy((model.state_dict(), update.state_dict()))
    twin, _, other = learner(precision="fp16")
    twin.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    for x, y in feed[4:]:
        update(x, y)
        other(x, y)
    assert torch.equal(weights(model), weights(twin))
    other.set_learning_rate(0.5)  # still possible after loading
    assert float(other.optimizer.param_groups[0]["lr"]) == 0.5


def test_precision_is_set_in_one_place_and_told():
    before = torch.get_float32_matmul_precision()
    try:
        told = set_precision()
        assert told["float32_matmul_precision"] == torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_moving_to_the_cpu_copies_nothing():
    tensors = [torch.zeros(3), torch.ones(2)]
    moved = to_device(tensors, "cpu")
    assert [m.data_ptr() for m in moved] == [t.data_ptr() for t in tensors]


def test_the_compiler_is_called_by_the_name_that_vectorises_unless_one_is_given(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("shutil.which", {"c++": "/usr/bin/c++"}.get)
    assert inductor_options() == {"cpp.cxx": (None, "c++")}
    monkeypatch.setattr("shutil.which", {}.get)
    assert inductor_options() == {}
    monkeypatch.setattr("shutil.which", {"c++": "/usr/bin/c++"}.get)
    monkeypatch.setenv("CXX", "clang++")
    assert inductor_options() == {}


@pytest.mark.slow
def test_compiled_is_one_graph_equal_to_eager_that_no_learning_rate_compiles_again():
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model, _, update = learner(compile=True)
    twin, _, eager = learner()
    for i, (x, y) in enumerate(batches(6)):
        for one in (update, eager):
            one.set_learning_rate(0.01 / (i + 1))
            one(x, y)
    assert update.compile_active
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    torch.testing.assert_close(weights(model), weights(twin), atol=1e-5, rtol=1e-4)
    # A second batch size makes the batch dimension dynamic, for all sizes to come.
    for size in (48, 20, 64):
        for x, y in batches(1, size):
            update(x, y)
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.slow
def test_compiled_headers_are_named_as_the_compiler_looks_for_them():
    from torch._inductor.codecache import _HEADER_DIR as FOLDER

    told = subprocess.run(["c++", "--version"], capture_output=True, text=True).stdout
    kind, other = ("gch", "pch") if "Free Software Foundation" in told else ("pch", "gch")
    before = set(Path(FOLDER).glob(f"*.{other}"))
    new = time.time()  # a number that no cache has seen
    torch.compile(lambda x: x.sin() + new, options=inductor_options())(torch.ones(8, 8))
    assert list(Path(FOLDER).glob(f"*.{kind}"))
    assert set(Path(FOLDER).glob(f"*.{other}")) == before


def test_inductor_fills_its_table_of_types_once_and_fully():
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
    from torch._inductor.ops_handler import OP_NAMES

    inductor_options()
    table = DtypePropagationOpsHandler()
    rule = table.add
    assert DtypePropagationOpsHandler() is table
    assert table.add is rule  # and not another of the same
    assert set(OP_NAMES) <= set(dir(table))


@pytest.mark.slow
def test_cuda_graphs_keep_one_shape_and_run_the_others_eager():
    """On the CPU nothing is replayed, but what guards a replay is the same."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model, _, update = learner(compile=True, cuda_graphs=True)
    twin, _, eager = learner()
    told = []
    for size in (32, 32, 20, 32, 48):
        for x, y in batches(1, size):
            told.append(update(x, y))
            eager(x, y)
    torch.testing.assert_close(weights(model), weights(twin), atol=1e-5, rtol=1e-4)
    assert update.compile_active
    assert update.off_graph_steps == 2
    assert counters["stats"]["unique_graphs"] == 1  # the odd sizes compiled nothing
    places = {step["error"].data_ptr() for step in told}
    assert len(places) == len(told)  # what is told outlives the next step


def test_each_replay_begins_a_new_step(monkeypatch):
    """Or else CUDA graphs would keep the results of all steps alive."""
    begun = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(1))
    monkeypatch.setattr(torch, "compile", lambda loss, **options: asked.append(options) or loss)
    asked: list[dict] = []
    _, _, update = learner(compile=True, cuda_graphs=True)
    for size in (32, 32, 20):
        for x, y in batches(1, size):
            update(x, y)
    assert len(begun) == 2
    assert asked[0]["options"]["triton.cudagraphs"]


def test_cuda_graphs_of_an_eager_loss_are_refused():
    with pytest.raises(ValueError, match=r"cuda_graphs.*set compile"):
        learner(cuda_graphs=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs replay on a GPU only")
def test_replayed_steps_are_eager_steps():
    model, _, _ = learner()
    feed = [(x.cuda(), y.cuda()) for x, y in batches(20)]
    ends = []
    for graphs in (False, True):
        twin = copy.deepcopy(model).cuda()

        def loss(x, y, twin=twin):
            error = (twin(x).squeeze(-1).float() - y).square().mean()
            return error, {"error": error}

        update = Update(
            loss, twin.parameters(), learning_rate=0.01, compile=graphs, cuda_graphs=graphs,
        )  # fmt: skip
        told = [update(x, y)["error"] for x, y in feed]
        ends.append((weights(twin), torch.stack(told)))
    torch.testing.assert_close(ends[1], ends[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("wrong", ["loss", "gradient"])
def test_what_is_not_a_number_stops_training_before_the_weights_are_touched(wrong, precision):
    """A NaN reward, or the root of zero, whose gradient is not a number: told by name."""
    model, plain, _ = learner()

    def loss(x, y):
        error, told = plain(x, y)
        root = (model(x).square().sum() * 0).sqrt() if wrong == "gradient" else 0.0
        return error + root, told

    update = Update(loss, model.parameters(), learning_rate=0.1, precision=precision)
    x, y = next(batches(1))
    before = weights(model)
    told = "loss, error, grad_norm" if wrong == "loss" else "grad_norm"
    for _ in range(19 if precision == "fp16" else 0):  # any of these might have been an overflow
        update(x, y * torch.nan if wrong == "loss" else y)
    with pytest.raises(HamletError, match=f"not a finite number: {told}: look for nan"):
        update(x, y * torch.nan if wrong == "loss" else y)
    assert torch.equal(weights(model), before)


def leaf():
    pass


leaf.__code__ = leaf.__code__.replace(co_stacksize=100)  # more than a frame of what calls it


def new_pages(deep):
    """Of 200 calls from so many frames further down."""
    resource = pytest.importorskip("resource")
    if deep:
        return new_pages(deep - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(200):
        leaf()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def cramped():
    """Whether calls take memory from the system: the end of a chunk of frames is met somewhere."""
    return max(map(new_pages, range(250))) >= 200


def test_calls_below_what_has_room_take_no_memory_from_the_system():
    assert cramped()  # what is mended
    assert not with_room(cramped)()
    assert with_room(lambda *inputs: inputs)(1, "two") == (1, "two")


def test_what_compiles_has_room_and_later_calls_do_not_pay_for_it(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    step = compiled(cramped)
    assert [step(), step()] == [False, True]
    found, weight = [], nn.Parameter(torch.ones(()))

    def loss(x):
        found.append(cramped())
        return (weight * x).sum(), {}

    update = Update(loss, [weight], learning_rate=0.1, compile=True)
    for _ in range(2):
        update(torch.ones(2))
    assert found == [False, True]
