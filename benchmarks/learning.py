"""Speed of learning in the town: the policy's PPO against two recurrent PPOs made elsewhere.

    python -m benchmarks.learning [--small]

Needs the frozen modules (`dvc repro`) and, for the peers, `pip install -e ".[bench]"`. Learning
runs in one process on the cores it may use; ours and the peers take turns, the peers as their users
run them and once more with our batched worlds (see `learning_peers`). They live in the town of
`easy.yaml`: there work is equal. An agent-step is one agent's tick: observed, believed, decided,
played, and learned from `epochs` times (by the critic; by the choice of goals where the agent
deliberates). The rollout with perception runs in one process with a thread for every core, and in
as many processes with one thread and a part of the worlds each. The last line is JSON, also written
to `results/learning/PACK.json`; the ratios are between rows of that run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from benchmarks import learning_peers as peers
from pipeline.files import HamletError
from pipeline.learning.buffer import RolloutBuffer
from pipeline.learning.compiling import compiled
from pipeline.learning.learner import ACTION_STREAM, GOAL_STREAM, Learner, Memory, gumbel, slots_of
from pipeline.learning.precision import Precision, best_precision
from pipeline.learning.rollout import Record, fused_step
from pipeline.learning.train_policy import train_policy
from pipeline.modules.agent import AgentState
from pipeline.modules.contracts import Features, TownShape, observation_from
from pipeline.modules.critic import Critic
from pipeline.params import CompileParams, Params, load_params
from pipeline.profiling import Watch, profiled
from stages.collect import make_town
from stages.common import cores, keep_memory
from stages.policy import make_mind

RESULTS = Path(__file__).parent / "results" / "learning"
MANY = 4  # times the worlds of params.yaml, where the batch is what is measured
EVERYONE = "_everyone"  # after the name of a peer to whom our batched worlds are lent


class Setting:
    """The town of params.yaml, the frozen modules, a new policy and a critic."""

    def __init__(self, params: Params) -> None:
        self.params, self.town = params, make_town(params)
        self.shape = TownShape.of(self.town)
        self.mind, self.blank, _ = make_mind(params, self.town)
        self.critic = Critic(self.shape, params.policy.hidden)

    def slots(self, worlds: int) -> int:
        return worlds * self.shape.num_agents


class Window:
    """A trainer's log that watches a window of its steps and then ends the training."""

    class Over(Exception):
        pass

    def __init__(self, skip: int, count: int, folder: Path) -> None:
        self.skip, self.count, self.folder = skip, count, folder
        self.first = 0.0

    def steps(self, total: int, start: int) -> Iterator[int]:
        began = time.perf_counter()
        for item in profiled(range(total), self.skip, self.count, self.folder / "trace.json"):
            if isinstance(item, Watch):
                self.watch = item
                raise Window.Over
            yield item
            self.first = self.first or time.perf_counter() - began

    def record(self, step: int, metrics: dict[str, Tensor]) -> None:
        """Nobody reads it here; stages do."""


@contextmanager
def compiling_in(folder: str) -> Iterator[None]:
    """What was compiled is looked for, and kept, in this folder instead of the user's own."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    own = os.environ.get(name)
    os.environ[name] = folder
    try:
        yield
    finally:
        del os.environ[name]
        if own is not None:
            os.environ[name] = own


def learning(
    setting: Setting, compile: bool, precision: Precision, count: int, worlds: int
) -> dict[str, float]:
    """`count` iterations of PPO as the stage `policy` runs them, after two of warm-up."""
    stage = setting.params.policy
    only_ppo = {
        "imitation_iterations": 0, "critic_iterations": 0, "ppo_iterations": count + 4,
        "max_kl": 1e9, "worlds": worlds,
    }  # fmt: skip
    sizes = stage.model_copy(update=only_ppo)
    how = CompileParams(rollout=compile, update=compile, precision=precision)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        log = Window(2, count, Path(folder))
        with suppress(Window.Over):
            train_policy(
                setting.town, setting.shape, setting.mind, setting.blank, sizes, how,
                setting.params.seed, Path(folder) / "checkpoint.pt", log,
            )  # fmt: skip
    watch = log.watch
    steps = count * sizes.rollout * setting.slots(sizes.worlds)
    shares = watch.shares()
    updates = count * sizes.epochs * sizes.minibatches
    return {
        "agent_steps_per_s": steps / watch.total,
        "update_ms": 1e3 * watch.total * (shares["loss"] + shares["optimizer"]) / updates,
        "data_share": shares["data"],
        "accounted_share": 1 - shares["other"],
        "first_iteration_s": log.first,
    }


class Reflexes(Learner):
    """Perception and the controller alone: nobody's intentions, nothing imagined, no critic."""

    def act(self, world: TensorDict, seen: TensorDict, memory: Memory, *context: Any) -> Any:
        obs, state, n = observation_from(seen, 2), memory.agent, self.shape.num_agents
        mean, log_std, known, _, belief = self.mind.perceive(
            obs.view, obs.occupancy, obs.self_state, obs.cues, obs.visible, obs.others_offset,
            state.belief,
        )  # fmt: skip
        places = self.mind.policy.places
        nobody = torch.zeros_like(known[:, :1]).expand(-1, self.shape.num_goals)
        none = nobody[:, : self.shape.num_affordances, None].expand(-1, -1, 3)
        f = Features(mean, log_std[:, :places], known, nobody, none, state.goal, state.moved)
        action, chosen, logits = reflexes(self, f, world, obs.action_mask)
        record: Record = {"action": action, "goal": chosen, "action_logits": logits}
        return action.unflatten(0, (-1, n)), Memory(state._replace(belief=belief), None), record


