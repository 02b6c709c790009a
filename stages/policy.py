"""policy: train module D against the frozen A, B and C; freeze its four questions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pipeline.export.frozen import freeze, load_frozen
from pipeline.files import write_json
from pipeline.learning.train_policy import first_state, goal_targets, train_policy
from pipeline.modules.agent import AgentState, Mind
from pipeline.modules.contracts import Features, TownShape
from pipeline.modules.policy import Policy, PolicyAct, PolicyEnded, PolicyPrior, PolicyWeigh
from pipeline.params import Params
from pipeline.town import Town
from stages import paths
from stages.collect import make_town
from stages.common import stage
from stages.log import StageLog


def make_mind(
    params: Params, town: Town
) -> tuple[Mind, Callable[[int], AgentState], list[dict[str, Any]]]:
    """The frozen A, B and C with a new D, blank minds of a number of worlds, and the cards."""
    shape, sizes = TownShape.of(town), params.policy
    perceive, a_card = load_frozen(paths.PERCEPTION, shape.pack_hash)
    imagine_tick, b_card = load_frozen(paths.WORLD_MODEL, shape.pack_hash)
    read_others, c_card = load_frozen(paths.SOCIAL, shape.pack_hash)
    torch.manual_seed(params.seed)
    policy = Policy(
        shape,
        a_card["belief_dim"],
        sizes.hidden,
        goal_targets(town),
        sizes.meta_period,
        sizes.emergency,
    )
    mind = Mind(perceive, imagine_tick, read_others, policy, sizes.candidates, sizes.horizon)

    def blank(worlds: int) -> AgentState:
        dims = a_card["recurrent_dim"], shape.num_others, c_card["recurrent_dim"]
        return first_state(worlds, shape.num_agents, *dims)

    return mind, blank, [a_card, b_card, c_card]


def main() -> None:
    with stage("policy") as s:
        params = s.params.policy
        town = make_town(s.params)
        shape = TownShape.of(town)
        mind, blank, cards = make_mind(s.params, town)
        policy: Any = mind.policy
        a_card = cards[0]
        folder = s.checkpoint_dir("pipeline", extra=[card["sha256"] for card in cards])
        log = StageLog(s, folder, every=1)
        train_policy(
            town, shape, mind, blank, params, s.params.compile, s.params.seed,
            folder / "checkpoint.pt", log,
        )  # fmt: skip

        if not s.first:
            return
        f = {
            "mean": torch.zeros(4, a_card["belief_dim"]),
            "log_std": torch.zeros(4, policy.places),
            "known_state": torch.rand(4, shape.self_dim),
            "rivals": torch.zeros(4, shape.num_goals),
        }
        assert tuple(f) == Features._fields
        goal = {"goal": torch.zeros(4, dtype=torch.int64)}
        c = params.candidates
        weighed = {
            "prior": torch.zeros(4, shape.num_goals),
            "candidates": torch.zeros(4, c, dtype=torch.int64),
            "returns": torch.zeros(4, c),
            "confidence": torch.zeros(4, c),
        }
        ended = {"known_state": f["known_state"], **goal, "age": goal["goal"].clone()}
        for part, module, inputs, output in (
            ("prior", PolicyPrior(policy), f, "goal_logits"),
            ("ended", PolicyEnded(policy), ended, "ended"),
            ("weigh", PolicyWeigh(policy), weighed, "goal_logits"),
            ("act", PolicyAct(policy), f | goal, "action_logits"),
        ):
            freeze(
                module,
                inputs,
                [output],
                paths.POLICY[part],
                kind=f"policy_{part}",
                pack=shape.pack_hash,
                upstream={card["kind"]: card["sha256"] for card in cards},
                extra={
                    "places": policy.places,
                    "meta_period": params.meta_period,
                    "candidates": c,
                    "horizon": params.horizon,
                },
            )
        log.write(paths.curve("policy"))
        tail = log.rows[-1] if log.rows else {}
        write_json(paths.metrics("policy"), {k: v for k, v in tail.items() if k != "step"})


if __name__ == "__main__":
    main()
