"""Populations: who is replaced and how, a course that follows from the seed, members that go on."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import statistics
import time
from functools import partial
from pathlib import Path

import pytest

from hamlet.artifacts import HamletError, atomic_path
from hamlet.learning.engines import processes
from hamlet.learning.pbt import (
    FACTORS,
    WORST,
    Turn,
    checkpoint_of,
    evolve,
    first_turns,
    lineage,
    next_turns,
    read_log,
    started,
    winner,
)
from hamlet.params import SocialParams, TuneParams

POPULATION = TuneParams(
    members=8, generations=5, replaced=0.25, space={"learning_rate": (1e-3, 1.0)}
)


def here(train, turns):
    """The simplest engine."""
    return [train(turn) for turn in turns]


def roll(folder: Path, turn: Turn) -> float:
    """A learner in one number: gradient steps on x^2, kept in the checkpoint as it goes."""
    path = started(folder, turn)
    x, step = json.loads(path.read_text()) if path.exists() else (1.0 + turn.member, 0)
    until = 3 * (turn.generation + 1)
    while step < until:
        x, step = x - turn.settings["learning_rate"] * 2 * x, step + 1
        with atomic_path(path) as temporary:  # as real checkpoints: it may be killed here
            temporary.write_text(json.dumps([x, step]))
    return -(x**2)


def test_the_first_settings_fill_the_space_log_uniformly():
    many = POPULATION.model_copy(update={"members": 600})
    rates = [turn.settings["learning_rate"] for turn in first_turns(many, 1)]
    assert 1e-3 <= min(rates) < 2e-3
    assert 0.5 < max(rates) <= 1.0
    assert statistics.fmean(math.log10(rate) for rate in rates) == pytest.approx(-1.5, abs=0.1)
    assert first_turns(many, 1) == first_turns(many, 1)
    assert first_turns(many, 1) != first_turns(many, 2)


def test_the_worst_go_on_from_the_best_with_settings_near_theirs():
    scores = [3.0, 1.0, 7.0, 0.5, 6.0, 2.0, 5.0, WORST]  # best: 2 and 4; worst: 3 and 7
    done = [
        turn._replace(score=score)
        for turn, score in zip(first_turns(POPULATION, 1), scores, strict=True)
    ]
    after = next_turns(POPULATION, done, 1)
    assert [turn.member for turn in after] == list(range(8))
    assert {turn.generation for turn in after} == {1}
    for turn, before in zip(after, done, strict=True):
        rate = turn.settings["learning_rate"]
        if turn.member in (3, 7):
            assert turn.parent in (2, 4)
            taken = done[turn.parent].settings["learning_rate"]
            assert any(rate == min(max(taken * f, 1e-3), 1.0) for f in FACTORS)
            assert rate != taken
        else:
            assert (turn.parent, turn.settings) == (turn.member, before.settings)
    alone = POPULATION.model_copy(update={"replaced": 0.0})
    assert all(turn.parent == turn.member for turn in next_turns(alone, done, 1))


def test_explored_settings_stay_in_the_space():
    done = [
        Turn(0, m, m, {"learning_rate": 1.0 if m % 2 else 1e-3}, score=float(m)) for m in range(8)
    ]
    for seed in range(20):
        rates = [turn.settings["learning_rate"] for turn in next_turns(POPULATION, done, seed)]
        assert all(1e-3 <= rate <= 1.0 for rate in rates)


def test_a_stopped_population_goes_on_as_if_it_had_not_been(tmp_path):
    whole = list(evolve(POPULATION, 3, tmp_path / "whole", partial(roll, tmp_path / "whole"), here))
    assert [len(turns) for turns in whole] == [8] * 5
    assert read_log(tmp_path / "whole" / "log.jsonl") == whole
    cut = tmp_path / "cut"
    for stop in (1, 3):
        generations = evolve(POPULATION, 3, cut, partial(roll, cut), here)
        for _ in range(stop):
            next(generations)
        generations.close()
        assert len(read_log(cut / "log.jsonl")) == stop

    def interrupted(turn: Turn) -> float:
        if turn.member == 5:
            raise KeyboardInterrupt
        return roll(cut, turn)

    with pytest.raises(KeyboardInterrupt):
        list(evolve(POPULATION, 3, cut, interrupted, here))
    assert list(evolve(POPULATION, 3, cut, partial(roll, cut), here)) == whole
    logs = [(folder / "log.jsonl").read_bytes() for folder in (cut, tmp_path / "whole")]
    assert logs[0] == logs[1]
    other = list(evolve(POPULATION, 4, tmp_path / "other", partial(roll, tmp_path / "other"), here))
    assert other != whole


def test_the_log_tells_how_to_make_a_member_again(tmp_path):
    done = list(evolve(POPULATION, 3, tmp_path / "all", partial(roll, tmp_path / "all"), here))
    assert winner(done).score == max(turn.score for turn in done[-1])
    log = read_log(tmp_path / "all" / "log.jsonl")
    for last in done[-1]:
        line = lineage(log, last)
        assert [turn.generation for turn in line] == list(range(5))
        alone = tmp_path / f"alone-{last.member}"
        assert [roll(alone, turn) for turn in line] == [turn.score for turn in line]
    copied = [t for t in done[-1] if any(x.parent != x.member for x in lineage(log, t))]
    assert len(copied) >= 2


def test_a_replaced_member_begins_with_its_parents_file_and_an_interrupted_one_with_its_own(
    tmp_path,
):
    parent = checkpoint_of(tmp_path, 0, 2)
    parent.parent.mkdir(parents=True)
    parent.write_bytes(b"weights and optimizer")
    turn = Turn(1, 6, 2, {})
    path = started(tmp_path, turn)
    assert path == checkpoint_of(tmp_path, 1, 6)
    assert path.read_bytes() == b"weights and optimizer"
    path.write_bytes(b"further")
    assert started(tmp_path, turn).read_bytes() == b"further"
    assert parent.read_bytes() == b"weights and optimizer"


def test_a_member_without_a_number_ranks_last_and_stays_in_the_log(tmp_path):
    def lost(turn: Turn) -> float:
        score = roll(tmp_path, turn)
        return math.nan if turn.generation == 0 and turn.member == 4 else score

    done = list(evolve(POPULATION, 3, tmp_path, lost, here))
    assert done[0][4].score == WORST
    assert done[1][4].parent != 4
    assert read_log(tmp_path / "log.jsonl") == done


def test_what_is_no_log_is_told(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"seed": 1}\n{"generation": 0, "who"')
    with pytest.raises(HamletError, match="is not a log of a population"):
        read_log(tmp_path / "log.jsonl")


# ------------------------------------------------------------------------------------------------
# Processes


def killed_once(folder: Path, turn: Turn) -> float:
    """As `roll`, but one member is killed in one generation, half-way."""
    mark = folder / "killed"
    if (turn.generation, turn.member) == (2, 3) and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return roll(folder, turn)


def killed_always(folder: Path, turn: Turn) -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


def failing(folder: Path, turn: Turn) -> float:
    raise HamletError(f"member {turn.member} fails")


def test_processes_give_the_same_course_though_a_member_is_killed(tmp_path):
    expected = list(evolve(POPULATION, 3, tmp_path / "a", partial(roll, tmp_path / "a"), here))
    with processes(2) as run:
        train = partial(killed_once, tmp_path / "b")
        assert list(evolve(POPULATION, 3, tmp_path / "b", train, run)) == expected
    assert (tmp_path / "b" / "killed").exists()


def test_a_member_that_is_killed_again_and_again_ends_the_search(tmp_path):
    with (
        pytest.raises(HamletError, match="killed more than 3 times"),
        processes(2) as run,
    ):
        list(evolve(POPULATION, 3, tmp_path, partial(killed_always, tmp_path), run))
    with pytest.raises(HamletError, match="member 0 fails"), processes(2) as run:
        list(evolve(POPULATION, 3, tmp_path, partial(failing, tmp_path), run))


def test_a_search_that_fails_ends_its_members_and_nobody_else(tmp_path):
    bystander = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    bystander.start()
    before = set(multiprocessing.active_children())
    with pytest.raises(HamletError, match="member 0 fails"), processes(2) as run:
        list(evolve(POPULATION, 3, tmp_path, partial(failing, tmp_path), run))
    time.sleep(0.2)
    left = set(multiprocessing.active_children())
    bystander.kill()
    assert bystander in before
    assert left == before


def failing_beside_one_that_sleeps(turn: Turn) -> float:
    if turn.member:
        time.sleep(60)
    raise HamletError(f"member {turn.member} fails")


def test_a_search_that_fails_does_not_wait_for_who_still_trains():
    turns = [Turn(0, member, 0, {}) for member in range(2)]
    began = time.monotonic()
    with pytest.raises(HamletError, match="member 0 fails"), processes(2) as run:
        run(failing_beside_one_that_sleeps, turns)
    assert time.monotonic() - began < 40


# ------------------------------------------------------------------------------------------------
# Module C as a member


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """A small labelled data set in which goals follow from cues."""
    import torch
    from tensordict import TensorDict

    from hamlet.learning.train_social import with_labels
    from hamlet.learning.tune_social import share
    from hamlet.modules.contracts import TownShape
    from hamlet.town import Town, load_pack

    shape = TownShape.of(Town(load_pack("l4_contention"), num_layouts=2))
    rng = torch.Generator().manual_seed(1)
    t, b, n, m = 24, 6, shape.num_agents, shape.num_others
    size = (t, b, n)
    goal = torch.randint(shape.num_goals, (1, b, n), generator=rng).expand(size)
    cues = torch.rand(*size, m, shape.num_cues, generator=rng)
    data = TensorDict(
        {
            "self_state": torch.rand(*size, shape.self_dim, generator=rng),
            "cues": cues,
            "visible": torch.rand(*size, m, generator=rng) < 0.7,
            "others_offset": torch.zeros(*size, m, 2),
            "others_action": torch.randint(shape.num_actions, (*size, m), generator=rng),
            "action": torch.randint(shape.num_actions, size, generator=rng),
            "first": torch.zeros(t, b, dtype=torch.bool),
            "alive": torch.ones(size, dtype=torch.bool),
            "goal": goal,
        },
        batch_size=[t, b],
    )
    d = 2 * shape.num_affordances + 4
    beliefs = TensorDict(
        {"mean": torch.randn(*size, d, generator=rng) / 4, "log_std": torch.zeros(*size, d)},
        batch_size=size,
    )
    worlds = {"learn": torch.arange(4), "choose": torch.tensor([4]), "test": torch.tensor([5])}
    folder = tmp_path_factory.mktemp("shared") / "data"
    share(folder, with_labels(data, beliefs), worlds, shape)
    return folder


SOCIAL = SocialParams(hidden=8, steps=12, sequences=2, chunk=8, learning_rate=1e-2)


def test_a_training_in_parts_is_the_training(shared, tmp_path):
    """Weights, optimizer state, data and recurrent state all go on: the score has the same bits."""
    from hamlet.learning.tune_social import SocialMember

    alone = POPULATION.model_copy(update={"members": 2, "replaced": 0.0})
    last = []
    for parts in (1, 4):
        folder = tmp_path / str(parts)
        train = SocialMember(shared, folder, SOCIAL, 5, parts)
        sizes = alone.model_copy(update={"generations": parts})
        last.append([t.score for t in list(evolve(sizes, 5, folder, train, here))[-1]])
    assert last[0] == last[1]
    assert last[0][0] != last[0][1]


def test_the_winner_of_module_c_is_made_again_from_its_log(shared, tmp_path):
    """A copied member went on with its parent's weights and optimizer, or the bits would differ."""
    from hamlet.learning.tune_social import SocialMember

    sizes = POPULATION.model_copy(update={"members": 4, "generations": 4, "replaced": 0.5})
    train = SocialMember(shared, tmp_path / "all", SOCIAL, 5, 4)
    done = list(evolve(sizes, 5, tmp_path / "all", train, here))
    copied = next(t for t in done[-1] if any(x.parent != x.member for x in lineage(done, t)))
    again = SocialMember(shared, tmp_path / "alone", SOCIAL, 5, 4)
    line = lineage(read_log(tmp_path / "all" / "log.jsonl"), copied)
    assert [again(turn) for turn in line] == [turn.score for turn in line]


