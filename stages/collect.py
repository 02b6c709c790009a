"""collect: scripted personalities play the town; what they saw is kept beside what was true."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from hamlet.artifacts import HamletError, atomic_dir, require_space, write_card, write_json
from hamlet.modules.contracts import OBSERVATION_DTYPES, TownShape, others_of
from hamlet.moving import moved
from hamlet.params import Params
from hamlet.town import Scripted, Town, load_pack
from hamlet.town.personalities import HELD_OUT, TRAIN
from stages import paths
from stages.common import progress, stage

# Watchers, since the agent will be one and meet its like; visitors, so that all uses are seen.
PLAYERS = [*TRAIN, "expert", "random", *["expert_watching"] * 5, *["visitor"] * 2]
HELD_OUT_SEED, MORTAL_SEED = 1, 2  # added to the seed: other worlds, other maps


def make_town(params: Params, held_out: bool = False, device: str | torch.device = "cpu") -> Town:
    """The town of params.yaml, on a device; the held-out one has maps that training never saw."""
    return Town(
        load_pack(params.town.pack),
        num_layouts=params.town.layouts,
        layout_seed=params.seed + (1_000_003 if held_out else 0),
        device=device,
    )


def record(town: Town, state: TensorDict, players: Scripted, memory: TensorDict):
    """Play one tick; returns the new state and memory, and the tick [B] as it is recorded."""
    obs = town.observe(state)
    actions, goals, memory = players.act(state, memory)
    after = town.step_and_reset_core(state, actions)
    tick = TensorDict(
        {
            **{name: obs[name] for name in OBSERVATION_DTYPES},
            "action": actions,
            "goal": goals,
            "reward": after["reward"],
            "done": after["done"],
            "alive": state["alive"],
            "first": state["tick"] == 0,
            "meters": state["meters"],
            "position": state["position"],
            "others_meters": others_of(state["meters"].unsqueeze(0))[0],
            "hour": state["hour"],
            "places": town.affordance_cells[state["layout"]].to(torch.int16),
        },
        batch_size=state.batch_size,
    )
    return after, memory, tick


def main() -> None:
    with stage("collect") as s:
        params = s.params.collect
        for section in ("perception", "social"):
            chunk = getattr(s.params, section).chunk
            if params.ticks % chunk:
                raise HamletError(
                    f"params.yaml: collect.ticks is {params.ticks}, not a multiple of "
                    f"{section}.chunk ({chunk})",
                    f"set collect.ticks to {-(-params.ticks // chunk) * chunk}",
                )
        known = make_town(s.params, device=s.device)
        unknown = make_town(s.params, held_out=True, device=s.device)
        seed = s.params.seed
        groups = [
            (known, Scripted(known, PLAYERS, seed), params.worlds, seed),
            (
                unknown,
                Scripted(unknown, list(HELD_OUT), seed),
                params.held_out_worlds,
                seed + HELD_OUT_SEED,
            ),
            # Scripted personalities rarely die; whether death is foreseen shows in these.
            (
                unknown,
                Scripted(unknown, ["random"], seed),
                -(-params.held_out_worlds // 2),
                seed + MORTAL_SEED,
            ),
        ]
        states = [town.reset(world_seed, worlds) for town, _, worlds, world_seed in groups]
        memories = [group[1].reset(state) for group, state in zip(groups, states, strict=True)]
        lived, total = 0.0, 0.0
        with atomic_dir(paths.DATASET) as folder:
            data: Any = None
            for t in progress(range(params.ticks), "collect"):
                ticks = []
                for i, (town, players, _, _) in enumerate(groups):
                    states[i], memories[i], tick = record(town, states[i], players, memories[i])
                    ticks.append(tick)
                row: Any = moved(torch.cat(ticks), "cpu")
                if data is None:
                    shape = (params.ticks, *row.batch_size)
                    size = sum(v.nbytes for v in row.values()) * params.ticks
                    require_space(paths.DATASET, size)
                    data = row.unsqueeze(0).expand(shape).memmap_like(folder)
                data[t] = row
                lived += row["alive"].sum().item()
                total += row["reward"].sum().item()
            deaths = data["done"].sum().item()
        shape_of_town = TownShape.of(known)
        write_card(
            paths.DATASET,
            kind="dataset",
            schema={
                "fields": [
                    {"name": name, "dtype": str(x.dtype)[6:], "shape": list(x.shape)}
                    for name, x in sorted(data.items())
                ]
            },
            pack=known.pack.content_hash,
            extra={
                "town": shape_of_town.to_dict(),
                "worlds": params.worlds,
                "held_out_worlds": params.held_out_worlds,
                "personalities": list(TRAIN),
                "held_out_personalities": list(HELD_OUT),
                **s.made_on(),
            },
        )
        numbers = {
            "agent_ticks": lived,
            "mean_reward": total / max(lived, 1.0),
            "lives_ended": deaths,
            "share_alive": lived / data["alive"].numel(),
        }
        write_json(paths.metrics("collect"), numbers)
        s.run.metrics(numbers)


if __name__ == "__main__":
    main()
