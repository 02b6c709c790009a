"""Agents built from four modules, each trained, frozen and tested alone, shipped as one ONNX file.

The public names of the library. Each is loaded when it is first used, so that `import hamlet` needs
none of the heavy packages, and `Agent` works where PyTorch is not installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hamlet.artifacts import HamletError
    from hamlet.export.frozen import load_frozen
    from hamlet.params import load_params
    from hamlet.proofs.saved import load_prover
    from hamlet.proofs.trace import ask
    from hamlet.serving.agent import OnnxAgent
    from hamlet.serving.client import Agent
    from hamlet.town import Pack, Scripted, Town, load_pack, render_ascii

_HOMES = {
    "Agent": "hamlet.serving.client",
    "HamletError": "hamlet.artifacts",
    "OnnxAgent": "hamlet.serving.agent",
    "Pack": "hamlet.town",
    "Scripted": "hamlet.town",
    "Town": "hamlet.town",
    "ask": "hamlet.proofs.trace",
    "load_frozen": "hamlet.export.frozen",
    "load_pack": "hamlet.town",
    "load_params": "hamlet.params",
    "load_prover": "hamlet.proofs.saved",
    "render_ascii": "hamlet.town",
}

__all__ = [
    "Agent",
    "HamletError",
    "OnnxAgent",
    "Pack",
    "Scripted",
    "Town",
    "ask",
    "load_frozen",
    "load_pack",
    "load_params",
    "load_prover",
    "render_ascii",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'hamlet' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
