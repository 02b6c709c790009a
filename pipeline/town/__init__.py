"""The town: a survival world of many agents, as pure tensor functions."""

from hamlet.town.config import Pack, PackError, load_pack
from hamlet.town.counter import counter_uniform
from hamlet.town.players import Scripted
from hamlet.town.render import render_ascii, render_png, save_gif
from hamlet.town.town import Town

__all__ = [
    "Pack",
    "PackError",
    "Scripted",
    "Town",
    "counter_uniform",
    "load_pack",
    "render_ascii",
    "render_png",
    "save_gif",
]
