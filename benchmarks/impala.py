"""Does IMPALA reach PPO's return from the same start, and what are actors worth?

    python -m benchmarks.impala [--seeds 3]

Needs the frozen perception, world model and social model of a pipeline of the easy town
(`hamlet preset quick`, then `dvc repro policy`). One imitation, shrunk, teaches the controller and
the critic; what chooses goals is drawn anew for every seed, so that there is something to gain. PPO
and IMPALA go on from there for as many rollouts of as many worlds, each with the better of two
learning rates and the expert's goals in the loss with their usual weight (`kickstart_coef`), and
the start and both play held-out worlds. Then IMPALA learns for a few iterations in one process and
with two actors, in turns, and the agent-steps per second are compared.

A seed's numbers are kept as results/impala/SEED.json, from which a run that was stopped goes on;
results/impala.json and impala.md hold all. Intervals are over seeds (Student's t), paired by seed.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.study_report import interval
from hamlet.artifacts import HamletError, atomic_path, read_json, write_json
from hamlet.learning.actors import Cast
from hamlet.learning.population import Selves, play_alone
from hamlet.learning.rollout import Record
from hamlet.learning.train_policy import train_policy
from hamlet.modules.contracts import TownShape
from hamlet.modules.critic import Critic
from hamlet.params import Params, PolicyParams, load_params
from stages.collect import make_town
from stages.common import threads
from stages.evaluate import EVALUATION_SEED
from stages.policy import make_actor, make_mind

RESULTS = Path(__file__).parent / "results" / "impala"
WORLDS, HELD_OUT_WORLDS = 32, 32
START = {
    "worlds": 64, "imitation_iterations": 50, "critic_iterations": 0, "ppo_iterations": 0,
}  # fmt: skip
KEPT = Path("checkpoints") / "benchmark-impala.pt"
GOING_ON = {"imitation_iterations": 0, "critic_iterations": 4, "ppo_iterations": 100}
CHANGED = {
    "worlds": WORLDS, "rollout": 32, "minibatches": 8, "max_kl": 0.1, "imitation_minibatches": 8,
}  # fmt: skip
RATES = {"ppo": 3e-3, "impala": 6e-3}
"""The better of these two for each, in one training of the first seed with each."""
TIMED, TURNS = 12, 2  # iterations, the first of which is not counted
ALGORITHMS = ("ppo", "impala")


class Timed:
    """A trainer's log that keeps when every iteration ended."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.ends: list[float] = []
        self.last: dict[str, float] = {}
        self.shown = time.monotonic()

    def steps(self, total: int, start: int) -> Iterator[int]:
        for step in range(start, total):
            yield step
            self.ends.append(time.monotonic())
            if self.ends[-1] - self.shown > 30:
                self.shown = self.ends[-1]
                print(f"{self.what}: {step + 1}/{total}", file=sys.stderr, flush=True)

    def record(self, step: int, metrics: Record) -> None:
        self.last = {name: float(value) for name, value in metrics.items()}

    def seconds(self) -> float:
        """Of all iterations but the first."""
        return self.ends[-1] - self.ends[0]


def sized(params: Params, **changes: Any) -> Params:
    return params.model_copy(update={"policy": params.policy.model_copy(update=CHANGED | changes)})


def trained(
    params: Params, seed: int, log: Timed, start: Any = None, cast: Cast | None = None
) -> tuple[Any, Critic]:
    """Module D and its critic after one training, from `start`'s if it is given."""
    town = make_town(params)
    shape = TownShape.of(town)
    mind, blank, _ = make_mind(params.model_copy(update={"seed": seed}), town)
    critic = None
    if start:
        policy: Any = mind.policy
        policy.load_state_dict(start[0].state_dict())
        critic = copy.deepcopy(start[1])
    with TemporaryDirectory() as folder:
        found = train_policy(
            town, shape, mind, blank, params.policy, params.compile, seed,
            Path(folder) / "checkpoint.pt", log, critic, cast=cast,
        )  # fmt: skip
    return mind.policy, found.critic


