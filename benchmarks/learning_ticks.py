"""Speed of play: a tick, whole and in parts, and the rollout of perception on all cores.

Part of `benchmarks.learning`. The rollout with perception runs in one process with a thread for
every core, and in as many processes with one thread and a part of the worlds each.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from hamlet.export.frozen import load_frozen
from hamlet.learning.buffer import RolloutBuffer
from hamlet.learning.compiling import compiled
from hamlet.learning.learner import (
    ACTION_STREAM,
    GOAL_STREAM,
    Learner,
    RolloutCarry,
    gumbel,
    slots_of,
)
from hamlet.learning.precision import Precision
from hamlet.learning.rollout import Record, fused_step
from hamlet.modules.agent import AgentState
from hamlet.modules.contracts import Features, TownShape, observation_from
from hamlet.modules.critic import Critic
from hamlet.params import Params
from stages import paths
from stages.collect import make_town
from stages.common import cores, keep_memory
from stages.policy import make_mind


class Setting:
    """The town of params.yaml, the frozen modules, a new policy and a critic."""

    def __init__(self, params: Params) -> None:
        self.params, self.town = params, make_town(params)
        self.shape = TownShape.of(self.town)
        self.mind, self.blank, _ = make_mind(params, self.town)
        self.mind.perceive, self.mind.read_others = (
            load_frozen(path, self.shape.pack_hash)[0] for path in (paths.PERCEPTION, paths.SOCIAL)
        )
        self.critic = Critic(self.shape, params.policy.hidden)

    def slots(self, worlds: int) -> int:
        return worlds * self.shape.num_agents


class Reflexes(Learner):
    """Perception and the controller alone: nobody's intentions, nothing imagined, no critic."""

    def act(self, world: TensorDict, seen: TensorDict, memory: RolloutCarry, *context: Any) -> Any:
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
        return (
            action.unflatten(0, (-1, n)),
            RolloutCarry(state._replace(belief=belief), None),
            record,
        )


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

    def act(self, world: TensorDict, seen: TensorDict, memory: RolloutCarry, *context: Any) -> Any:
        n, (thinking, _) = self.shape.num_agents, context
        action, agent, _ = self.mind.sample_step(
            observation_from(seen, 2), memory.agent, slots_of(thinking, n), *[torch.zeros(())] * 2
        )
        return action.unflatten(0, (-1, n)), RolloutCarry(agent, None), {}


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
        self.memory = RolloutCarry(setting.blank(worlds), None)
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
