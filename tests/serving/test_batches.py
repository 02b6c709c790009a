"""Who is in a batch, and what the short way through a request makes of it."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from types import SimpleNamespace

import pytest

from benchmarks.serving import json_request
from hamlet.artifacts import HamletError
from hamlet.serving import tensors
from hamlet.serving.engine import MAX_BATCH, MAX_DEEP, MAX_QUEUE
from hamlet.serving.errors import HTTPError
from hamlet.serving.metrics import Counts
from hamlet.serving.model import pack
from hamlet.serving.session import PendingTick


async def all_ask(engine, lives, seen) -> None:
    """One tick for all, asked for at the same time."""
    loop = asyncio.get_running_loop()
    answers = [loop.create_future() for _ in lives]
    for session, observation, answer in zip(lives, seen, answers, strict=False):

        def done(action, more, answer=answer):
            answer.set_result(action)

        record = pack(engine.current.fields, observation)
        engine.submit(PendingTick(session, record, 10.0, False, False, done))
    assert min(await asyncio.wait_for(asyncio.gather(*answers), 10)) >= 0


def batches_of(engine, lives, seen, monkeypatch) -> list[list[str]]:
    """The sessions of each batch while all ask for one tick at the same time."""
    model, found = engine.current, []
    names = {session.slot: session.id for session in lives}
    recall = model.recall
    monkeypatch.setattr(
        model, "recall", lambda slots: (found.append([names[s] for s in slots]), recall(slots))
    )
    asyncio.run(all_ask(engine, lives, seen))
    monkeypatch.undo()
    return found


def test_sessions_that_deliberate_together_are_spread(engine, seen, monkeypatch):
    lives = [engine.open(f"life-{i}") for i in range(2 * MAX_DEEP + 8)]
    names = [session.id for session in lives]
    # All deliberate at their first tick: the first come first, the others go next.
    found = batches_of(engine, lives, seen, monkeypatch)
    assert found == [names[: 2 * MAX_DEEP], names[2 * MAX_DEEP :]]
    # At the second tick none does.
    assert batches_of(engine, lives, seen, monkeypatch) == [names]
    for _ in range(2):
        batches_of(engine, lives, seen, monkeypatch)
    # At the fifth all do again; whoever does not overtakes those for whom there is no room.
    other = engine.open("other")
    batches_of(engine, [other], seen, monkeypatch)
    found = batches_of(engine, [*lives, other], seen, monkeypatch)
    assert found == [[*names[:MAX_DEEP], "other"], names[MAX_DEEP:]]


def test_a_batch_has_a_limit(engine, seen, monkeypatch):
    lives = [engine.open(f"life-{i}") for i in range(2 * MAX_BATCH + 3)]
    batches_of(engine, lives, seen, monkeypatch)
    names = [session.id for session in lives]
    found = batches_of(engine, lives, seen, monkeypatch)
    assert found == [names[:MAX_BATCH], names[MAX_BATCH : 2 * MAX_BATCH], names[2 * MAX_BATCH :]]


def test_a_long_run_of_a_state_from_a_client_holds_no_session_up(engine, seen):
    held = threading.Event()
    slow = SimpleNamespace(run=lambda names, feeds: held.wait(20))

    async def both() -> None:
        model = SimpleNamespace(agent=SimpleNamespace(session=slow), counts=Counts())
        waiting = asyncio.create_task(engine.once(model, {}, []))
        await asyncio.sleep(0.05)
        await all_ask(engine, [engine.open(f"life-{i}") for i in range(4)], seen)
        assert not waiting.done()
        held.set()
        await waiting

    asyncio.run(both())


def test_where_too_many_wait_a_state_from_a_client_is_pushed_back_too(engine, monkeypatch):
    monkeypatch.setattr(engine, "_queued", MAX_QUEUE)
    pushed_back = engine.metrics.pushed_back
    with pytest.raises(HTTPError) as caught:
        asyncio.run(engine.once(engine.current, {}, []))
    assert (caught.value.status, caught.value.retry) == (429, 1)
    assert engine.metrics.pushed_back == pushed_back + 1


def inputs_of(observation) -> list[dict]:
    request = json_request(observation, sequence_id="x")
    return json.loads(request.partition(b"\r\n\r\n")[2])["inputs"]


def test_the_short_way_packs_the_same(engine, seen):
    model = engine.current
    for observation in seen[::40]:
        inputs = inputs_of(observation)
        record = tensors.plain_record(model, inputs)
        assert record is not None
        assert record == tensors.checked_record(model, inputs, memoryview(b""))
        assert record == tensors.plain_record(model, inputs[::-1])


@pytest.mark.parametrize(
    "change",
    [
        lambda inputs: inputs.pop(),
        lambda inputs: inputs.append(inputs[0]),
        lambda inputs: inputs[0].update(name="nobody"),
        lambda inputs: inputs[0].update(name=["view"]),
        lambda inputs: inputs[0].update(datatype="INT32"),
        lambda inputs: inputs[0].update(shape=[25]),
        lambda inputs: inputs[0].update(data=[inputs[0]["data"]]),
        lambda inputs: inputs[0].update(data="0" * 25),
        lambda inputs: inputs[0].update(data=None),
        lambda inputs: inputs[0]["data"].append(0),
        lambda inputs: inputs[0]["data"].__setitem__(3, True),
        lambda inputs: inputs[0]["data"].__setitem__(3, 256),
        lambda inputs: inputs[0]["data"].__setitem__(3, 1.5),
        lambda inputs: inputs[2]["data"].__setitem__(3, False),
        lambda inputs: inputs.__setitem__(0, 7),
    ],
)
def test_the_short_way_leaves_the_unusual_to_the_long_one(engine, seen, change):
    inputs = inputs_of(seen[0])
    change(inputs)
    assert tensors.plain_record(engine.current, inputs) is None


def test_a_session_is_idle_from_its_beginning_or_its_last_tick(engine, monkeypatch):
    monkeypatch.setattr(engine, "session_ttl", 60.0)
    before = time.monotonic()
    kept, old = engine.open("kept"), engine.open("old")
    assert before <= kept.used <= old.used <= time.monotonic()
    engine.sweep()
    assert {"kept", "old"} <= set(engine.sessions)
    kept.used -= 61.0
    engine.sweep()
    assert "kept" not in engine.sessions
    assert "old" in engine.sessions
    assert engine.metrics.sessions_closed["timeout"] == 1


@pytest.mark.parametrize(
    ("ttl", "idle", "seconds"),
    [(60.0, 20.0, 40), (60.0, 59.9, 1), (60.0, 70.0, 1), (math.inf, 5.0, 3600)],
)
def test_who_comes_when_all_is_taken_is_told_when_a_session_will_have_ended(
    engine, monkeypatch, ttl, idle, seconds
):
    monkeypatch.setattr(engine, "session_ttl", ttl)
    monkeypatch.setattr(engine, "max_sessions", len(engine.sessions) + 1)
    engine.open("oldest")
    next(iter(engine.sessions.values())).used = time.monotonic() - idle
    with pytest.raises(HTTPError) as caught:
        engine.open("one too many")
    assert (caught.value.status, caught.value.retry) == (429, seconds)


def test_sessions_that_were_opened_in_another_order_are_swept_by_their_last_use(
    engine, monkeypatch
):
    monkeypatch.setattr(engine, "session_ttl", 60.0)
    first, second = engine.open("first"), engine.open("second")
    second.used -= 61.0
    engine.sweep()  # looks at the oldest first, and that is not idle
    assert "second" in engine.sessions
    engine.sort_sessions()
    assert list(engine.sessions) == ["second", "first"]
    engine.sweep()
    assert list(engine.sessions) == ["first"]
    assert first.used > second.used


def test_ticks_that_wait_for_their_session_come_in_order_and_all_are_answered(engine, seen):
    """Three at once to one life: what it answers to the same three one after the other."""
    model = engine.current

    async def answers(name: str, together: bool) -> list[int]:
        session = engine.open(name, seed=5)
        loop, found, waiting = asyncio.get_running_loop(), [], []
        for observation in list(seen)[:3]:
            answer = loop.create_future()

            def done(action, more, answer=answer):
                found.append(action)
                answer.set_result(action)

            record = pack(model.fields, observation)
            engine.submit(PendingTick(session, record, 10.0, False, False, done))
            waiting.append(answer)
            if not together:
                await asyncio.wait_for(answer, 10)
        told = await asyncio.wait_for(asyncio.gather(*waiting), 10)
        assert list(told) == found
        engine.close(session, "end")
        return found

    one_by_one = asyncio.run(answers("a", False))
    assert asyncio.run(answers("b", True)) == one_by_one
    assert engine.queued == 0


def test_asked_again_before_it_has_run_a_tick_is_one_and_answers_both(engine, seen):
    record = pack(engine.current.fields, next(iter(seen)))
    repeated = engine.metrics.repeated

    async def ask() -> tuple[list, int]:
        loop, answers = asyncio.get_running_loop(), []
        session = engine.open("twice", seed=5)
        for request in ("one", "one", "two"):
            answer = loop.create_future()

            def done(action, more, answer=answer):
                answer.set_result((action, more))

            engine.tick("twice", record, done, request=request)
            answers.append(answer)
        found = await asyncio.wait_for(asyncio.gather(*answers), 10)
        ticks = session.ticks
        engine.close(session, "end")
        return found, ticks

    (first, again, _), ticks = asyncio.run(ask())
    assert first == again
    assert ticks == 2
    assert engine.metrics.repeated == repeated + 1


def test_a_timeout_is_told_as_it_was_asked_for_whatever_the_clock_shows(engine, seen):
    """A clock of many hours rounds a sum with a millionth of a second."""
    record = pack(engine.current.fields, next(iter(seen)))

    async def ask() -> str:
        answer = asyncio.get_running_loop().create_future()

        def done(action, error):
            answer.set_result(error.message)

        item = PendingTick(engine.open("late"), record, 1e-12, False, False, done)
        item.arrived = 10.3
        engine.submit(item)
        return await asyncio.wait_for(answer, 10)

    assert asyncio.run(ask()) == "no turn within the timeout of 1e-12 s"


def test_who_asks_wrongly_or_waits_too_long_is_told_and_the_others_are_answered(engine, seen):
    model = engine.current
    told: dict[str, tuple] = {}

    async def ask() -> None:
        loop, waiting = asyncio.get_running_loop(), []
        for name, seconds in (("well", 10.0), ("late", -1.0), ("wrong", 10.0)):
            record, answer = pack(model.fields, next(iter(seen))), loop.create_future()
            if name == "wrong":
                record = b"\xff" * len(record)  # no number is finite

            def done(action, more, name=name, answer=answer):
                told[name] = action, more
                answer.set_result(None)

            engine.submit(PendingTick(engine.open(name), record, seconds, False, False, done))
            waiting.append(answer)
        await asyncio.wait_for(asyncio.gather(*waiting), 10)

    asyncio.run(ask())
    assert told["well"][0] >= 0
    action, error = told["late"]
    assert action is None
    assert (error.status, "no turn within the timeout" in str(error)) == (429, True)
    action, error = told["wrong"]
    assert action is None
    assert isinstance(error, HamletError)
    assert set(engine.sessions) == {"well"}  # the first request of the others was refused
    assert engine.queued == 0