@pytest.mark.parametrize(
    ("space", "told"),
    [
        ({"steps": (1.0, 2.0)}, "steps cannot be tuned; what can is learning_rate"),
        ({"learning_rate": (0.1, 0.01)}, "the lower one first"),
    ],
)
def test_a_space_that_cannot_be_searched_is_told(space, told):
    with pytest.raises(ValueError, match=told):
        TuneParams(members=2, generations=1, replaced=0.0, space=space)


def test_members_that_are_stacked_take_the_steps_they_would_take_one_by_one(shared):
    """Else `benchmarks.vectorised` compared two different things."""
    import torch
    from tensordict import TensorDict

    from benchmarks.vectorised import Losing, separately, stacked
    from hamlet.learning.sequences import SequenceReader
    from hamlet.learning.tune_social import opened
    from hamlet.modules.social import Social

    data, worlds, shape = opened(shared)
    rngs = [torch.Generator().manual_seed(seed) for seed in range(3)]
    lanes = [
        SequenceReader(data, worlds["learn"], SOCIAL.sequences, SOCIAL.chunk, rng) for rng in rngs
    ]

    def population() -> list[Losing]:
        torch.manual_seed(0)
        return [Losing(Social(shape, SOCIAL.hidden)) for _ in range(3)]

    members, begun = population(), population()
    apart = separately(members, SOCIAL.learning_rate)
    together, weights = stacked(population(), SOCIAL.learning_rate)
    slots = SOCIAL.sequences * shape.num_agents
    states = torch.zeros(3, slots, shape.num_others, begun[0].social.recurrent_dim)
    for _ in range(3):
        chunks = TensorDict.stack([each.read() for each in lanes])
        apart(chunks, states)
        together(chunks, states)
    for name, each in weights.items():
        own = torch.stack([dict(member.named_parameters())[name] for member in members])
        first = torch.stack([dict(member.named_parameters())[name] for member in begun])
        torch.testing.assert_close(each, own, rtol=0, atol=1e-4)
        assert (own - first).abs().max() > 1e-3, name
