"""What a request gives: of one life, of many, or of a state that the client keeps."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from hamlet.artifacts import HamletError
from hamlet.serving import protocol
from hamlet.serving.engine import DEADLINE_SECONDS, MAX_QUEUE, Engine
from hamlet.serving.errors import HTTPError
from hamlet.serving.model import Model
from hamlet.serving.protocol import InferRequest

Results = list[tuple[str, np.ndarray, bool]]


async def results_of(engine: Engine, request: InferRequest, model: Model) -> Results:
    """(name, array in the graph's layout, binary) of every output that is asked for.

    Raises:
        HTTPError, HamletError: it was not done. Of many lives some may have ticked; then it says
            so, and the same request with an id may be sent again.
    """
    lasting = bool(request.lives) or request.sequence is not None
    usual = protocol.outputs_of(model, lasting)
    asked = request.outputs or [(name, request.binary) for name in usual]
    names = [name for name, _ in asked]
    if request.lives:
        values = await _of_many(engine, request, model, names)
    elif request.sequence is not None:
        action, more = await _tick(engine, request, model, names)
        if action is None:
            raise more
        values = [_of_one(model, name, action, more) for name in names]
    else:
        values = await _of_a_given_state(engine, request, model, names)
    return [(name, value, binary) for (name, binary), value in zip(asked, values, strict=True)]


async def _of_a_given_state(
    engine: Engine, request: InferRequest, model: Model, names: list[str]
) -> list[np.ndarray]:
    try:
        return await engine.once(model, request.feeds, names, request.rows)
    except HTTPError:
        raise
    except Exception:  # an index in the given state that points nowhere
        raise HamletError(
            "the state that was given is none of this agent's", "give what it returned"
        ) from None


def _tick(
    engine: Engine, request: InferRequest, model: Model, names: list[str]
) -> asyncio.Future[tuple[Any, Any]]:
    """Queue a tick; what comes of it is (action, decision or None), or (None, error)."""
    assert request.sequence is not None
    answer: asyncio.Future[tuple[Any, Any]] = asyncio.get_running_loop().create_future()

    def done(action: Any, more: Any) -> None:
        if not answer.done():  # its client may have gone
            answer.set_result((action, more))

    session = engine.tick(
        request.sequence,
        request.record,
        done,
        start=request.start,
        end=request.end,
        seed=request.seed,
        seconds=request.timeout or DEADLINE_SECONDS,
        thoughts=any(name != model.action for name in names),
        request=request.id,
    )
    request.version = session.model.version
    return answer


def _of_one(model: Model, name: str, action: Any, more: Any) -> np.ndarray:
    if more is None:
        return protocol.shaped(model, name, action)
    return protocol.from_decision(model, more, name)


async def _of_many(
    engine: Engine, request: InferRequest, model: Model, names: list[str]
) -> list[np.ndarray]:
    """A tick of every life of a request; no one ticks before all are known to be able to."""
    rows = request.lives
    new = 0
    for one in rows:
        assert one.sequence is not None
        new += one.sequence not in engine.sessions
        known = one.id is not None and one.sequence in engine.ended  # asked again, perhaps
        if not one.start and not known:
            _same_inputs(engine.get(one.sequence).model, model, one.sequence)
    if len(engine.sessions) + new > engine.max_sessions:
        raise HTTPError(
            429,
            f"{new} more sessions than the {len(engine.sessions)} that are open are too many: "
            f"{engine.max_sessions} may be",
            retry=1,
        )
    if engine.queued + len(rows) > MAX_QUEUE:
        engine.metrics.pushed_back += 1
        raise HTTPError(429, "too many requests are waiting: try again later", retry=1)
    waiting: list[Any] = []
    for one in rows:
        try:
            waiting.append(_tick(engine, one, model, names))
        except (HTTPError, HamletError) as error:
            waiting.append((None, error))
    got = [w if isinstance(w, tuple) else await w for w in waiting]
    ticked = sum(action is not None for action, _ in got)
    for one, (action, wrong) in zip(rows, got, strict=True):
        if action is None:
            raise _of_row(one, wrong, ticked)
    request.version = ",".join(dict.fromkeys(one.version for one in rows))
    return [
        _together(model, name, [_of_one(model, name, action, more) for action, more in got])
        for name in names
    ]


def _same_inputs(own: Model, model: Model, name: str) -> None:
    if own is not model and own.plain != model.plain:
        raise HTTPError(
            409,
            f"sequence_id '{name}' is on version {own.version}, whose inputs are others than those "
            f"of {model.version}: send it in a request of its own",
        )


def _together(model: Model, name: str, values: list[np.ndarray]) -> np.ndarray:
    axis = model.signature.outputs[name].axis
    return np.stack(values) if axis is None else np.concatenate(values, axis)


def _of_row(one: InferRequest, error: Exception, ticked: int) -> Exception:
    """The error of one row; it says that others ticked, if they did."""
    if not ticked or not isinstance(error, (HTTPError, HamletError)):
        return error
    text = f"sequence_id '{one.sequence}': {error}; the other {ticked} lives ticked"
    if isinstance(error, HTTPError):
        return HTTPError(error.status, text, error.retry)
    return HamletError(text)
