"""The counter generator against the same formulas in Python's own integers."""

from __future__ import annotations

import operator

import torch
from hypothesis import given
from hypothesis import strategies as st

from hamlet.town.counter import below, counter_uniform, episode_key, mix, tick_hash, to_unit

WORD = 1 << 32


def signed(x: int) -> int:
    return (x + (1 << 31)) % WORD - (1 << 31)


def mixed(x: int) -> int:
    """lowbias32 with the constants of the module, on 32 unsigned bits."""
    x %= WORD
    x = (x ^ (x >> 16)) * 0x7FEB352D % WORD
    x = (x ^ (x >> 15)) * 0x31848BAB % WORD
    return x ^ (x >> 16)


def key_of(seed: int, world: int, episode: int) -> int:
    key = mixed(seed ^ 0x5851F42D)
    key = mixed(key ^ (seed >> 32))
    key = mixed(key ^ world)
    return mixed(key ^ episode)


def hashed(key: int, tick: int, stream: int) -> int:
    return mixed(mixed(key ^ tick) + stream * 0x1E3779B9)


small, long = st.integers(0, 2**31 - 1), st.integers(0, 2**62)


def test_values_that_must_never_change():
    """Recorded data sets and seeds of experiments depend on them."""
    assert mix(torch.tensor([0, 1, -1], dtype=torch.int32)).tolist() == [0, 774041739, -1048324511]
    key, tick = torch.tensor([5], dtype=torch.int32), torch.tensor([7])
    assert tick_hash(key, tick, 3).tolist() == [-1357757667]


@given(st.integers(-(2**31), 2**31 - 1))
def test_mix(x):
    assert mix(torch.tensor([x], dtype=torch.int32)).item() == signed(mixed(x))


@given(long, small, small, small, st.integers(0, 100_000))
def test_a_draw_is_the_hash_of_all_its_counters(seed, world, episode, tick, stream):
    counters = [torch.tensor([x]) for x in (seed, world, episode, tick)]
    key = episode_key(*counters[:3])
    assert key.item() == signed(key_of(seed, world, episode))
    expected = hashed(key_of(seed, world, episode), tick, stream)
    for written in (stream, torch.tensor([stream])):
        assert tick_hash(key, counters[3], written).item() == signed(expected)
        assert counter_uniform(*counters, written).item() == (expected >> 8) / (1 << 24)


def test_a_range_of_streams_is_not_left_to_the_compilers_arithmetic():
    """Inductor works out `range * constant` with numbers that do not wrap: on a GPU such an index
    is no int32, and no kernel. On the CPU it is cast to one."""
    multiplied = []

    def keep(graph, inputs):
        for node in graph.graph.nodes:
            if node.op == "call_function" and node.args[1:] == (0x1E3779B9,):
                multiplied.append(node.args[0].target)
        return graph.forward

    def draw(key, tick):
        return tick_hash(key, tick, 1000 + torch.arange(64, device=key.device))

    for device in ("meta", "cpu"):
        key = torch.tensor([5], dtype=torch.int32, device=device)
        compiled = torch.compile(draw, fullgraph=True, backend=keep)
        assert compiled(key, key.long()).shape == (64,)
    assert multiplied[0] == operator.xor
    assert multiplied[1] != operator.xor


@given(st.integers(0, WORD - 1), st.integers(1, 1 << 20))
def test_bits_to_numbers(bits, count):
    word = torch.tensor([signed(bits)], dtype=torch.int32)
    assert to_unit(word).item() == (bits >> 8) / (1 << 24)
    assert below(word, count).item() == bits * count >> 32
