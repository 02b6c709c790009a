"""What a log holds: which columns are features, and which tell of action, reward and episode.

    actions: 3
    fields:
      position: {kind: vector, columns: [x, y]}
      history: {kind: sequence, columns: [speeds], shape: [6, 2]}
      device: {kind: category, columns: [device], count: 5}
      screen: {kind: grid, columns: [cells], shape: [8, 8], count: 12}
    log_prob: log_prob
    terminated: terminated

The columns `action`, `reward`, `episode` and `step` have these names or those that the schema
gives. `log_prob`, `terminated`, `truncated` and `action_mask` exist only if named. A row whose
action is null is the observation after its episode's last action.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Literal

import numpy as np
import yaml
from pydantic import Field as Option
from pydantic import ValidationError, model_validator

from hamlet.artifacts import HamletError, parse_yaml
from hamlet.params import Section

Kind = Literal["vector", "sequence", "category", "grid"]


class Field(Section):
    """One input of the model."""

    kind: Kind = Option(description="numbers; numbers over time; a code; cells of a picture")
    columns: list[str] = Option(min_length=1, description="of numbers, or one column of lists")
    shape: list[int] | None = Option(
        default=None,
        description="of a list column: [n]; [length, width]; of a grid [rows, columns] if cells "
        "are codes, else [channels, rows, columns]",
    )  # fmt: skip
    count: int | None = Option(
        default=None, ge=2, description="categories; of a grid, the codes that a cell may hold"
    )

    @model_validator(mode="after")
    def _fits(self) -> Field:
        ranks = {"vector": (1,), "sequence": (2,), "grid": (2,) if self.count else (3,)}
        if self.kind == "category":
            if self.count is None or self.shape is not None or len(self.columns) != 1:
                raise ValueError("a category needs one column and `count`, and no `shape`")
        elif self.shape is None:
            if self.kind != "vector":
                raise ValueError(f"a {self.kind} needs `shape`")
        elif len(self.shape) not in ranks[self.kind] or min(self.shape) < 1:
            needs = " or ".join(map(str, ranks[self.kind]))
            raise ValueError(f"`shape` of this {self.kind} must be {needs} positive numbers")
        elif len(self.columns) != 1:
            raise ValueError("with `shape` there is one column, of lists")
        if self.count is not None and self.kind in ("vector", "sequence"):
            raise ValueError(f"a {self.kind} has no `count`")
        return self

    @property
    def trailing(self) -> tuple[int, ...]:
        """The shape of one row."""
        if self.kind == "category":
            return ()
        return tuple(self.shape) if self.shape else (len(self.columns),)

    @property
    def dtype(self) -> np.dtype:
        """int64 for codes, float32 for numbers."""
        return np.dtype("int64" if self.count else "float32")

    @property
    def size(self) -> int:
        """Numbers in one row."""
        return prod(self.trailing)


class Schema(Section):
    """The columns of a log."""

    fields: dict[str, Field] = Option(min_length=1)
    actions: int | list[str] = Option(description="how many, or their names")
    action: str = "action"
    reward: str = "reward"
    episode: str = "episode"
    step: str = "step"
    log_prob: str | None = None
    terminated: str | None = None
    truncated: str | None = None
    action_mask: str | None = None

    @model_validator(mode="after")
    def _named(self) -> Schema:
        if self.num_actions < 2:
            raise ValueError("`actions` must be 2 or more")
        taken = {"action", "action_mask"} & set(self.fields)
        if taken:
            raise ValueError(f"a field may not be called {', '.join(sorted(taken))}")
        return self

    @property
    def num_actions(self) -> int:
        return self.actions if isinstance(self.actions, int) else len(self.actions)

    @property
    def action_names(self) -> list[str]:
        if isinstance(self.actions, int):
            return [str(i) for i in range(self.actions)]
        return list(self.actions)


def load_schema(path: Path) -> Schema:
    """Read a schema file.

    Raises:
        HamletError: missing, not YAML, or naming the entry that is wrong.
    """
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"))
        return Schema.model_validate(data)
    except FileNotFoundError:
        raise HamletError(f"{path} is missing", "write the schema, or name it: --schema") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "schema"
        raise HamletError(
            f"{path}: {where}: {first['msg']}", "see docs/how-to/offline.md for a schema"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise HamletError(f"{path} is not YAML ({' '.join(str(error).split())})") from None
