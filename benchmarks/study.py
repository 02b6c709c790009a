"""Does every module matter? Module D trained anew without one of them, for as many ticks.

    dvc --cd benchmarks repro                           # every cell, then the table and the plot
    python -m benchmarks.study cell no_social 1         # one cell: a variant and a seed
    python -m benchmarks.study report                   # the table and the plot of what there is

Needs the frozen perception, world model and social model of the pipeline (`dvc repro`). A cell
trains module D as `params.yaml` has it but for fewer worlds and iterations (SHARES), the same for
all variants, and plays the held-out worlds with it; it is kept as JSON in `results/study`, and one
that was stopped goes on where it was. Rivals that learn from reward alone need the `bench` extra,
and begin anew if stopped. The last line of a cell is JSON: its mean return and its 95 % interval
over worlds. The report's intervals are over seeds, paired with the whole agent's.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.progress import track
from torch import Tensor
from torch.nn import functional as F

from benchmarks.given import GIVEN, LOOKING, NOTHING, not_looking, policy_without
from benchmarks.monolith import MonolithLives, train_monolith
from benchmarks.plain_town import PlainPlayers, shape_of, train_plain
from benchmarks.shifts import SHIFTS, shifted
from benchmarks.study_changes import changes, without_habits
from benchmarks.study_players import ActingExpert, Everyone, Resting, RivalLives, Sharing
from benchmarks.study_report import SEATED, SHIFTED, VARIANTS, plot, report, stale, table
from hamlet.artifacts import HamletError, atomic_path, read_json, sha256_json, write_json
from hamlet.learning.learner import Teacher
from hamlet.learning.population import Characters, Selves, play
from hamlet.learning.rollout import evaluate, fused_step
from hamlet.learning.train_policy import train_policy
from hamlet.learning.trials import try_habits
from hamlet.modules.agent import AgentState, Mind
from hamlet.modules.contracts import (
    Features,
    ImaginedFuture,
    RawObservation,
    TownShape,
)
from hamlet.modules.policy import LOGIT_CAP, Policy, soft_cap
from hamlet.params import Params, PolicyParams, load_params
from hamlet.town import Scripted, Town
from hamlet.town.personalities import HELD_OUT
from stages.collect import make_town
from stages.common import threads
from stages.evaluate import EVALUATION_SEED, ScriptedPlayers
from stages.policy import make_mind

if TYPE_CHECKING:
    from benchmarks.learning_peers import Learner

RESULTS = Path(__file__).parent / "results" / "study"
SHARES = {"worlds": 0.25, "ppo_iterations": 0.5}
HELD_OUT_WORLDS, FOCAL_WORLDS = 64, 256
REWARDED = ("sb3_recurrent_ppo", "lstm_ppo", "recurrent_dqn")
"""Rivals that learn from reward alone."""
PLAIN = ("plain", "plain_time")
REINFORCED = {"reinforced": 8, "reinforced_long": 96, "reinforced_sharing": 96}
"""Go on after imitation with PPO in which the expert tells nothing: the ticks of its rollouts,"""
REINFORCED_TICKS, FITTED_TICKS = 960, 96
"""for so many ticks, after these in which only the critic learns."""
RIVALS_WORLDS, RIVALS_EPOCHS, RIVALS_MINIBATCHES, RIVALS_UPDATES = 32, 2, 8, 12
"""More updates than these would cost more than the whole agent's processor time."""


