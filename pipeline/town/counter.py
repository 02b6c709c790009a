"""Counter-based randomness: a pure integer hash instead of a generator.

The number drawn depends only on what it is drawn for (seed, world, episode, tick, stream), so a
world's fate does not depend on its neighbours, on the batch size or on compilation. The mixer is
the xor-shift-multiply bijection of C. Wellons ("Prospecting for Hash Functions", 2018) on 32 bits,
held in int32 (wrapping), because that is what vector units multiply fast.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_GOLDEN = 0x1E3779B9
_TOP = 1 << 31


def _shift(x: Tensor, count: int) -> Tensor:
    """Logical right shift of int32."""
    return (x >> count) & (_MASK >> count)


def mix(x: Tensor) -> Tensor:
    """A bijection of int32; every output bit depends on every input bit."""
    x = (x ^ _shift(x, 16)) * 0x7FEB352D
    x = (x ^ _shift(x, 15)) * 0x31848BAB
    return x ^ _shift(x, 16)


def episode_key(seed: Tensor, world: Tensor, episode: Tensor) -> Tensor:
    """int32: the part of the hash that stays fixed through one life of one world.

    seed, world, episode: int64; all 64 bits of the seed and the lower 32 of the others count.
    """
    key = mix(seed.to(torch.int32) ^ 0x5851F42D)
    key = mix(key ^ (seed >> 32).to(torch.int32))
    key = mix(key ^ world.to(torch.int32))
    return mix(key ^ episode.to(torch.int32))


def tick_hash(key: Tensor, tick: Tensor, stream: Tensor | int) -> Tensor:
    """32 random bits as int32. For one key and tick, different streams never collide (bijection).

    key: of `episode_key`; tick, stream: any integer type.
    """
    if isinstance(stream, int):
        offset: Tensor | int = (stream * _GOLDEN + _TOP) % (1 << 32) - _TOP  # as int32 wraps
    else:
        stream = stream.to(torch.int32)
        if torch.compiler.is_compiling() and stream.device.type != "cpu":
            # Hides a range from Triton's index arithmetic, which does not wrap as int32 does. (In
            # C++ it does, and a product that is known to overflow is undefined there.)
            stream = stream ^ 0
        offset = stream * _GOLDEN
    return mix(mix(key ^ tick.to(torch.int32)) + offset)


def to_unit(bits: Tensor) -> Tensor:
    """float32 in [0, 1) from 32 random bits, using the upper 24."""
    return _shift(bits, 8).to(torch.float32) * (1.0 / (1 << 24))


def below(bits: Tensor, count: int) -> Tensor:
    """int64 in [0, count) from 32 random bits: a multiplication instead of a division."""
    return ((bits.long() & _MASK) * count) >> 32


def counter_uniform(
    seed: Tensor, world: Tensor, episode: Tensor, tick: Tensor, stream: Tensor | int
) -> Tensor:
    """One uniform number per broadcast element of the int64 counters.

    Returns float32 in [0, 1); equal eager and compiled, and for any batch size.
    """
    return to_unit(tick_hash(episode_key(seed, world, episode), tick, stream))
