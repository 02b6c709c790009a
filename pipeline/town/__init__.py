"""The town: a survival world of many agents, as pure tensor functions."""

from pipeline.town.config import Pack, PackError, load_pack
from pipeline.town.counter import counter_uniform
from pipeline.town.players import Scripted
from pipeline.town.render import render_ascii, render_png, save_gif
from pipeline.town.town import Town

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