class StudiedMind(Mind):
    """The mind without what a variant lacks."""

    variant: str

    def sense_features(
        self, obs: RawObservation, state: AgentState
    ) -> tuple[Features, Tensor, Tensor, Tensor]:
        if self.variant == "no_memory":
            state = state._replace(belief=torch.zeros_like(state.belief))
        f, *states = super().sense_features(obs, state)
        if self.variant == "no_social":
            nobody = {x: torch.zeros_like(getattr(f, x)) for x in ("rivals", "ahead")}
            f = f._replace(**nobody)
        if self.variant in (LOOKING, NOTHING):
            f = not_looking(f, self.policy.places)
        log_std, belief, social = states
        return f, log_std, belief, social

    def imagine(
        self, belief_log_std: Tensor, f: Features, mask: Tensor, candidates: Tensor
    ) -> tuple[ImaginedFuture, Tensor]:
        if self.variant not in ("no_imagination", "flat"):
            return super().imagine(belief_log_std, f, mask, candidates)
        nothing = torch.zeros(candidates.shape)
        each = nothing.unsqueeze(-1)
        known = f.known_state[:, None, None].expand(-1, candidates.shape[1], -1, -1)
        reason = torch.zeros_like(candidates)
        future = ImaginedFuture(reason[..., None], known, each, each, each, nothing, reason)
        return future, nothing


class RandomGoals(Policy):
    """All goals are as likely; the controller learns to pursue them."""

    apart = False

    def learned_logits(self, f: Features, places: Tensor | None = None) -> Tensor:
        return torch.zeros_like(f.rivals)

    def low_money_bias(self, known_state: Tensor) -> Tensor:
        return torch.zeros(())

    def goal_logits(self, prior: Tensor, *imagined: Tensor) -> Tensor:
        return prior


class Flat(Policy):
    """The action is chosen at once: every tick's goal is the action itself.

    Both levels' networks are there, as wide, but nobody says what the first should attend to, and
    nothing is held on to: the second is given the mean of the places by the first one's odds.
    """

    apart = False

    def learned_logits(self, f: Features, places: Tensor | None = None) -> Tensor:
        attended = super().learned_logits(f, places).softmax(-1)
        cells = self.cell_offsets(f)
        there = (-4 * cells.square().sum(0, True)).exp()
        facts = torch.cat([cells, self.offset_spread(f), there, self.posted_hours(f)])
        facts = (facts * attended[..., : facts.shape[-1]]).sum(-1).movedim(0, -1)
        look = self.way(f)
        look = look * look.new_tensor([self.shape.width, self.shape.height])
        offset = facts[..., :2] + attended[..., self.exploring, None] * look
        target = torch.cat([offset.clamp(-4, 4) / 4, facts[..., 2:]], -1)
        logits = soft_cap(self.controller(torch.cat([*self.own_facts(f), attended, target], -1)))
        return F.pad(logits, (0, self.shape.num_goals - logits.shape[-1]), value=-LOGIT_CAP)

    def low_money_bias(self, known_state: Tensor) -> Tensor:
        return torch.zeros(())

    def goal_logits(self, prior: Tensor, *imagined: Tensor) -> Tensor:
        return prior

    def action_logits(self, f: Features, goal: Tensor) -> Tensor:
        chosen = F.one_hot(goal, self.shape.num_goals)[..., : self.shape.num_actions]
        return LOGIT_CAP * chosen.to(f.mean.dtype)


class Shown:
    """A trainer's log that is a progress bar."""

    def __init__(self, title: str) -> None:
        self.title = title

    def steps(self, total: int, start: int) -> Any:
        return track(range(start, total), self.title)

    def record(self, step: int, metrics: dict[str, Tensor]) -> None:
        """What it would note is in the bar."""


