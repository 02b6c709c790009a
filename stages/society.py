"""The members of a population, their matches, and how the next one is raised; see `population`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hamlet.artifacts import HamletError
from hamlet.export.frozen_policy import load_policy
from hamlet.learning.population import (
    Characters,
    Selves,
    Standing,
    Strangers,
    chances,
    play,
    standing,
)
from hamlet.learning.train_policy import policy_precision, train_policy
from hamlet.modules.agent import Mind
from hamlet.modules.contracts import TownShape
from hamlet.modules.critic import Critic
from hamlet.town import Scripted, Town
from hamlet.town.evolution import founders, next_generation
from hamlet.town.personalities import HELD_OUT, AgentDNA
from stages.collect import make_town
from stages.common import Stage, progress
from stages.log import StageLog
from stages.paths import home
from stages.policy import keep_policy, make_mind

# Added to the seed: worlds that no other stage plays.
MATCH_SEED, FOCAL_SEED, NURSERY_SEED = 11, 12, 13


class Society:
    """The members so far, and what is needed to seat them in worlds.

    Args:
        s: the running stage.
        folder: where the members are kept, each in a folder of its own.
    """

    def __init__(self, s: Stage, folder: Path) -> None:
        self.stage, self.params, self.folder = s, s.params, folder
        self.town = make_town(s.params, device=s.device)
        self.unknown = make_town(s.params, held_out=True, device=s.device)
        self.shape = TownShape.of(self.town)
        self.mind, self.blank, self.cards = make_mind(s.params, self.town)
        self.half = self.shape.num_agents // 2
        self.members: list[Any] = []

    def join(self, number: int) -> None:
        self.members.append(load_policy(home(self.folder, number), self.shape, self.town.device)[0])

    def seat(self, policy: Any, first: int, last: int, imagines: bool = True) -> Selves:
        m, sizes = self.mind, self.params.policy
        mind = Mind(
            m.perceive, m.imagine_tick, m.read_others, policy, sizes.candidates, sizes.horizon
        )
        mind.fused_sense = m.fused_sense
        return Selves(mind, self.shape, self.blank, first, last, imagines)

    def characters(
        self, town: Town, first: int, who: Sequence[str | AgentDNA] | None = None
    ) -> Characters:
        return Characters(Scripted(town, who, self.params.seed), first, town.num_agents)

    def match(self, one: int, other: int) -> Tensor:
        """float64 [worlds, 2] mean return of either member's half of the agents."""
        mine = self.seat(self.members[one], 0, self.half)
        theirs = self.seat(self.members[other], self.half, self.shape.num_agents)
        worlds, seed = self.params.population.worlds, self.params.seed + MATCH_SEED
        returns = play(self.town, mine, theirs, worlds, seed).cpu()
        return torch.stack([returns[:, : self.half].mean(1), returns[:, self.half :].mean(1)], -1)

    def among_characters(self, member: int) -> float:
        """Mean return of a member's half beside the characters of training."""
        mine = self.seat(self.members[member], 0, self.half)
        theirs = self.characters(self.town, self.half)
        worlds, seed = self.params.population.worlds, self.params.seed + MATCH_SEED
        return play(self.town, mine, theirs, worlds, seed)[:, : self.half].mean().item()

    def focal(self, member: int) -> Tensor:
        """float64 [worlds] return of one of its kind among held-out characters."""
        mine = self.seat(self.members[member], 0, 1)
        theirs = self.characters(self.unknown, 1, HELD_OUT)
        worlds, seed = self.params.population.focal_worlds, self.params.seed + FOCAL_SEED
        return play(self.unknown, mine, theirs, worlds, seed)[:, 0].cpu()

    def grow(self, people: list[AgentDNA], number: int) -> list[AgentDNA]:
        """The next generation of characters, by how they fare beside the newest member."""
        mine = self.seat(self.members[-1], 0, self.half)
        theirs = self.characters(self.town, self.half, people)
        worlds, seed = self.params.population.worlds, self.params.seed + NURSERY_SEED + number
        returns = play(self.town, mine, theirs, worlds, seed)[:, self.half :].cpu()
        who = theirs.scripted.reset(self.town.reset(seed, worlds))["character"]
        who = who[:, self.half :].cpu()
        lives = torch.bincount(who.flatten(), minlength=len(people))
        total = torch.bincount(who.flatten(), returns.flatten(), len(people))
        rng = torch.Generator().manual_seed(seed)
        return next_generation(people, total / lives.clamp_min(1), rng)

    def train(self, number: int, people: Sequence[AgentDNA], won: Tensor) -> None:
        """Train the next member from the last one and keep it in its folder.

        Args:
            won: float [members] share of worlds in which the last one beats each member.
        """
        s, sizes = self.stage, self.params.policy
        policy: Any = self.mind.policy
        critic = Critic(self.shape, sizes.hidden).to(self.town.device)
        weights = torch.load(home(self.folder, number - 1) / "weights.pt", weights_only=True)
        policy.load_state_dict(weights["policy"])
        critic.load_state_dict(weights["critic"])
        visitor, _ = load_policy(home(self.folder, 0), self.shape, self.town.device)
        co_players = Strangers(
            self.characters(self.town, self.half, people),
            self.seat(visitor, self.half, self.shape.num_agents, imagines=False),
            self.members,
            chances(won),
        )
        only_ppo = {
            "imitation_iterations": 0,
            "ppo_iterations": self.params.population.iterations,
        }
        folder = self.folder / f"round_{number}"
        folder.mkdir(exist_ok=True)
        log = StageLog(s, folder, every=1)
        trained = train_policy(
            self.town, self.shape, self.mind, self.blank, sizes.model_copy(update=only_ppo),
            self.params.compile, self.params.seed + number, folder / "checkpoint.pt", log, critic,
            co_players,
        )  # fmt: skip
        made_on = s.made_on(policy_precision(self.params.compile, s.device))
        kept = home(self.folder, number)
        keep_policy(policy, trained, self.shape, self.params, self.cards, kept, made_on)


