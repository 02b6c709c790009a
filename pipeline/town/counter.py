"""Counter-based randomness: a pure integer hash instead of a generator.

The number drawn depends only on what it is drawn for (seed, world, episode, tick, stream), so a
world's fate does not depend on its neighbours, on the batch size or on compilation. The mixer is
the xor-shift-multiply bijection of C. Wellons ("Prospecting for Hash Functions", 2018) on 32 bits,
computed in int64 so that no product overflows.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_GOLDEN = 0x1E3779B9


def mix(x: Tensor) -> Tensor:
    """A bijection of [0, 2**32) in int64; every output bit depends on every input bit."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x31848BAB) & _MASK
    return x ^ (x >> 16)


def episode_key(seed: Tensor, world: Tensor, episode: Tensor) -> Tensor:
    """int64 in [0, 2**32): the part of the hash that stays fixed through one life of one world."""
    key = mix((seed & _MASK) ^ 0x5851F42D)
    key = mix(key ^ ((seed >> 32) & _MASK))
    key = mix(key ^ (world & _MASK))
    return mix(key ^ (episode & _MASK))


def tick_hash(key: Tensor, tick: Tensor, stream: Tensor | int) -> Tensor:
    """int64 in [0, 2**32). For one key and tick, different streams never collide (bijection)."""
    return mix((mix(key ^ (tick & _MASK)) + stream * _GOLDEN) & _MASK)


def to_unit(bits: Tensor) -> Tensor:
    """float32 in [0, 1) from int64 in [0, 2**32), using the upper 24 bits."""
    return (bits >> 8).to(torch.float32) * (1.0 / (1 << 24))


def below(bits: Tensor, count: int) -> Tensor:
    """int64 in [0, count) from int64 in [0, 2**32): a multiplication instead of a division."""
    return (bits * count) >> 32


def counter_uniform(
    seed: Tensor, world: Tensor, episode: Tensor, tick: Tensor, stream: Tensor | int
) -> Tensor:
    """One uniform number per broadcast element of the int64 counters.

    Returns float32 in [0, 1); equal eager and compiled, and for any batch size.
    """
    return to_unit(tick_hash(episode_key(seed, world, episode), tick, stream))