def trained_rival(town: Town, variant: str, sizes: PolicyParams, seed: int, log: Shown) -> Learner:
    """Train one of REWARDED in all places of RIVALS_WORLDS worlds.

    Raises:
        HamletError: if what it needs of the `bench` extra is not installed.
    """
    try:
        from benchmarks.learning_peers import Clock, Everyone, LstmPPO, RecurrentPPO
        from benchmarks.recurrent_dqn import RecurrentDQN
    except ImportError as error:
        raise HamletError(
            f"{variant}: the `bench` extra is not installed",
            'pip install -c constraints.txt -e ".[bench]"',
        ) from error

    iterations = sizes.imitation_iterations + sizes.critic_iterations + sizes.ppo_iterations
    iterations = iterations * sizes.worlds // RIVALS_WORLDS
    lanes = Everyone(RIVALS_WORLDS, Clock(), town)
    learner: Learner
    if variant == "recurrent_dqn":
        learner = RecurrentDQN(lanes, sizes.rollout, RIVALS_UPDATES, iterations, sizes.hidden, seed)
    else:
        how = sizes.rollout, RIVALS_EPOCHS, RIVALS_MINIBATCHES, sizes.hidden, seed
        learner = LstmPPO(lanes, *how) if variant == "lstm_ppo" else RecurrentPPO(lanes, *how)
    for _ in log.steps(iterations, 0):
        learner.learn(1)
    return learner


def plain_ticks(params: Params, variant: str, seed: int) -> int:
    """Ticks of the town for the plain modules: as many as the whole agent, its data counted; or as
    many as take the processor time of the whole agent's cell, by the cells of the same seed.

    Raises:
        HamletError: if there are no such cells of a like processor.
    """
    sizes = params.policy
    iterations = sizes.imitation_iterations + sizes.critic_iterations + sizes.ppo_iterations
    ticks = iterations * sizes.rollout * sizes.worlds
    ticks += params.collect.ticks * (params.collect.worlds + params.collect.held_out_worlds)
    if variant == "plain":
        return ticks
    cells = [RESULTS / f"{name}-{seed}.json" for name in ("full", "plain")]
    whole, plain = (read_json(path) if path.exists() else {} for path in cells)
    alike = whole.get("processor") == plain.get("processor")
    if not whole.get("cpu_seconds") or not plain.get("cpu_seconds") or not alike:
        raise HamletError(
            f"{variant}: the times of {cells[0]} and {cells[1]}, on one kind of processor, "
            "are not known",
            f"run `python -m benchmarks.study cell full {seed}`, then `cell plain {seed}`",
        )
    return round(ticks * whole["cpu_seconds"] / plain["cpu_seconds"])


def minds(params: Params, town: Town, variant: str) -> tuple[StudiedMind, Callable]:
    """The variant with a new module D, and its blank minds."""
    kind = {"random_goals": RandomGoals, "flat": Flat}.get(variant, Policy)
    if variant in GIVEN:
        kind = policy_without(variant)
    whole, blank, _ = make_mind(params, town, kind)
    policy: Any = whole.policy
    if variant == "no_imagination":
        policy.prospects.menu.zero_()
    mind = StudiedMind(
        whole.perceive, whole.imagine_tick, whole.read_others, policy, whole.candidates,
        whole.horizon,
    )  # fmt: skip
    mind.variant, mind.fused_sense = variant, whole.fused_sense
    return mind, blank


Seated = Callable[[Town], tuple[Any, Any]]
"""Gives who plays in all places of a town, and its memory at first in HELD_OUT_WORLDS."""


def begun(player: Any, first: Any = HELD_OUT_WORLDS) -> tuple[Any, Any]:
    return player, player.start(first)


def scripted(name: str, seed: int) -> Seated:
    def seated(where: Town) -> tuple[Any, Any]:
        player = ScriptedPlayers(Scripted(where, [name], seed))
        return player, player.scripted.reset(where.reset(seed, HELD_OUT_WORLDS))

    return seated


def judged(where: Town, seated: Seated, seed: int) -> dict[str, Tensor]:
    """What is recorded of one life in each of HELD_OUT_WORLDS of a town."""
    player, memory = seated(where)
    where.eval(HELD_OUT_WORLDS)
    step = fused_step(where, player)
    return evaluate(where, step, memory, HELD_OUT_WORLDS, HELD_OUT_WORLDS, seed)


