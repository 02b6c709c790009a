"""What reinforcement added is the difference of two policies in the same worlds, and its error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hamlet.learning.learner import weights_of
from hamlet.learning.population import Selves, play_alone
from hamlet.modules.contracts import TownShape
from hamlet.params import load_params
from hamlet.town import Town, load_pack
from stages import reinforced
from tests.learning.minds import new_mind

ROOT = Path(__file__).parents[1]
WORLDS = 5


def test_the_gain_is_paired_and_of_what_the_policy_stage_kept(monkeypatch, tmp_path):
    params = load_params(ROOT / "params.yaml")
    sized = params.population.model_copy(update={"worlds": WORLDS})
    params = params.model_copy(update={"population": sized, "seed": 3})
    pack = load_pack("l4_contention").model_copy(update={"lifespan": 16})
    held_out, mine = Town(pack, num_layouts=8, layout_seed=5), Town(pack, num_layouts=8)
    mind, blank = new_mind(held_out, params.policy)
    imagined, imagine = [], mind.imagine
    monkeypatch.setattr(mind, "imagine", lambda *asked: imagined.append(1) or imagine(*asked))
    kept = {}
    for name, action in (("imitated", "WAIT"), ("policy", "INTERACT"), ("critic", "UP")):
        with torch.no_grad():  # each does little but one thing
            bias = mind.policy.controller[-1].bias.zero_()
            bias[held_out.action_names.index(action)] = 8
        kept[name] = weights_of(mind.policy)
    torch.save(kept, tmp_path / "weights.pt")
    monkeypatch.setattr(reinforced.paths, "POLICY", tmp_path)
    towns = {True: held_out, False: mine}
    monkeypatch.setattr(
        reinforced, "make_town", lambda params, held_out=False, **_: towns[held_out]
    )
    monkeypatch.setattr(reinforced, "make_mind", lambda *_: (mind, blank, []))
    told = reinforced.reinforced(params, torch.device("cpu"))
    assert imagined

    seat = Selves(mind, TownShape.of(held_out), blank, 0, held_out.num_agents, imagines=True)
    returns = []
    for name in ("imitated", "policy"):
        mind.policy.load_state_dict(kept[name])
        returns.append(play_alone(held_out, seat, WORLDS, 3 + reinforced.JUDGED_SEED).mean(1))
    before, after = returns
    gain = after - before
    assert gain.std() > 0.01
    assert gain.abs().mean() > 0.1
    assert (before.std() - gain.std()).abs() > 0.001
    assert told == {
        "imitated_return": pytest.approx(before.mean().item()),
        "reinforced_return": pytest.approx(after.mean().item()),
        "reinforcement_gain": pytest.approx(gain.mean().item()),
        "reinforcement_gain_ci95": pytest.approx(1.96 * gain.std().item() / WORLDS**0.5),
    }
