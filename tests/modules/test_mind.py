"""think(): the sampled tick of training and the deterministic one that is exported agree."""

from __future__ import annotations

import pytest
import torch

from hamlet.modules.agent import SHOCK, AgentState, Mind, Thoughts, should_switch_goal, surprised
from hamlet.modules.categorical import log_prob_of, masked_logits
from hamlet.modules.contracts import Features, observation_from
from hamlet.modules.perception import Perception
from hamlet.modules.policy import BROKE, EARNING, FRESH, IDLING, POSTED, Policy
from hamlet.modules.social import Social
from hamlet.modules.world_model import WorldModel
from hamlet.town.tables import menu, timetable
from stages.agent import thinking

PERIOD, WORLDS = 4, 6


@pytest.fixture
def mind(town, shape):
    perception, world_model = Perception(shape, 16, 4), WorldModel(shape, 4, 24, 3)
    targets = torch.zeros(shape.num_goals, 8)
    targets[torch.arange(8), torch.arange(8)] = 0.9
    told = targets, timetable(town.pack), menu(town.pack)
    policy = Policy(shape, perception.belief_dim, 24, *told, PERIOD, 0.2)
    torch.nn.init.normal_(policy.future_weight[-1].weight, std=2.0)  # imagination matters
    torch.nn.init.normal_(perception.location_table.weight, std=0.1)
    mind = Mind(perception, world_model, Social(shape, 8), policy, candidates=3, horizon=3)
    return mind.requires_grad_(False).eval()


@pytest.fixture
def moment(town, shape, mind):
    """Observations and minds of 24 agents in the middle of a life."""
    rng = torch.Generator().manual_seed(3)
    world = town.reset(4, WORLDS)
    for _ in range(5):
        world = town.step_core(world, torch.randint(4, (WORLDS, shape.num_agents), generator=rng))
    slots = WORLDS * shape.num_agents
    state = AgentState(
        torch.cat([torch.randn(slots, 16, generator=rng), torch.zeros(slots, shape.num_cells)], 1),
        torch.randn(slots, shape.num_others, mind.read_others.recurrent_dim, generator=rng),
        torch.randint(shape.num_goals, (slots,), generator=rng),
        torch.randint(6, (slots,), generator=rng),
        torch.arange(slots),
        torch.randint(shape.num_actions + 1, (slots,), generator=rng),
        torch.rand(slots, shape.num_meters, generator=rng),
        torch.rand(slots, generator=rng) / 100,
        torch.randint(2**31 - 2, (slots,), generator=rng),
    )
    return observation_from(town.observe(world), 2), state


def test_with_the_same_noise_explore_is_forward(mind, moment, shape):
    obs, state = moment
    slots = len(state.goal)
    slice_ = torch.arange(0, slots, PERIOD)
    noise, _ = mind.draw(state.rng, shape.num_actions)
    action, after, record = mind.sample_step(
        obs, state, slice_, torch.zeros(slots, shape.num_goals), noise
    )
    expected, *rest = mind(*obs, *state)
    torch.testing.assert_close(action, expected)
    for name, ours, theirs in zip(AgentState._fields[:6], after, rest, strict=False):
        torch.testing.assert_close(ours, theirs, msg=name)
    assert record["deliberate"].nonzero().flatten().tolist() == slice_.tolist()
    thoughts = Thoughts(*rest[len(AgentState._fields) :])
    decided = record["decide"]
    torch.testing.assert_close(
        record["goal_log_prob"][decided],
        log_prob_of(thoughts.goal_logits, record["goal"])[decided],
        atol=1e-5, rtol=1e-5,
    )  # fmt: skip
    torch.testing.assert_close(
        record["action_log_prob"], log_prob_of(thoughts.action_logits, action), atol=1e-5, rtol=1e-5
    )
    assert record["goal"].unique().numel() > 1


@pytest.mark.parametrize("sampled", [True, False])
def test_one_step_is_sampled_or_deterministic_by_a_flag(mind, moment, shape, sampled):
    """The flag is a tensor: it chooses the noise, and the step has no branch."""
    obs, state = moment
    slots = len(state.goal)
    slice_ = torch.arange(0, slots, PERIOD)
    noise = [mind.draw(state.rng, n)[0] for n in (shape.num_goals, shape.num_actions)]
    silence = [torch.zeros_like(x) for x in noise]

    def step(flag, *noise):
        drawn = [torch.cond(flag, torch.clone, torch.zeros_like, (x,)) for x in noise]
        return mind.sample_step(obs, state, slice_, *drawn)

    ours = step(torch.tensor(sampled), *noise)
    alone = mind.sample_step(obs, state, slice_, *(noise if sampled else silence))
    other = mind.sample_step(obs, state, slice_, *(silence if sampled else noise))
    assert torch.equal(ours[0], alone[0])
    assert not torch.equal(ours[0], other[0])
    for name, one in ours[2].items():
        assert torch.equal(one, alone[2][name]), name