def held_out(params: Params, policy: Any) -> list[float]:
    """The mean return of every held-out world."""
    town = make_town(params, held_out=True)
    shape = TownShape.of(town)
    mind, blank, _ = make_mind(params, town)
    own: Any = mind.policy
    own.load_state_dict(policy.state_dict())
    seat = Selves(mind, shape, blank, 0, shape.num_agents, imagines=True)
    returns = play_alone(town, seat, HELD_OUT_WORLDS, params.seed + EVALUATION_SEED).mean(1)
    return [round(x, 3) for x in returns.tolist()]


def imitated(params: Params) -> None:
    """Keep the controller and the critic that all seeds begin with, unless they are there."""
    if KEPT.is_file():
        return
    log = Timed("imitation")
    policy, critic = trained(sized(params, **START), params.seed, log)
    print(f"imitation: action agreement {log.last['action_agreement']:.2f}", file=sys.stderr)
    KEPT.parent.mkdir(exist_ok=True)
    torch.save({"policy": policy.state_dict(), "critic": critic.state_dict()}, KEPT)


def start_of(params: Params, seed: int) -> tuple[Any, Critic]:
    """The imitated controller and critic with goals that nobody taught."""
    town = make_town(params)
    kept = torch.load(KEPT, weights_only=True)
    policy: Any = make_mind(params.model_copy(update={"seed": seed}), town)[0].policy
    controller = {k: v for k, v in kept["policy"].items() if k.startswith("controller.")}
    policy.load_state_dict(policy.state_dict() | controller)
    critic = Critic(TownShape.of(town), params.policy.hidden)
    critic.load_state_dict(kept["critic"])
    return policy, critic


def of_seed(params: Params, seed: int) -> dict[str, Any]:
    """Returns and seconds of the start and of both algorithms."""
    start = start_of(params, seed)
    found: dict[str, Any] = {"seed": seed, "start": {"returns": held_out(params, start[0])}}
    for algorithm in ALGORITHMS:
        log = Timed(f"seed {seed}, {algorithm}")
        own = {"algorithm": algorithm, "learning_rate": RATES[algorithm]}
        sizes = sized(params, **own, **GOING_ON)
        policy, _ = trained(sizes, seed, log, start)
        found[algorithm] = {
            "returns": held_out(params, policy), "seconds": log.seconds(), "last": log.last,
        }  # fmt: skip
    for name in ("start", *ALGORITHMS):
        found[name]["mean"] = statistics.fmean(found[name]["returns"])
        print(f"seed {seed}, {name}: {found[name]['mean']:.1f}", file=sys.stderr, flush=True)
    return found


def throughput(params: Params) -> dict[str, list[float]]:
    """Agent-steps per second of IMPALA, in turns: in one process, with two actors."""
    sizes = sized(
        params, algorithm="impala", imitation_iterations=0, critic_iterations=0,
        ppo_iterations=TIMED, worlds=params.policy.worlds,
    )  # fmt: skip
    agents = TownShape.of(make_town(params)).num_agents
    policy: PolicyParams = sizes.policy
    steps = (TIMED - 1) * policy.worlds * policy.rollout * agents
    rates: dict[str, list[float]] = {"one process": [], "two actors": []}
    for _ in range(TURNS):
        for name in rates:
            cast = Cast(2, partial(make_actor, sizes)) if name == "two actors" else None
            log = Timed(name)
            trained(sizes, params.seed, log, cast=cast)
            rates[name].append(steps / log.seconds())
            print(f"{name}: {rates[name][-1]:.0f} agent-steps/s", file=sys.stderr, flush=True)
    return rates