def trained(params: Params, variant: str, seed: int, town: Town, folder: Path) -> Seated:
    """Train one variant in the town.

    Args:
        folder: where it is kept while it is trained.
    """
    sizes, shape, file = params.policy, TownShape.of(town), folder / "checkpoint.pt"
    log = Shown(f"{variant}, seed {seed}")
    scripted = Scripted(town, [sizes.teacher], seed)
    teacher: Teacher = ActingExpert(scripted) if variant == "flat" else scripted
    if variant in REWARDED:
        learner = trained_rival(town, variant, sizes, seed, log)
        return lambda where: begun(RivalLives(where, learner, sizes.hidden))
    if variant in PLAIN:
        perception, policy, _ = train_plain(
            town, plain_ticks(params, variant, seed), seed, lambda what: Shown(f"{variant}: {what}")
        )
        return lambda where: begun(PlainPlayers(shape_of(where), perception, policy, seed))
    if variant == "monolith":
        model = train_monolith(town, shape, teacher, sizes, seed, file, log)
        return lambda where: begun(
            MonolithLives(where, shape, model), where.reset(seed, HELD_OUT_WORLDS)
        )
    co_players = None
    if variant == "alone":
        co_players = Resting(shape, shape.num_agents - 1)
        sizes = sizes.model_copy(update={"worlds": sizes.worlds * shape.num_agents})
    if variant in REINFORCED:
        sizes = sizes.model_copy(update={"critic_iterations": 0, "ppo_iterations": 0})
    if variant == "reinforced_sharing":
        town = Sharing(town.pack, layouts=town.affordance_cells)
    mind, blank = minds(params, town, variant)
    compiling = params.compile.model_copy(update={"rollout": False})  # too few ticks to pay
    done = train_policy(
        town, shape, mind, blank, sizes, compiling, seed, file, log,
        co_players=co_players, teacher=teacher,
    )  # fmt: skip
    if variant == "imitated":
        left: Any = mind.policy
        left.load_state_dict(done.imitated)
    elif variant != "alone":  # who has nobody to live with
        try_habits(town, shape, mind, blank, sizes.worlds, seed)
    if variant in REINFORCED:
        train_policy(
            town, shape, mind, blank, left_alone(sizes, REINFORCED[variant]), compiling, seed,
            folder / "alone.pt", Shown(f"{variant}, seed {seed}: alone"), done.critic,
        )  # fmt: skip
    draws = variant in ("random_goals", "flat")
    return lambda where: (Everyone(where, shape, mind, draws, blank), blank(HELD_OUT_WORLDS))


def left_alone(sizes: PolicyParams, ticks: int) -> PolicyParams:
    """PPO and nothing else, in rollouts of so many ticks; as many updates whatever their length."""
    return sizes.model_copy(
        update={
            "imitation_iterations": 0,
            "critic_iterations": FITTED_TICKS // ticks,
            "ppo_iterations": REINFORCED_TICKS // ticks,
            "minibatches": sizes.minibatches * ticks // sizes.rollout,
            "rollout": ticks,
            "kickstart_coef": 0.0,
        }
    )


def after_shifts(town: Town, seated: Seated, teacher: str | None, seed: int) -> dict[str, Any]:
    """Mean returns after each of SHIFTS, of who is seated; and, where a teacher is named, those of
    it and of the expert with the map, before and after."""
    towns = {name: shifted(town, name) for name in SHIFTS}

    def returns(where: Town, seated: Seated) -> float:
        return judged(where, seated, seed)["returns"].mean().item()

    found: dict[str, Any] = {
        "shifted": {name: returns(where, seated) for name, where in towns.items()}
    }
    if teacher:
        found["scripted"] = {
            name: {
                what: returns(where, scripted(name, seed))
                for what, where in {"none": town, **towns}.items()
            }
            for name in (teacher, "expert")
        }
    return found


