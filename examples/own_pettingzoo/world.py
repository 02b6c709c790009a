"""The world of this project: change it as you like, `dvc repro` sees it.

Return a PettingZoo parallel environment with discrete actions. `render_mode` is given by
`hamlet play --gif`.
"""

from __future__ import annotations

from typing import Any

from mpe2 import simple_tag_v3


def make(render_mode: str | None = None) -> Any:
    """One new environment; Hamlet makes as many as it needs."""
    return simple_tag_v3.parallel_env(render_mode=render_mode)
