"""Float8 as it is emulated: what is rounded and how, equal to torchao's; that it still learns."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hamlet.learning.float8 import (
    Float8,
    by_torchao,
    emulated,
    in_precision,
    rounded,
    too_small,
)
from hamlet.learning.precision import best_precision
from hamlet.learning.update import Update
from hamlet.modules.world_model import EnsembleLinear


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("dtype", "bits"), [(torch.float8_e4m3fn, 3), (torch.float8_e5m2, 2)], ids=["e4m3", "e5m2"]
)
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_each_matrix_is_scaled_to_the_types_range(dtype, bits, size):
    x = torch.randn(3, 40, 50) * torch.tensor([1.0, 100.0, 0.01]).view(3, 1, 1) * size
    y = rounded(x, dtype)
    largest = x.abs().amax((-2, -1), keepdim=True)
    torch.testing.assert_close(y.abs().amax((-2, -1), keepdim=True), largest, rtol=1e-6, atol=0)
    normal = x.abs() > largest * 1e-3  # smaller ones are subnormal, and finer in what they lose
    off = ((y - x).abs() / x.abs())[normal]
    half = 2.0 ** -(bits + 1)  # of a unit in the last place of 1
    assert off.max() == pytest.approx(half / (1 + half), rel=0.02)
    assert rounded(torch.zeros(2, 2), dtype).eq(0).all()


def by_hand(x, weight, gradient):
    e4, e5 = torch.float8_e4m3fn, torch.float8_e5m2
    x8, w8, g8 = rounded(x, e4), rounded(weight, e4), rounded(gradient, e5)
    return x8 @ w8, g8 @ w8.mT, x8.mT @ g8


@pytest.mark.parametrize("shape", [(7, 12, 20), (3, 7, 12, 20)], ids=["layer", "ensemble"])
def test_the_three_products_are_of_rounded_numbers(shape):
    *members, rows, inner, outer = shape
    x = torch.randn(*members, rows, inner, requires_grad=True)
    weight = torch.randn(*members, inner, outer, requires_grad=True)
    gradient = torch.randn(*members, rows, outer)
    y = emulated(x, weight)
    y.backward(gradient)
    expected = by_hand(x.detach(), weight.detach(), gradient)
    for ours, theirs in zip((y.detach(), x.grad, weight.grad), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not torch.allclose(y, x @ weight, atol=1e-3)


@pytest.mark.parametrize("shape", [(7, 12, 20), (3, 16, 32, 48)], ids=["padded", "ensemble"])
def test_torchao_multiplies_the_same(shape):
    pytest.importorskip("torchao")
    *members, rows, inner, outer = shape
    gradient = torch.randn(*members, rows, outer)
    results = []
    for product in (emulated, by_torchao(emulate=True)):
        torch.manual_seed(1)
        x = torch.randn(*members, rows, inner, requires_grad=True)
        weight = torch.randn(*members, inner, outer, requires_grad=True)
        y = product(x, weight)
        y.backward(gradient)
        results.append((y.detach(), x.grad, weight.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def exact(x, weight):
    return x @ weight


@pytest.mark.parametrize(
    ("layer", "inputs"),
    [
        (nn.Linear(6, 5), (torch.randn(4, 3, 6),)),
        (nn.Linear(6, 5, bias=False), (torch.randn(3, 6),)),
        (nn.GRUCell(6, 5), (torch.randn(4, 6), torch.randn(4, 5))),
        (EnsembleLinear(2, 6, 5), (torch.randn(2, 4, 6),)),
    ],
    ids=["linear", "no bias", "gru", "ensemble"],
)
def test_every_layer_goes_through_the_product_and_is_else_what_it_was(layer, inputs):
    with Float8(exact):
        same = layer(*inputs)
    torch.testing.assert_close(same, layer(*inputs), rtol=1e-5, atol=1e-6)
    with Float8(emulated):
        off = (layer(*inputs) - same).abs().max()
    assert 1e-3 < off < 0.3


def test_a_recurrent_training_in_float8_follows_bf16():
    def course(precision):
        torch.manual_seed(2)
        gru, head = nn.GRUCell(8, 32), nn.Linear(32, 8)
        x = torch.randn(12, 64, 8, generator=torch.Generator().manual_seed(3))

        def loss(x):
            state = torch.zeros(64, 32)
            for t in range(12):
                state = gru(x[t], state).float()
            return (head(state).float() - x[8]).square().mean(), {}

        taken, autocast = in_precision(loss, precision, ())
        update = Update(
            taken, [*gru.parameters(), *head.parameters()], learning_rate=1e-2, precision=autocast
        )
        return [update(x)["loss"].item() for _ in range(60)]

    bf16, fp8 = course("bf16"), course("fp8-emulated")
    assert bf16[-1] < 0.6 * bf16[0]
    assert fp8 != bf16
    assert fp8[-1] == pytest.approx(bf16[-1], abs=0.02 * bf16[0])


def test_without_the_hardware_it_is_bf16_and_says_so():
    def loss(x):
        return x.sum(), {}

    with pytest.warns(UserWarning, match="nothing here multiplies float8"):
        assert in_precision(loss, "fp8", ()) == (loss, best_precision("cpu"))
    assert in_precision(loss, "fp32", ()) == (loss, "fp32")


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="needs a GPU that multiplies float8",
)
def test_the_hardware_multiplies_what_is_emulated():
    pytest.importorskip("torchao")
    x = torch.randn(64, 48, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(48, 40, device="cuda")
    ours, theirs = emulated(x, weight), by_torchao(emulate=False)(x, weight).float()
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_layers_that_gain_nothing_are_told_with_their_size():
    small = [torch.zeros(64, 128), torch.zeros(7), torch.zeros(2, 96, 48)]
    assert too_small(small).startswith(
        "float8 gains nothing in layers of at most 128 inputs and 64"
    )
    assert not too_small([*small, torch.zeros(2048, 64)])
    assert not too_small([torch.zeros(8, 8192)])


def test_both_sides_are_padded_to_what_the_hardware_takes(monkeypatch):
    float8_linear = pytest.importorskip("torchao.float8.float8_linear")
    multiplied, sizes = float8_linear.matmul_with_hp_or_float8_args, []

    class Watched:
        @staticmethod
        def apply(x, weight, *how):
            sizes.append((x.shape[1], *weight.shape))
            return multiplied.apply(x, weight, *how)

    monkeypatch.setattr(float8_linear, "matmul_with_hp_or_float8_args", Watched)
    for inner, outer in ((12, 20), (16, 32), (17, 1)):
        assert by_torchao(emulate=True)(torch.ones(7, inner), torch.ones(inner, outer)).shape == (
            7, outer
        )  # fmt: skip
    assert sizes == [(16, 16, 32), (16, 16, 32), (32, 32, 16)]