def reflexes(player: Learner, f: Features, world: TensorDict, mask: Tensor) -> tuple[Tensor, ...]:
    """A sampled goal and action for every agent, and the logits of its actions."""
    shape, policy = player.shape, player.mind.policy
    goal_noise = gumbel(world, shape.num_agents, shape.num_goals, GOAL_STREAM)
    noise = gumbel(world, shape.num_agents, shape.num_actions, ACTION_STREAM)
    goal = (policy.prior_logits(f) + goal_noise).argmax(-1)
    logits = policy.action_logits(f, goal).masked_fill(~mask, -3.4e38)
    return (logits + noise).argmax(-1), goal, logits


class Greedy(Learner):
    """What evaluation needs: the likeliest goals and actions, and nothing to learn from."""

    def act(self, world: TensorDict, seen: TensorDict, memory: Memory, *context: Any) -> Any:
        n, (thinking, _) = self.shape.num_agents, context
        action, agent, _ = self.mind.explore(
            observation_from(seen, 2), memory.agent, slots_of(thinking, n), *[torch.zeros(())] * 2
        )
        return action.unflatten(0, (-1, n)), Memory(agent, None), {}


_others_ready: Callable[[], Any] = lambda: None  # noqa: E731 - of a process that is not alone


def timed(function: Callable[[], Any], seconds: float) -> float:
    """Median milliseconds of a call, after two calls of warm-up; at the same time as in all other
    processes of a `rollout` that has several."""
    function(), function()
    _others_ready()
    taken: list[float] = []
    until = time.perf_counter() + seconds
    while len(taken) < 5 or time.perf_counter() < until:
        began = time.perf_counter()
        function()
        taken.append(1e3 * (time.perf_counter() - began))
    return statistics.median(taken)