def test_what_is_recorded_is_enough_to_see_the_decision_again(mind, moment, shape):
    """PPO's first epoch starts at ratio 1: logits from the record give the recorded log-probs."""
    obs, state = moment
    slots = len(state.goal)
    rng = torch.Generator().manual_seed(8)
    noise = [
        -(-torch.rand(slots, n, generator=rng).clamp_min(1e-9).log()).log()
        for n in (shape.num_goals, shape.num_actions)
    ]
    _, _, r = mind.sample_step(obs, state, torch.arange(0, slots, PERIOD), *noise)
    f = Features(*(r[f"f_{name}"] for name in Features._fields))
    prior = mind.policy.prior_logits(f)
    considered = mind.policy.goal_logits(
        prior, r["candidates"], r["imagined_return"], r["imagined_confidence"]
    )
    goal_logits = torch.where(r["deliberate"].unsqueeze(-1), considered, prior)
    torch.testing.assert_close(log_prob_of(goal_logits, r["goal"]), r["goal_log_prob"])
    action_logits = masked_logits(mind.policy.action_logits(f, r["goal"]), r["mask"])
    torch.testing.assert_close(log_prob_of(action_logits, r["action"]), r["action_log_prob"])
    assert r["mask"].gather(1, r["action"].unsqueeze(1)).all()


