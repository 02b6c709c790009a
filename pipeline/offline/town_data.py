"""The town's own data set (`stages.collect`) as a Minari data set, and back, to equality.

An episode is one agent's life: what it sensed, its actions, its rewards. It terminates where the
life ends; a life that the recording cut gives its last row as the final observation, and that row's
action is only kept. What is not for learning (the truth beside what was sensed, the rows of the
dead) stands in `infos`, so that nothing is lost.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from hamlet.artifacts import (
    HamletError,
    atomic_dir,
    check_card,
    require_space,
    write_card,
)
from hamlet.modules.contracts import OBSERVATION_DTYPES
from hamlet.offline.minari_data import minari_folder, open_minari

CARD = "hamlet_town"
GRIDS = ("view", "occupancy")
NAME, DATASETS = "hamlet/town-v0", "MINARI_DATASETS_PATH"
AT, TRUTH, REST = "town_at", "town_truth_", "town_rest_"
SENSED = tuple(OBSERVATION_DTYPES)
OF_WORLDS = ("first", "hour", "places")
"""Fields that are [T, W, ...]; the others are [T, W, N, ...]."""
ORDER = "fields"
OF_ANY_CARD = ("file", "kind", "sha256", "schema", "upstream", "pack")


def lives(first: np.ndarray) -> list[tuple[int, int]]:
    """(start, stop) of every life of a world, from first bool [T]: it begins anew there."""
    begins = sorted({0, *np.flatnonzero(first).tolist()})
    return list(zip(begins, [*begins[1:], len(first)], strict=True))


def from_town(dataset: Path, out: Path) -> int:
    """Write the data set as the Minari data set `out`; returns its episodes.

    Raises:
        HamletError: it is not a data set of the town; `out` exists.
    """
    card = check_card(dataset)
    if card["kind"] != "dataset":
        raise HamletError(f"{dataset} is not a data set but {card['kind']}", "name another one")
    if out.exists():
        raise HamletError(f"{out} exists", "remove it, or name another folder")
    recorded: Any = TensorDict.load_memmap(dataset)
    rows: dict[str, np.ndarray] = {name: x.numpy() for name, x in recorded.items()}
    require_space(out.parent, sum(x.nbytes for x in rows.values()))
    count = 0
    with tempfile.TemporaryDirectory(dir=out.parent.absolute()) as folder:
        kept: Any = None
        for world in range(rows["first"].shape[1]):
            buffers = _world(rows, world)
            if kept is None:
                kept = _create(Path(folder), buffers, rows)
            else:
                kept.storage.update_episodes(buffers)
            count += len(buffers)
        kept.storage.update_metadata({CARD: json.dumps(card | {ORDER: list(rows)})})
        (Path(folder) / NAME).rename(out)
    return count


def _world(rows: Mapping[str, np.ndarray], world: int) -> list[Any]:
    """The episodes of one world, as Minari's buffers."""
    from minari.data_collector import EpisodeBuffer

    agents, buffers = rows["action"].shape[2], []
    for start, stop in lives(rows["first"][:, world]):
        for agent in range(agents):
            own = {
                name: x[start:stop, world, agent] if _of_agents(name) else x[start:stop, world]
                for name, x in rows.items()
            }
            episode = _episode(own, np.array([world, agent, start]))
            buffers.append(EpisodeBuffer(**episode))
    return buffers


def _of_agents(name: str) -> bool:
    return name not in OF_WORLDS


def _episode(own: dict[str, np.ndarray], at: np.ndarray) -> dict[str, Any]:
    """One life [L, ...] as the fields of an `EpisodeBuffer`."""
    length, lived = len(own["alive"]), int(own["alive"].sum())
    over = bool(own["done"][lived - 1])
    # Of a life that was cut, what followed its last action is not known: that row is the final
    # observation. What follows a life's end in its last tick is not known either, nor needed.
    actions = lived if over or lived == 1 else lived - 1
    shown = np.minimum(np.arange(actions + 1), length - 1)
    ends = np.arange(actions) == actions - 1
    truth = {TRUTH + name: x for name, x in own.items() if name not in SENSED}
    rest = {REST + name: own[name][actions + 1 :] for name in SENSED}
    return {
        "observations": {name: _shown(name, own[name][shown]) for name in SENSED},
        "actions": own["action"][:actions],
        "rewards": own["reward"][:actions],
        "terminations": ends & over,
        "truncations": ends & (not over),
        "infos": {AT: at} | {name: x for name, x in (truth | rest).items() if len(x)},
    }