class Ticks:
    """Times one tick of play of `worlds` worlds, whole and in parts, in one precision."""

    def __init__(self, setting: Setting, worlds: int, precision: Precision, seconds: float) -> None:
        self.setting, self.seconds, self.precision = setting, seconds, precision
        self.slots = setting.slots(worlds)
        period = setting.params.policy.meta_period
        self.world = setting.town.reset(0, worlds)
        self.memory = Memory(setting.blank(worlds), None)
        self.context = (torch.arange(worlds // period) * period, None)

    def whole(self, kind: type[Learner], compile: bool, mind: Any = None) -> float:
        """Milliseconds of a fused tick of that player."""
        s = self.setting
        player = kind(s.town, s.shape, mind or s.mind, s.critic, None)
        step = fused_step(s.town, player, compile, self.precision)
        return timed(lambda: step(self.world, self.memory, *self.context), self.seconds)

    def separately(self) -> float:
        """The tick in eager mode with each of A, B and C compiled by itself."""
        mind = self.setting.mind
        apart = type(mind)(
            compiled(mind.perceive), compiled(mind.imagine_tick), compiled(mind.read_others),
            mind.policy, mind.candidates, mind.horizon,
        )  # fmt: skip
        return self.whole(Learner, False, apart)

    def parts(self) -> dict[str, float]:
        """Milliseconds of the parts of `Reflexes`' tick, each compiled alone."""
        s, bf16 = self.setting, self.precision == "bf16"
        player = Learner(s.town, s.shape, s.mind, s.critic, None)
        obs = observation_from(s.town.observe(self.world), 2)
        action = torch.zeros(len(self.world), s.shape.num_agents, dtype=torch.int64)
        state: AgentState = self.memory.agent
        zero = torch.zeros(self.slots, s.shape.num_goals)

        def perceive(o: Any, recurrent: Tensor) -> Any:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                return s.mind.perceive(
                    o.view, o.occupancy, o.self_state, o.cues, o.visible, o.others_offset,
                    recurrent,
                )  # fmt: skip

        def decide(f: Features, world: TensorDict, mask: Tensor) -> Any:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                return reflexes(player, f, world, mask)

        def play(world: TensorDict, action: Tensor) -> Any:
            return s.town.observe(world), s.town.step_and_reset_core(world, action)

        mean, log_std, known, *_ = perceive(obs, state.belief)
        none, places = torch.zeros(self.slots, s.shape.num_affordances, 3), s.mind.policy.places
        f = Features(mean, log_std[:, :places], known, zero, none, state.goal, state.moved)
        work: dict[str, tuple[Callable, tuple]] = {
            "town": (play, (self.world, action)),
            "perception": (perceive, (obs, state.belief)),
            "decision": (decide, (f, self.world, obs.action_mask)),
        }
        found = {}
        for name, (function, inputs) in work.items():
            found[name] = timed(partial(compiled(function), *inputs), self.seconds)
        return found

    def copies(self) -> float:
        """Milliseconds of keeping one tick's record in the buffer."""
        s = self.setting
        step = fused_step(s.town, Learner(s.town, s.shape, s.mind, s.critic, None))
        record = step(self.world, self.memory, *self.context)[2]
        buffer = RolloutBuffer(1)

        def keep() -> None:
            buffer.reset()
            buffer.add(record)

        return timed(keep, self.seconds)

    def resets(self) -> dict[str, float | None]:
        """Milliseconds of the town's compiled tick with the next life begun in three ways.

        None where inductor does not compile it.
        """
        town, world = self.setting.town, self.world
        action = torch.zeros(len(world), town.num_agents, dtype=torch.int64)
        where = compiled(town.step_and_reset_core)
        core, renew = compiled(town.step_core), compiled(town.renew)

        def host() -> Any:
            after = core(world, action)
            over = after["episode_over"]
            return renew(after, over) if bool(over.any()) else after

        names = [str(name) for name in town.step_core(world, action).keys()]  # noqa: SIM118

        def with_cond(state: TensorDict, chosen: Tensor) -> dict[str, Tensor]:
            after = town.step_core(state, chosen)
            over = after["episode_over"]

            def begin(over: Tensor, *fields: Tensor) -> tuple[Tensor, ...]:
                whole = TensorDict(dict(zip(names, fields, strict=True)), [over.shape[0]])
                renewed = town.renew(whole, over)
                return tuple(renewed[name].contiguous().clone() for name in names)

            def stay(over: Tensor, *fields: Tensor) -> tuple[Tensor, ...]:
                return tuple(field.contiguous().clone() for field in fields)

            fields = tuple(after[name].contiguous() for name in names)
            outs = torch.cond(over.any(), begin, stay, (over, *fields))
            return dict(zip(names, outs, strict=True))

        cond = torch.compile(with_cond, fullgraph=True)
        found: dict[str, float | None] = {
            "where": timed(lambda: where(world, action), self.seconds),
            "host_branch": timed(host, self.seconds),
        }
        try:
            found["cond"] = timed(lambda: cond(world, action), self.seconds)
        except Exception as error:  # of inductor's, of any class
            found["cond"] = None
            print(f"  cond does not compile: {' '.join(str(error).split())[:200]}", flush=True)
        return found


def rollout(params: Params, worlds: int, precision: Precision, seconds: float) -> dict[str, float]:
    """A tick of perception's rollout and its parts, of this process."""
    with torch.no_grad():
        ticks = Ticks(Setting(params), worlds, precision, seconds)
        parts, whole = ticks.parts(), ticks.whole(Reflexes, True)
    return {
        "agent_steps_per_s": 1e3 * ticks.slots / whole,
        "over_its_parts": whole / sum(parts.values()),
        "whole_ms": whole,
        **{f"{name}_ms": value for name, value in parts.items()},
    }


def prepare(threads: int, barrier: Any) -> None:
    """A process of a `rollout`, which measures when all have got to the same place."""
    global _others_ready
    warnings.simplefilter("ignore")
    keep_memory()
    torch.set_num_threads(threads)
    _others_ready = barrier.wait


def rollouts(
    params: Params, worlds: int, precision: Precision, seconds: float, ranks: int
) -> dict[str, float]:
    """`rollout` of so many processes, which share worlds and cores: the sum of what they play, and
    the mean of what it takes."""
    context = multiprocessing.get_context("spawn")
    given = cores() // ranks, context.Barrier(ranks, timeout=1200)
    with ProcessPoolExecutor(ranks, context, initializer=prepare, initargs=given) as pool:
        asked = params, worlds // ranks, precision, seconds
        rows = [one.result() for one in [pool.submit(rollout, *asked) for _ in range(ranks)]]
    mean = {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}
    return mean | {"agent_steps_per_s": ranks * mean["agent_steps_per_s"]}


def recompilations(setting: Setting, iterations: int) -> dict[str, int]:
    """Graphs compiled after the first two of many iterations of a small PPO, and graph breaks."""
    small = {"worlds": 4, "rollout": 4, "minibatches": 1, "epochs": 1}
    policy = setting.params.policy.model_copy(
        update=small | {"imitation_iterations": 0, "critic_iterations": 0,
                        "ppo_iterations": iterations, "max_kl": 1e9}
    )  # fmt: skip
    stats = torch._dynamo.utils.counters

    class Count:
        def steps(self, total: int, start: int) -> Iterator[int]:
            for step in range(total):
                if step == 2:
                    self.warm = stats["stats"]["unique_graphs"]
                yield step

        def record(self, step: int, metrics: dict[str, Tensor]) -> None:
            """Only the counters matter."""

    torch._dynamo.reset()
    stats.clear()
    log = Count()
    with tempfile.TemporaryDirectory() as folder:
        train_policy(
            setting.town, setting.shape, setting.mind, setting.blank, policy,
            CompileParams(rollout=True, update=True, precision="auto"), 0,
            Path(folder) / "checkpoint.pt", log,
        )  # fmt: skip
    return {
        "graphs": log.warm,
        "recompiles": stats["stats"]["unique_graphs"] - log.warm,
        "graph_breaks": sum(stats["graph_break"].values()),
        "iterations": iterations,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a quick run; nothing is written")
    small = parser.parse_args(arguments).small
    warnings.simplefilter("ignore")
    try:
        setting = Setting(load_params("params.yaml"))
    except HamletError as error:
        print(f"learning: {error}", file=sys.stderr)
        return 2
    keep_memory()
    torch.set_num_threads(cores())
    policy = setting.params.policy
    if small:
        policy = policy.model_copy(update={"worlds": 16, "rollout": 8})
        setting.params = setting.params.model_copy(update={"policy": policy})
    fast = best_precision("cpu")
    count, seconds, rounds = (1, 0.1, 1) if small else (5, 2.0, 2)
    result: dict[str, Any] = {
        "pack": setting.town.pack.name, "threads": cores(), "worlds": policy.worlds, "best": fast
    }  # fmt: skip

    def keep(result: dict[str, Any]) -> dict[str, Any]:
        """`result` in four digits, written as far as it goes: a stop loses one section."""
        text = json.dumps(result)
        rounded = json.loads(text, parse_float=lambda number: float(f"{float(number):.4g}"))
        if not small:
            RESULTS.mkdir(exist_ok=True)
            file = RESULTS / f"{setting.town.pack.name}.json"
            file.write_text(json.dumps(rounded, indent=1) + "\n")
        return rounded

    print("learning, end to end", flush=True)
    rows: dict[str, list[dict[str, float]]] = {}
    others: dict[str, list[peers.Peer]] = {
        peer + lent: [] for peer in ("recurrent_ppo", "lstm_ppo") for lent in ("", EVERYONE)
    }
    best, many = f"compiled_{fast}", MANY * policy.worlds
    with tempfile.TemporaryDirectory() as cold:
        for _ in range(rounds):
            both: list[Precision] = list(dict.fromkeys(("fp32", fast)))
            ways = [(compile, p, policy.worlds) for compile in (True, False) for p in both]
            for compile, precision, worlds in [*ways, *((True, p, many) for p in both)]:
                name = f"{'compiled' if compile else 'eager'}_{precision}"
                name += f"_{worlds}" if worlds != policy.worlds else ""
                torch._dynamo.reset()
                with compiling_in(cold) if name == best else nullcontext():
                    row = learning(setting, compile, precision, count, worlds)
                rows.setdefault(name, []).append(row)
                print(f"  {name:24} {row['agent_steps_per_s']:9,.0f} agent-steps/s", flush=True)
            for name, seen in others.items():
                everyone = name.endswith(EVERYONE)
                worlds = peers.EVERYONES_WORLDS if everyone and not small else peers.STOCK_WORLDS
                seen.append(
                    peers.measure(
                        name.removesuffix(EVERYONE), worlds=worlds, rollout=policy.rollout,
                        epochs=policy.epochs,
                        minibatches=min(worlds, policy.minibatches), hidden=policy.hidden,
                        iterations=1 if small else 3, threads=cores(), everyone=everyone,
                    )
                )  # fmt: skip
                speed = seen[-1].steps / seen[-1].seconds
                print(f"  {name:24} {speed:9,.0f} agent-steps/s", flush=True)

        def speed_of(name: str) -> float:
            return statistics.median(row["agent_steps_per_s"] for row in rows[name])

        def update_ms(name: str) -> float:
            return statistics.median(row["update_ms"] for row in rows[name])

        def peer_speed(name: str) -> float:
            return statistics.median(p.steps / p.seconds for p in others[name])

        result |= {
            "agent_steps_per_s": speed_of(best),
            "agent_steps_per_s_of_many": speed_of(f"{best}_{many}"),
            "over_sb3_recurrent": speed_of(best) / peer_speed("recurrent_ppo"),
            "over_lstm_ppo": speed_of(best) / peer_speed("lstm_ppo"),
            "over_sb3_recurrent_everyone": speed_of(best) / peer_speed(f"recurrent_ppo{EVERYONE}"),
            "over_lstm_ppo_everyone": speed_of(best) / peer_speed(f"lstm_ppo{EVERYONE}"),
            "compiled_over_eager": speed_of(best) / speed_of(f"eager_{fast}"),
            "compiled_over_eager_fp32": speed_of("compiled_fp32") / speed_of("eager_fp32"),
            "bf16_over_fp32_update": update_ms("compiled_fp32") / update_ms(best),
            "bf16_over_fp32_update_of_many": update_ms(f"compiled_fp32_{many}")
            / update_ms(f"{best}_{many}"),
            "cold_compile_s": rows[best][0]["first_iteration_s"],
            "warm_compile_s": rows[best][-1]["first_iteration_s"],
            "learning": {
                name: {k: statistics.median(r[k] for r in seen) for k in seen[0]}
                for name, seen in rows.items()
            },
            "peers": {name: [p._asdict() for p in seen] for name, seen in others.items()},
        }

    keep(result)

    worlds = policy.worlds
    by_size = {}
    for size in [worlds] if small else [MANY * worlds, 2 * MANY * worlds]:
        for ranks in sorted({1, cores()}):
            name = f"{size}_worlds_{ranks}_processes"
            by_size[name] = rollouts(setting.params, size, fast, seconds, ranks)
            print(f"  perception's rollout, {name}: {by_size[name]}", flush=True)
    result["rollout"] = by_size
    top = max(by_size.values(), key=lambda row: row["agent_steps_per_s"])
    result["rollout_agent_steps_per_s"] = top["agent_steps_per_s"]
    result["rollout_over_its_parts"] = top["over_its_parts"]
    keep(result)

    counted = recompilations(setting, 5 if small else 1000)
    result |= {"recompiles": counted["recompiles"], "graph_breaks": counted["graph_breaks"],
               "counted_iterations": counted["iterations"]}  # fmt: skip
    keep(result)

    print("a tick of play", flush=True)
    with torch.no_grad():
        torch._dynamo.reset()
        ticks = Ticks(setting, worlds, fast, seconds)
        row = {
            "eager": ticks.whole(Learner, False),
            "separately": ticks.separately(),
            "fused": ticks.whole(Learner, True),
            "evaluation_fused": ticks.whole(Greedy, True),
            "copies": ticks.copies(),
        }
        result["tick_ms"] = row
        print("  " + "  ".join(f"{k} {v:.2f} ms" for k, v in row.items()), flush=True)
        torch._dynamo.reset()
        result["reset_ms"] = Ticks(setting, worlds, "fp32", seconds).resets()
        print(f"  resets {result['reset_ms']}", flush=True)
    rounded = keep(result)
    print(f"ratio over RecurrentPPO: {rounded['over_sb3_recurrent']}")
    print(json.dumps(rounded))
    return 0


if __name__ == "__main__":
    sys.exit(main())