def test_the_agents_own_noise_draws_actions_by_their_odds(mind):
    """Frequencies over one long life match the softmax of the logits within 4 deviations."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    rng, counts, ticks = torch.arange(512), torch.zeros(4), 200
    for _ in range(ticks):
        noise, rng = mind.draw(rng, 4)
        counts += torch.bincount((logits + noise).argmax(-1), minlength=4)
    total, p = 512 * ticks, logits.softmax(-1)
    assert ((counts - total * p).abs() < 4 * (total * p * (1 - p)).sqrt()).all()
    assert rng.unique().numel() == 512


def test_an_illegal_action_is_never_taken_or_imagined_first(mind, moment):
    obs, state = moment
    only = torch.zeros_like(obs.action_mask)
    only[:, 5] = True  # WAIT
    out = mind(*obs._replace(action_mask=only), *state)
    assert (out[0] == 5).all()
    future, _ = mind.imagine(
        mind.sense(obs, state)[0].log_std,
        mind.sense(obs, state)[3],
        only,
        torch.zeros(len(state.goal), 3, dtype=torch.int64),
    )
    assert (future.actions[..., 0] == 5).all()


def test_a_batch_is_its_rows(mind, moment):
    obs, state = moment
    together = mind(*obs, *state)
    row = 7
    alone = mind(*(x[row : row + 1] for x in obs), *(x[row : row + 1] for x in state))
    for ours, theirs in zip(together, alone, strict=True):
        torch.testing.assert_close(ours[row : row + 1], theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("meters", "goal", "age", "ended"),
    [
        ({0: 0.95}, 0, 1, True),  # its target is reached
        ({0: 0.5}, 0, 1, False),
        ({0: 0.5}, 0, PERIOD, True),  # too old
        ({0: 0.5}, 0, 0, True),  # there is none yet
        ({0: 0.1}, 0, 2, False),  # low energy, but the goal serves it
        ({0: 0.1}, 1, 2, True),  # an emergency
        ({0: 0.1}, 1, 1, False),  # which gives every goal two ticks
        ({6: 0.1}, 1, 3, True),
    ],
)
def test_when_a_goal_ends(mind, shape, meters, goal, age, ended):
    known = torch.full((1, shape.self_dim), 0.5)
    for index, level in meters.items():
        known[0, index] = level
    known[0, 1] = min(known[0, 1], 0.5)
    got = mind.policy.goal_ended(known, torch.tensor([goal]), torch.tensor([age]))
    assert got.tolist() == [ended]


def test_the_first_thought_knows_what_is_pursued_and_what_is_open(mind, moment, shape):
    obs, state = moment
    young = state._replace(goal_age=torch.zeros_like(state.goal_age))
    f, at_birth = mind.sense(obs, state)[3], mind.sense(obs, young)[3]
    assert (at_birth.pursued == shape.num_goals).all()
    assert torch.equal(f.pursued[state.goal_age > 0], state.goal[state.goal_age > 0])
    thought = mind.policy.prior_logits
    for goal in range(shape.num_goals):
        pursuing = f._replace(pursued=torch.full_like(f.pursued, goal))
        assert not torch.equal(thought(pursuing), thought(at_birth)), goal

    known = f.known_state.clone()
    age = shape.self_names.index("age")
    hours = []
    for tick in (0, 12):  # the same hour half a day later, but for what is posted
        known[:, age] = tick / shape.lifespan
        hours.append(mind.policy.place_facts(f._replace(known_state=known))[-5:-2])
    assert not torch.equal(*hours)


@pytest.mark.parametrize("tick", [0, 1, 12, 71, 72, 10_000])
def test_the_timetable_is_read_at_the_tick_that_is_lived(mind, moment, shape, town, tick):
    f = mind.sense(*moment)[3]
    known = f.known_state.clone()
    known[:, shape.self_names.index("age")] = tick / shape.lifespan
    expected = timetable(town.pack)[min(tick, shape.lifespan)]
    for column, posted in zip(
        expected.unbind(-1), mind.policy.posted_now(f._replace(known_state=known)), strict=True
    ):
        assert torch.equal(posted, column.expand_as(posted))


def test_a_goal_is_dropped_for_one_that_is_clearly_preferred(mind, moment, shape):
    """And kept while none is, whatever the first thought would choose anew."""
    prior = torch.tensor([[0.0, 0.4, -3.0], [0.0, 0.6, -3.0], [0.0, 0.6, -3.0]])
    assert should_switch_goal(prior, torch.tensor([0, 0, 1])).tolist() == [False, True, False]
    obs, state = moment
    state = state._replace(clock=torch.ones_like(state.clock), goal_age=torch.ones_like(state.goal))
    f = mind.sense(obs, state)[3]
    wanted = mind.policy.prior_logits(f).argmax(-1)
    content, torn = state._replace(goal=wanted), state._replace(goal=(wanted + 1) % shape.num_goals)
    open_ended = ~mind.policy.goal_ended(f.known_state, wanted, state.goal_age)
    assert open_ended.any()
    for pursuing in (content, torn):
        prior = mind.policy.prior_logits(mind.sense(obs, pursuing)[3])
        expected = torch.where(
            should_switch_goal(prior, pursuing.goal), prior.argmax(-1), pursuing.goal
        )
        ended = mind.policy.goal_ended(f.known_state, pursuing.goal, pursuing.goal_age)
        goal = mind(*obs, *pursuing)[3]
        assert torch.equal(goal[~ended], expected[~ended])


def test_who_is_broke_and_tired_leans_to_work_and_away_from_rest(mind, moment, shape):
    obs, state = moment
    f, policy = mind.sense(obs, state)[3], mind.policy
    known = f.known_state[:1].expand(4, -1).clone()
    money, energy = shape.meter_names.index("money"), shape.meter_names.index("energy")
    known[:, money] = torch.tensor([BROKE - 0.01, BROKE - 0.01, BROKE, BROKE])
    known[:, energy] = torch.tensor([FRESH - 0.01, FRESH, FRESH - 0.01, FRESH])
    lives = Features(*(x[:1].expand(4, *x.shape[1:]) for x in f))._replace(known_state=known)
    urged = policy.prior_logits(lives) - policy.learned_logits(lives)
    assert not urged[1:].any()
    expected = torch.zeros(shape.num_goals)
    expected[money] = EARNING  # of the fixture: the goal of that number is to restore that meter
    expected[shape.goal_names.index("rest")] = IDLING
    torch.testing.assert_close(urged[0], expected)


def test_the_agent_stage_imagines_only_where_somebody_deliberates(mind, moment, monkeypatch):
    obs, state = moment
    asked = []
    consider = mind.consider
    monkeypatch.setattr(mind, "consider", lambda *x: asked.append(1) or consider(*x))
    think = thinking(mind)
    for clock in (0, 1, 2, 3, 4):
        now = state._replace(clock=torch.full_like(state.clock, clock))
        asked.clear()
        found = think(*obs, *now)
        assert len(asked) == (clock % PERIOD == 0)
        for ours, theirs in zip(found, mind(*obs, *now), strict=True):
            assert torch.equal(ours, theirs)


def test_what_is_foreseen_is_the_first_tick_of_the_future_that_was_chosen(mind, moment):
    obs, state = moment
    mind.policy.controller[-1].weight.mul_(20)  # surer: more of what is imagined is done
    out = mind(*obs, *state)
    after, thoughts = AgentState(*out[1 : 1 + len(state)]), Thoughts(*out[1 + len(state) :])
    seen = 0
    for row, (goal, action) in enumerate(zip(after.goal, out[0], strict=True)):
        expected = torch.zeros_like(after.foreseen[row])
        for c in range(mind.candidates):
            imagined = thoughts.imagined_actions[row, c, 0]
            thinks = state.clock[row] % PERIOD == 0
            if thinks and thoughts.candidates[row, c] == goal and imagined == action:
                expected = thoughts.imagined_meters[row, c, 0]
                seen += 1
        assert torch.equal(after.foreseen[row], expected)
    assert 0 < seen < len(out[0]) / PERIOD + 1


def test_surprise_is_a_mean_of_what_was_foreseen_and_did_not_come(mind, moment, shape):
    obs, state = moment
    known, meters = obs.self_state, shape.num_meters
    right = state._replace(foreseen=known[:, :meters].clone())
    torch.testing.assert_close(surprised(right, known), 0.9 * state.surprise)
    wrong = right._replace(foreseen=known[:, :meters] + torch.eye(meters)[2] * 0.004)
    torch.testing.assert_close(surprised(wrong, known), 0.9 * state.surprise + 0.0004)
    shocked = right._replace(foreseen=known[:, :meters] + 0.5)
    torch.testing.assert_close(surprised(shocked, known), 0.9 * state.surprise + 0.1 * SHOCK)
    nothing = right._replace(foreseen=torch.zeros_like(right.foreseen))
    assert torch.equal(surprised(nothing, known), state.surprise)


def test_in_a_surprising_world_every_imagined_future_is_of_a_novel_state(mind, moment):
    obs, state = moment
    state = state._replace(foreseen=torch.zeros_like(state.foreseen))
    usual = mind(*obs, *state)
    mind.surprise_limit = 0.005
    out = mind(*obs, *state)
    before, after = (Thoughts(*x[1 + len(state) :]).uncertainty_reason for x in (usual, out))
    novel = (state.surprise > 0.005) & (state.clock % PERIOD == 0)
    assert 0 < novel.sum() < len(novel) / PERIOD
    assert (after[novel] == 1).all()
    assert torch.equal(after[~novel], before[~novel])
    for ours, theirs in zip(out[: 1 + len(state)], usual[: 1 + len(state)], strict=True):
        assert torch.equal(ours, theirs)  # it says so; it decides as before


def test_only_what_was_learned_or_given_is_saved(mind, shape):
    """What follows from the shape is computed anew, so that no file holds two truths."""
    told = {"goal_targets", *POSTED, "prospects.menu", "prospects.paid_in"}
    told |= {"scouts", "stays", "countdown"}  # learned, but not by gradients
    for module, buffers in (
        (Perception(shape, 16, 4), set()),
        (WorldModel(shape, 4, 24, 2), {"error_scale", "hours", "novel_threshold", "scale"}),
        (Social(shape, 8), set()),
        (mind.policy, told),
    ):
        learned = {name for name, _ in module.named_parameters()}
        assert set(module.state_dict()) == learned | buffers


def test_d_takes_rows_in_any_order_of_dimensions(mind, moment, shape):
    """[ticks, slots, .] of a rollout says what the same rows say one after the other."""
    obs, state = moment
    *_, f = mind.sense(obs, state)
    policy, size = mind.policy, (WORLDS, shape.num_agents)
    prior = policy.prior_logits(f)
    candidates = prior.topk(3, -1).indices
    rng = torch.Generator().manual_seed(1)
    returns, confidence = torch.rand(2, len(prior), 3, generator=rng)
    kinds = {
        "prior": (policy.prior_logits, f),
        "ended": (policy.goal_ended, f.known_state, state.goal, state.goal_age),
        "weighed": (policy.goal_logits, prior, candidates, returns, confidence),
        "acting": (policy.action_logits, f, state.goal),
    }
    for name, (of, *given) in kinds.items():
        nested = [
            Features(*(y.unflatten(0, size) for y in x)) if isinstance(x, Features)
            else x.unflatten(0, size)
            for x in given
        ]  # fmt: skip
        torch.testing.assert_close(of(*nested).flatten(0, 1), of(*given), msg=name)
