"""Policies that Hamlet did not make, a life per connection: equal to raw ONNX Runtime."""

from __future__ import annotations

import asyncio
import json

import grpc
import numpy as np
import pytest
import websockets
from policies import (
    MAKERS,
    Made,
    by_raw_onnxruntime,
    cleanrl_lstm,
    hand_made_gru,
    rl_games_fixed,
    sb3_ppo,
    sb3_recurrent_ppo,
)
from served import Served
from test_foreign import observations

from hamlet.serving.oip import MESSAGES, SERVICE, STREAM

TICKS, LIVES = 200, 100


def tensors(made: Made, server: Served, row: np.ndarray) -> dict[str, np.ndarray]:
    """What one tick sends, by the server's metadata: the observation, zeros for the rest."""
    described = server.ask("GET", f"/v2/models/{made.path.stem}").json["inputs"]
    first, *rest = described
    zeros = {e["name"]: np.zeros([1 if d == -1 else d for d in e["shape"]], "f4") for e in rest}
    return {first["name"]: row[None], **zeros}


async def over_websocket(made: Made, server: Served, seen: np.ndarray) -> np.ndarray:
    given = tensors(made, server, seen[0, 0])
    first = next(iter(given))
    url = f"ws://127.0.0.1:{server.port}/v2/models/{made.path.stem}/stream"

    async def life(number: int) -> list[list[float]]:
        actions = []
        async with websockets.connect(url) as socket:
            for row in seen[:, number]:
                inputs = [
                    {"name": n, "datatype": "FP32", "shape": x.shape, "data": x.ravel().tolist()}
                    for n, x in {**given, first: row[None]}.items()
                ]
                asked = {"inputs": inputs, "outputs": [{"name": made.action}]}
                await socket.send(json.dumps(asked))
                told = json.loads(await socket.recv())
                output = told["outputs"][0]
                actions.append(np.array(output["data"]).reshape(output["shape"])[0])
        return actions

    return np.swapaxes(np.array(await asyncio.gather(*map(life, range(seen.shape[1])))), 0, 1)


async def over_grpc(made: Made, server: Served, seen: np.ndarray) -> np.ndarray:
    given = tensors(made, server, seen[0, 0])
    first = next(iter(given))
    name, asked, answered = STREAM

    async def life(number: int, channel: grpc.aio.Channel) -> list[np.ndarray]:
        call = channel.stream_stream(
            f"/{SERVICE}/{name}", MESSAGES[asked].SerializeToString, MESSAGES[answered].FromString
        )()
        actions = []
        for row in seen[:, number]:
            request = MESSAGES[asked](model_name=made.path.stem)
            for n, x in {**given, first: row[None]}.items():
                request.inputs.add(name=n, datatype="FP32", shape=x.shape)
                request.raw_input_contents.append(x.tobytes())
            request.outputs.add(name=made.action)
            await call.write(request)
            told = await call.read()
            assert not told.error_message, told.error_message
            output = told.infer_response.outputs[0]
            dtype = {"INT64": np.int64, "FP32": np.float32}[output.datatype]
            raw = np.frombuffer(told.infer_response.raw_output_contents[0], dtype)
            actions.append(raw.reshape(output.shape)[0])
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        return actions

    port = server.first("serving grpc")["port"]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        lives = [life(number, channel) for number in range(seen.shape[1])]
        return np.swapaxes(np.array(await asyncio.gather(*lives)), 0, 1)


def compare(made: Made, ticks: int, lives: int) -> None:
    seen = observations(ticks, lives)
    expected = by_raw_onnxruntime(made, seen)
    with Served(made.path, *made.options, "--grpc-port", "0") as server:
        for ask in (over_websocket, over_grpc):
            got = asyncio.run(ask(made, server, seen))
            assert got.shape == expected.shape
            if expected.dtype == np.int64:
                np.testing.assert_array_equal(got, expected)
            else:
                np.testing.assert_allclose(got, expected, atol=2e-6)
    assert len(np.unique(expected)) > 1


@pytest.mark.parametrize("make", [hand_made_gru, rl_games_fixed], ids=lambda make: make.__name__)
def test_a_few_lives_over_websocket_and_grpc(make, tmp_path):
    compare(make(tmp_path), 12, 5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [hand_made_gru, cleanrl_lstm, sb3_ppo, sb3_recurrent_ppo],
    ids=lambda make: make.__name__,
)
def test_a_hundred_lives_over_websocket_and_grpc(make, tmp_path):
    assert make in MAKERS
    compare(make(tmp_path), TICKS, LIVES)