def _shown(name: str, x: np.ndarray) -> np.ndarray:
    """An observation as Minari keeps it: grids with a channel, flags as numbers.

    Not as uint8, which it would keep as lossy pictures.
    """
    if name in GRIDS:
        return x.astype(np.int16)[:, None]
    return x.astype(np.int8) if x.dtype == bool else x


def _create(folder: Path, buffers: list[Any], rows: Mapping[str, np.ndarray]) -> Any:
    """A new Minari data set of the first episodes, in `folder`/NAME."""
    import minari
    from gymnasium.spaces import Box, Dict, Discrete, MultiBinary

    def space(name: str) -> Any:
        shape = rows[name].shape[3:]
        if name in GRIDS:
            return Box(0, 255, (1, *shape), np.int16)
        if rows[name].dtype == bool:
            return MultiBinary(shape[0])
        if rows[name].dtype == np.int64:
            return Box(-(2**62), 2**62, shape, np.int64)
        return Box(-np.inf, np.inf, shape, rows[name].dtype.type)

    before = os.environ.get(DATASETS)
    os.environ[DATASETS] = str(folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that nobody signed the data set
            return minari.create_dataset_from_buffers(
                NAME, buffers,
                observation_space=Dict({name: space(name) for name in SENSED}),
                action_space=Discrete(rows["action_mask"].shape[-1]),
                description="Scripted characters in a town of Hamlet, a life an episode.",
            )  # fmt: skip
    finally:
        os.environ.pop(DATASETS)
        if before is not None:
            os.environ[DATASETS] = before


# ------------------------------------------------------------------------------------------------
# Back


def to_town(data: Path, out: Path) -> int:
    """Write what `from_town` made of a data set as that data set, with its card; returns its rows.

    Raises:
        HamletError: it was not made by `from_town`; `out` exists.
    """
    folder = minari_folder(data)
    if folder is None:
        raise HamletError(f"{data} is not a Minari data set", "name its folder")
    dataset = open_minari(folder)
    card = json.loads(dataset.storage.metadata.get(CARD, "null"))
    if card is None:
        raise HamletError(
            f"{data} was not made of a town's data set", "make it by `hamlet offline from-town`"
        )
    if out.exists():
        raise HamletError(f"{out} exists", "remove it, or name another folder")
    fields = {x["name"]: x for x in card["schema"]["fields"]}
    order = [name for name in card[ORDER] if name in fields]
    empty: Any = TensorDict(
        {name: torch.zeros(1, dtype=getattr(torch, fields[name]["dtype"])).expand(
            fields[name]["shape"]) for name in order},
        batch_size=fields["first"]["shape"],
    )  # fmt: skip
    require_space(out, sum(x.numel() * x.element_size() for x in empty.values()))
    with atomic_dir(out) as temporary:
        rows: Any = empty.memmap_like(temporary)
        for episode in dataset.iterate_episodes():
            _put_back({name: x.numpy() for name, x in rows.items()}, episode)
    extra = {name: x for name, x in card.items() if name not in (*OF_ANY_CARD, ORDER)}
    write_card(out, card["kind"], card["schema"], card["upstream"], card["pack"], extra)
    return int(np.prod(fields["first"]["shape"]))


def _put_back(rows: Mapping[str, np.ndarray], episode: Any) -> None:
    """Write one life's rows to where they were."""
    world, agent, start = (int(x) for x in episode.infos[AT])
    for name, x in rows.items():
        if TRUTH + name in episode.infos:
            own = episode.infos[TRUTH + name]
        else:
            own = episode.observations[name]
            own = own[:, 0] if name in GRIDS else own
            length = len(episode.infos[TRUTH + "alive"])
            own = np.concatenate([own[:length], episode.infos.get(REST + name, own[:0])])
        stop = start + len(own)
        if _of_agents(name):
            x[start:stop, world, agent] = own
        else:
            x[start:stop, world] = own
