"""The town: a survival world of many agents, as pure tensor functions.

Each name is loaded when it is first used: reading a pack needs no PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hamlet.town.counter import counter_uniform
    from hamlet.town.load import load_pack, pack_of_card
    from hamlet.town.players import Scripted
    from hamlet.town.render import render_ascii, render_png, save_gif
    from hamlet.town.schema import Pack, PackError
    from hamlet.town.town import Town

_HOMES = {
    "Pack": "schema",
    "PackError": "schema",
    "Scripted": "players",
    "Town": "town",
    "counter_uniform": "counter",
    "load_pack": "load",
    "pack_of_card": "load",
    "render_ascii": "render",
    "render_png": "render",
    "save_gif": "render",
}

__all__ = [
    "Pack",
    "PackError",
    "Scripted",
    "Town",
    "counter_uniform",
    "load_pack",
    "pack_of_card",
    "render_ascii",
    "render_png",
    "save_gif",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'hamlet.town' has no attribute {name!r}")
    return getattr(import_module(f"hamlet.town.{_HOMES[name]}"), name)
