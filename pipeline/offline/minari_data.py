"""Minari data sets as a log store; the schema comes from the spaces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hamlet.artifacts import HamletError
from hamlet.offline.checks import Checker, Report
from hamlet.offline.log_store import FINAL, TERMINATED, TRUNCATED, Writer
from hamlet.offline.schema import Field, Schema

OBSERVATION = "observation"  # the field of a space that has no names


def minari_folder(path: Path) -> Path | None:
    """The folder of a Minari data set's data, if `path` is one."""
    for folder in (path, path / "data"):
        if (folder / "metadata.json").is_file():
            return folder
    return None


def open_minari(folder: Path) -> Any:
    """The `minari.MinariDataset` of a folder.

    Raises:
        HamletError: made by a Minari that the installed one does not read, or damaged.
    """
    import minari

    try:
        made = json.loads((folder / "metadata.json").read_text())["minari_version"]
    except (ValueError, KeyError, UnicodeDecodeError):
        raise HamletError(
            f"{folder}/metadata.json is not Minari's", "copy the data set again"
        ) from None
    if made not in minari.supported_dataset_versions:
        raise HamletError(
            f"{folder}/metadata.json: made by Minari {made}, which the installed Minari "
            f"{minari.__version__} does not read",
            f'run `pip install "minari[hdf5]>={made}"`',
        )
    try:
        return minari.MinariDataset(folder)
    except Exception as error:  # whatever its storage says
        raise HamletError(
            f"{folder} cannot be opened ({type(error).__name__}: {error})", "copy it again"
        ) from None


def minari_schema(dataset: Any, folder: Path, log_prob: bool) -> Schema:
    """The schema that the spaces of a data set amount to.

    Raises:
        HamletError: a space that is not supported, by name.
    """
    from gymnasium.spaces import Box, Dict, Discrete, MultiBinary

    space, actions = dataset.observation_space, dataset.action_space
    if not isinstance(actions, Discrete) or actions.start != 0:
        raise HamletError(
            f"{folder}: the action space is {actions}", "only Discrete(n) from 0 is supported"
        )
    parts = dict(space.spaces) if isinstance(space, Dict) else {OBSERVATION: space}
    mask = "action_mask" if "action_mask" in parts else None
    parts.pop("action_mask", None)
    fields = {}
    for name, part in parts.items():
        if isinstance(part, Discrete) and part.start == 0:
            fields[name] = Field(kind="category", columns=[name], count=int(part.n))
        elif isinstance(part, Box | MultiBinary) and len(part.shape) == 1:
            fields[name] = Field(kind="vector", columns=[name], shape=list(part.shape))
        elif isinstance(part, Box) and len(part.shape) == 2:
            fields[name] = Field(kind="sequence", columns=[name], shape=list(part.shape))
        elif isinstance(part, Box) and len(part.shape) == 3:
            fields[name] = Field(kind="grid", columns=[name], shape=list(part.shape))
        else:
            raise HamletError(
                f"{folder}: observation `{name}` is {part}",
                "Box of one, two or three dimensions, MultiBinary and Discrete are supported",
            )
    return Schema(
        fields=fields, actions=int(actions.n), action_mask=mask, terminated="terminations",
        truncated="truncations", log_prob="log_prob" if log_prob else None,
    )  # fmt: skip


def read_minari(folder: Path, out: Path, report: Report) -> int:
    """Write a Minari data set into a new store in `out`, episode by episode; returns its rows.

    The observation after the last action becomes a final row. `infos["log_prob"]` is the
    behaviour's log-probability, where there is one.

    Raises:
        HamletError: see `open_minari` and `minari_schema`; no episodes.
    """
    dataset = open_minari(folder)
    if not dataset.total_episodes:
        raise HamletError(f"{folder} has no episodes", "record some first")
    first = next(_episodes(dataset, folder))
    schema = minari_schema(dataset, folder, "log_prob" in (first.infos or {}))
    rows = int(dataset.total_steps) + int(dataset.total_episodes)
    writer, checker = Writer(out, schema, rows), Checker(schema, report)
    for episode in _episodes(dataset, folder):
        n = len(episode)
        name = f"{folder}, episode {episode.id}"
        arrays = _episode_arrays(episode, schema, name)
        begins = checker.check(name, 0, arrays, np.full(n + 1, episode.id), np.arange(n + 1))
        arrays["action"] = np.clip(arrays["action"], 0, schema.num_actions - 1)
        writer.add(arrays, begins)
    writer.close({"path": folder.name})
    return rows


def _episodes(dataset: Any, folder: Path) -> Iterator[Any]:
    try:
        yield from dataset.iterate_episodes()
    except (OSError, KeyError) as error:
        raise HamletError(
            f"{folder} cannot be read ({type(error).__name__}: {error})", "copy it again"
        ) from None


def _episode_arrays(episode: Any, schema: Schema, name: str) -> dict[str, np.ndarray]:
    n = len(episode)

    def longer(x: Any, dtype: str) -> np.ndarray:
        """[n + 1]: a value for the final row too."""
        return np.append(np.asarray(x)[:n].astype(dtype), np.zeros(1, dtype))

    seen = episode.observations
    seen = seen if isinstance(seen, dict) else {OBSERVATION: seen}
    arrays: dict[str, np.ndarray] = {}
    for key, field in schema.fields.items():
        x = np.asarray(seen[key])
        if len(x) != n + 1:
            raise HamletError(
                f"{name}: {len(x)} observations `{key}` for {n} actions",
                "record one more observation than actions",
            )
        arrays[f"field.{key}"] = x.astype(field.dtype).reshape(n + 1, *field.trailing)
    arrays["action"] = longer(episode.actions, "int64")
    arrays["reward"] = longer(episode.rewards, "float32")
    # The episode's ending belongs to its last action only.
    ends = np.arange(n + 1) == n - 1
    flags = np.where(longer(episode.terminations, "bool"), TERMINATED, 0)
    flags |= np.where(longer(episode.truncations, "bool") & ends, TRUNCATED, 0)
    flags[n] = FINAL
    early = np.flatnonzero((flags[:n] & TERMINATED > 0) & ~ends[:n])
    if len(early):
        raise HamletError(
            f"{name}, row {early[0]}: terminated, {n - 1 - early[0]} steps before its end",
            "split the episode there",
        )
    arrays["flags"] = flags.astype("uint8")
    if schema.log_prob:
        arrays["log_prob"] = longer(episode.infos["log_prob"], "float32")
    if schema.action_mask:
        arrays["action_mask"] = np.asarray(seen["action_mask"]).astype(bool)
    return arrays