def compare(society: Society, met: dict[tuple[int, int], Tensor]) -> Standing:
    """The standing of all members; plays the matches that are not among those `met`.

    Every pair meets in both seatings, so that what a seat is worth in these worlds favours nobody.
    """
    k = range(len(society.members))
    missing = [(i, j) for i in k for j in k if (i, j) not in met]
    for i, j in progress(missing, "population: matches"):
        met[i, j] = society.match(i, j)
    rows = [[torch.cat([met[i, j], met[j, i].flip(-1)]) for j in k] for i in k]
    return standing(torch.stack([torch.stack(row) for row in rows]))


def raised(s: Stage, folder: Path) -> dict[str, Any]:
    """Raise a population from the policy in `folder`; what is found, the winner's number in it.

    Raises:
        HamletError: an agent is alone in this world.
    """
    society, rounds = Society(s, folder), s.params.population.rounds
    if not society.half:
        raise HamletError(
            f"params.yaml: population.rounds is {rounds}, but in {society.shape.pack} an agent is "
            "alone",
            "set population.rounds to 0",
        )
    people, met = founders(), dict[tuple[int, int], Tensor]()
    society.join(0)
    for number in range(1, rounds + 1):
        if not (home(folder, number) / "weights.pt.json").exists():
            won = compare(society, met).wins[number - 1]
            society.train(number, people, won)
        society.join(number)
        people = society.grow(people, number)
    found = compare(society, met)
    everyone: progress[int] = progress(rounds + 1, "population: among characters")
    among = [society.among_characters(k) for k in everyone]
    score = (found.payoff.mean(1) + torch.tensor(among, dtype=torch.float64)) / 2
    winner = int(score.argmax())
    focal = {member: society.focal(member) for member in {0, winner}}
    gain = focal[winner] - focal[0]
    mean, margin = gain.mean().item(), 1.96 * gain.std().item() / len(gain) ** 0.5
    return {
        "winner": winner,
        "score": score.tolist(),
        "among_characters": among,
        **{name: value.tolist() for name, value in found._asdict().items()},
        "focal_score_of_policy": focal[0].mean().item(),
        "focal_score": focal[winner].mean().item(),
        "focal_gain": mean,
        "focal_gain_ci95": [mean - margin, mean + margin],
        "characters": [asdict(dna) for dna in people],
    }