def summary(seeds: Sequence[dict[str, Any]], rates: dict[str, list[float]]) -> dict[str, Any]:
    means = {name: [x[name]["mean"] for x in seeds] for name in ("start", *ALGORITHMS)}

    def paired(one: str, other: str) -> dict[str, float]:
        mean, half = interval([a - b for a, b in zip(means[one], means[other], strict=True)])
        return {"mean": mean, "half_ci95": half}

    return {
        "seeds": [x["seed"] for x in seeds],
        "returns": {name: statistics.fmean(values) for name, values in means.items()},
        "by_seed": means,
        "seconds": {
            name: statistics.fmean(x[name]["seconds"] for x in seeds) for name in ALGORITHMS
        },
        "impala_over_ppo": paired("impala", "ppo"),
        "ppo_over_start": paired("ppo", "start"),
        "impala_over_start": paired("impala", "start"),
        "agent_steps_per_second": rates,
    }


def table(found: dict[str, Any], params: Params) -> str:
    """The kept report."""

    def told(name: str) -> str:
        x = found[name]
        return f"{x['mean']:+.1f} ± {x['half_ci95']:.1f}"

    rates = {k: statistics.fmean(v) for k, v in found["agent_steps_per_second"].items()}
    samples = GOING_ON["ppo_iterations"] * WORLDS * CHANGED["rollout"]
    lines = [
        "# IMPALA beside PPO", "",
        f"By `python -m benchmarks.impala`, in {params.town.pack}, {len(found['seeds'])} seeds. "
        f"The start has the controller of {START['imitation_iterations']} iterations of imitation "
        f"with {START['worlds']} worlds, and untaught goals; both go on from it for "
        f"{GOING_ON['ppo_iterations']} rollouts of {WORLDS} worlds "
        f"({samples} world-ticks), after {GOING_ON['critic_iterations']} for the critic alone, "
        f"the expert's goals in the loss, at learning rates of {RATES['ppo']:g} (PPO) and "
        f"{RATES['impala']:g} (IMPALA); IMPALA lags by {params.policy.lag}. Mean return in "
        f"{HELD_OUT_WORLDS} held-out worlds; ± is half the 95 % interval over seeds, paired.", "",
        "| | return | by seed | seconds |", "| --- | --- | --- | --- |",
    ]  # fmt: skip
    for name, label in (("start", "start"), ("ppo", "PPO"), ("impala", "IMPALA")):
        each = ", ".join(f"{x:.0f}" for x in found["by_seed"][name])
        seconds = f"{found['seconds'][name]:.0f}" if name in found["seconds"] else ""
        lines.append(f"| {label} | {found['returns'][name]:.1f} | {each} | {seconds} |")
    lines += [
        "",
        f"IMPALA less PPO {told('impala_over_ppo')}; PPO less the start {told('ppo_over_start')}, "
        f"IMPALA less the start {told('impala_over_start')}.", "",
        f"Agent-steps per second of IMPALA with {params.policy.worlds} worlds, updates included: "
        f"{rates['one process']:.0f} in one process, {rates['two actors']:.0f} with two actors, "
        f"{rates['two actors'] / rates['one process']:.2f} times; {TURNS} runs of each in turns, "
        f"on a machine of two cores that others used too.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    count = parser.parse_args(arguments).seeds
    params = load_params()
    torch.set_num_threads(threads())
    imitated(params)
    for seed in range(count):
        kept = RESULTS / f"{seed}.json"
        if not kept.is_file():
            write_json(kept, of_seed(params, seed))
    if not (RESULTS / "rates.json").is_file():
        write_json(RESULTS / "rates.json", throughput(params))
    seeds = [read_json(RESULTS / f"{seed}.json") for seed in range(count)]
    found = summary(seeds, read_json(RESULTS / "rates.json"))
    write_json(RESULTS.with_suffix(".json"), found)
    with atomic_path(RESULTS.with_suffix(".md")) as path:
        path.write_text(table(found, params), encoding="utf-8")
    print(RESULTS.with_suffix(".md").read_text())
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except HamletError as error:
        sys.exit(f"impala: {error}")