def cell(params: Params, variant: str, seed: int) -> dict[str, Any]:
    """Train and play one variant with one seed; what it got in the worlds that `evaluate` plays.

    `cpu_seconds` is what all threads together took to train it, compiling included; None where a
    stopped training went on.
    """
    less = {name: round(share * getattr(params.policy, name)) for name, share in SHARES.items()}
    less["worlds"] += -less["worlds"] % params.policy.meta_period
    every_tick = {"meta_period": 1} if variant == "flat" else {}
    sizes = params.policy.model_copy(update=less | every_tick)
    judged_in = params.seed + EVALUATION_SEED
    params = params.model_copy(update={"policy": sizes, "seed": seed})
    settings = {"params": params.model_dump(mode="json"), "variant": variant}
    folder = Path("checkpoints") / f"study-{variant}-{seed}-{sha256_json(settings)[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    resumed, began = any(folder.iterdir()), time.process_time()
    seated = trained(params, variant, seed, make_town(params), folder)
    worked = None if resumed else time.process_time() - began
    town = make_town(params, held_out=True)
    lived = judged(town, seated, judged_in)
    returns = lived["returns"].mean(1)
    more: dict[str, Any] = {}
    if variant in SHIFTED:
        teacher = sizes.teacher if variant == "full" else None
        more |= after_shifts(town, seated, teacher, judged_in)
    if variant == "full":
        everyone: Everyone = seated(town)[0]
        more["changed"] = changes(
            everyone,
            lambda player: judged(town, lambda where: (player, seated(where)[1]), judged_in),
        )
        more["without"] = without_habits(
            everyone.mind, lambda: judged(town, seated, judged_in)["returns"].mean().item()
        )
    if variant in SEATED:
        everyone = seated(town)[0]
        seat = Selves(everyone.mind, everyone.shape, everyone.blank, 0, 1, imagines=True)
        strangers = Characters(Scripted(town, HELD_OUT, judged_in), 1, town.num_agents)
        focal = play(town, seat, strangers, FOCAL_WORLDS, judged_in)[:, 0]
        more["focal"] = focal.mean().item()
    shutil.rmtree(folder)
    return {
        "variant": variant,
        "seed": seed,
        "pack": town.pack.name,
        "mean_return": returns.mean().item(),
        "mean_return_ci95": 1.96 * returns.std().item() / len(returns) ** 0.5,
        "retired_fraction": lived["retired"].mean().item(),
        "cpu_seconds": worked,
        "processor": torch.backends.cpu.get_cpu_capability(),
        **more,
        "returns": [round(value, 3) for value in returns.tolist()],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_subparsers(dest="what", required=True)
    one = what.add_parser("cell", help="train and play one variant with one seed")
    one.add_argument("variant", choices=VARIANTS)
    one.add_argument("seed", type=int)
    what.add_parser("report", help="the table and the plot of the cells there are")
    args = parser.parse_args(arguments)
    params = load_params()
    torch.set_num_threads(threads())
    if args.what == "cell":
        found = cell(params, args.variant, args.seed)
        write_json(RESULTS / f"{args.variant}-{args.seed}.json", found)
        print(json.dumps({key: value for key, value in found.items() if key != "returns"}))
        return 0
    paths = sorted(RESULTS.glob("*-*.json"))
    cells = [read_json(path) for path in paths]
    if not cells:
        print(f"study: {RESULTS} holds no cell; run `dvc --cd benchmarks repro`")
        return 1
    if old := stale([path.stem for path in paths]):
        raise HamletError(
            f"made by other code, parameters or modules than these: {', '.join(old)}",
            "run `dvc --cd benchmarks repro`",
        )
    rows = report(cells)
    write_json(RESULTS.with_suffix(".json"), rows)
    with atomic_path(RESULTS.with_suffix(".md")) as path:
        path.write_text(table(rows, cells[0]["pack"]), encoding="utf-8")
    plot(rows, RESULTS.with_suffix(".svg"))
    print(RESULTS.with_suffix(".md").read_text())
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except HamletError as error:
        sys.exit(f"study: {error}")
