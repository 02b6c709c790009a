"""The Open Inference Protocol over gRPC, with Triton's own client and by hand."""

from __future__ import annotations

import queue

import grpc
import numpy as np
import pytest
from served import Served
from tritonclient import grpc as triton
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from benchmarks.gru import HIDDEN, SEEN, lives, write_gru
from hamlet.serving.oip import MESSAGES, METHODS, SERVICE, STREAM

NAME, TICKS, LIVES = "gru", 12, 32


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return write_gru(tmp_path_factory.mktemp("gru") / "gru.onnx")


@pytest.fixture(scope="module")
def server(policy):
    with Served(policy, "--grpc-port", "0", "--session-ttl", "60") as served:
        yield served


@pytest.fixture(scope="module")
def known(policy):
    return lives(policy, TICKS, LIVES)


def address(server) -> str:
    return f"127.0.0.1:{server.first('serving grpc')['port']}"


@pytest.fixture
def client(server):
    with triton.InferenceServerClient(address(server)) as made:
        yield made


def inputs(**arrays) -> list[triton.InferInput]:
    made = []
    for name, array in arrays.items():
        made.append(triton.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
        made[-1].set_data_from_numpy(array)
    return made


def action_only():
    return [triton.InferRequestedOutput("action")]


def described(message) -> dict:
    """Numbers, types and names of a message's fields, and of those within."""
    return {
        f.name: (
            f.number, f.type, f.is_repeated, f.containing_oneof and f.containing_oneof.name,
            f.message_type and described(f.message_type),
        )
        for f in message.fields
    }  # fmt: skip


def test_the_messages_are_the_standard_s():
    for name, made in MESSAGES.items():
        if name.startswith("HealthCheck"):  # gRPC's own, below
            continue
        assert described(made.DESCRIPTOR) == described(getattr(service_pb2, name).DESCRIPTOR), name
    theirs = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert theirs.full_name == SERVICE
    for name, request, answer in [(n, *both) for n, both in METHODS.items()] + [STREAM]:
        method = theirs.methods_by_name[name]
        assert (method.input_type.name, method.output_type.name) == (request, answer)


def test_what_a_client_asks_about_the_server(server, client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(NAME)
    assert "sequence" in client.get_server_metadata().extensions
    told = client.get_model_metadata(NAME)
    over_http = server.ask("GET", f"/v2/models/{NAME}").json
    assert (told.name, list(told.versions)) == (NAME, over_http["versions"])
    for side in ("inputs", "outputs"):
        tensors = [
            {"name": t.name, "datatype": t.datatype, "shape": list(t.shape)}
            for t in getattr(told, side)
        ]
        assert tensors == over_http[side]
    assert client.is_model_ready(NAME, over_http["versions"][0])
    with pytest.raises(InferenceServerException, match=r"NOT_FOUND.*'other' is not served"):
        client.get_model_metadata("other")
    with pytest.raises(InferenceServerException, match="NOT_FOUND"):
        client.get_model_metadata(NAME, "no such version")


def test_a_probe_asks_for_health_as_kubernetes_does(server):
    """`grpc.health.v1.Health/Check`, by its bytes: a name in field 1, SERVING (1) in field 1."""
    with grpc.insecure_channel(address(server)) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"", timeout=10) == b"\x08\x01"
        assert check(b"\x0a" + bytes([len(SERVICE)]) + SERVICE.encode(), timeout=10) == b"\x08\x01"
        with pytest.raises(grpc.RpcError, match=r"NOT_FOUND[\s\S]*no service is called 'other'"):
            check(b"\x0a\x05other", timeout=10)


def test_sequences_interleaved_and_shared_with_http(server, client, known):
    seen, expected = known
    for tick in range(TICKS):
        for life in range(3):
            told = client.infer(
                NAME, inputs(obs=seen[tick, life : life + 1]), outputs=action_only(),
                sequence_id=100 + life, sequence_start=tick == 0, request_id=f"{tick}",
            )  # fmt: skip
            assert told.as_numpy("action").tolist() == [expected[tick, life]]
            assert told.get_response().id == f"{tick}"
    # The same life over HTTP: one server, one memory.
    obs = {"name": "obs", "datatype": "FP32", "shape": [1, SEEN], "data": seen[0, 0].tolist()}
    asked = {"inputs": [obs], "parameters": {"sequence_id": 100}}
    over_http = server.ask("POST", f"/v2/models/{NAME}/infer", asked).json
    again = client.infer(NAME, inputs(obs=seen[0, :1]), sequence_id=101, sequence_end=True)
    assert again.as_numpy("logits").shape == (1, 5)
    assert {o["name"] for o in over_http["outputs"]} == {"action", "logits"}
    with pytest.raises(InferenceServerException, match=r"NOT_FOUND.*'101' is not open"):
        client.infer(NAME, inputs(obs=seen[0, :1]), sequence_id=101)


def test_typed_contents_as_other_clients_send_them(server, known):
    seen, expected = known
    Request = MESSAGES["ModelInferRequest"]
    with grpc.insecure_channel(address(server)) as channel:
        infer = channel.unary_unary(
            f"/{SERVICE}/ModelInfer", Request.SerializeToString,
            MESSAGES["ModelInferResponse"].FromString,
        )  # fmt: skip
        for tick in range(3):
            request = Request(model_name=NAME)
            request.parameters["sequence_id"].string_param = "by hand"
            request.parameters["sequence_start"].bool_param = tick == 0
            obs = request.inputs.add(name="obs", datatype="FP32", shape=[1, SEEN])
            obs.contents.fp32_contents.extend(seen[tick, 0].tolist())
            told = infer(request)
            got = dict(zip([o.name for o in told.outputs], told.raw_output_contents, strict=True))
            assert np.frombuffer(got["action"], np.int64).tolist() == [expected[tick, 0]]


def test_many_lives_in_one_request(client, known):
    seen, expected = known
    ids = np.array([f"env {i}".encode() for i in range(LIVES)], object)
    for tick in range(TICKS):
        start = np.full(LIVES, tick == 0)
        told = client.infer(
            NAME, inputs(sequence_id=ids, obs=seen[tick], sequence_start=start),
            outputs=action_only(),
        )  # fmt: skip
        assert told.as_numpy("action").tolist() == expected[tick].tolist()


def test_state_that_the_client_keeps(client, known):
    seen, expected = known
    state = np.zeros((LIVES, HIDDEN), np.float32)
    for tick in range(3):
        told = client.infer(NAME, inputs(obs=seen[tick], h_in=state))
        assert told.as_numpy("action").tolist() == expected[tick].tolist()
        state = told.as_numpy("h_out")


@pytest.fixture
def streamed(client):
    """A stream: a function that asks and waits for the answer."""
    answers: queue.Queue = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))

    def ask(obs, **options):
        client.async_stream_infer(NAME, inputs(obs=obs), outputs=action_only(), **options)
        return answers.get(timeout=10)

    yield ask
    client.stop_stream()


def test_a_stream_is_a_life(server, streamed, known):
    seen, expected = known
    for tick in range(TICKS):
        result, error = streamed(seen[tick, :1], request_id=str(tick))
        assert error is None
        assert result.as_numpy("action").tolist() == [expected[tick, 0]]
    result, _ = streamed(seen[0, 1:2], sequence_id=777, sequence_start=True)
    assert result.as_numpy("action").tolist() == [expected[0, 1]]


def test_an_error_does_not_end_a_stream(streamed, known):
    seen, expected = known
    assert streamed(seen[0, :1])[0].as_numpy("action").tolist() == [expected[0, 0]]
    result, error = streamed(np.zeros((1, SEEN + 1), np.float32))
    assert result is None
    assert "expected FP32" in str(error)
    assert streamed(seen[1, :1])[0].as_numpy("action").tolist() == [expected[1, 0]]


def test_a_stream_s_life_ends_with_it(server, known):
    closed = 'hamlet_sessions_closed_total{reason="deleted"}'
    with triton.InferenceServerClient(address(server)) as client:
        answers: queue.Queue = queue.Queue()
        client.start_stream(lambda result, error: answers.put(error))
        client.async_stream_infer(NAME, inputs(obs=known[0][0, :1]))
        assert answers.get(timeout=10) is None
        text = server.ask("GET", "/metrics").body.decode()
        before = server.metric(closed) if closed in text else 0
        client.stop_stream()
    assert server.metric(closed) == before + 1


@pytest.mark.parametrize(
    ("arrays", "told"),
    [
        ({"obs": np.zeros((1, 7), np.float32)}, "INVALID_ARGUMENT.*expected FP32"),
        ({"obs": np.zeros((1, 6), np.float64)}, "INVALID_ARGUMENT.*is FP64"),
        ({}, "INVALID_ARGUMENT.*'obs' is missing"),
        ({"obs": np.full((1, 6), np.nan, np.float32)}, "INVALID_ARGUMENT.*'obs' holds nan"),
    ],
)
def test_what_is_wrong_is_said(client, arrays, told):
    with pytest.raises(InferenceServerException, match=told):
        client.infer(NAME, inputs(**arrays), sequence_id=5, sequence_start=True)


def test_a_token_is_asked_for(policy, known):
    options = ("--grpc-port", "0")
    with (
        Served(policy, *options, env={"HAMLET_TOKEN": "secret", "PATH": "/bin"}) as server,
        triton.InferenceServerClient(address(server)) as client,
    ):
        assert client.is_server_live()
        with grpc.insecure_channel(address(server)) as channel:  # a probe has no token
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            assert check(b"", timeout=10) == b"\x08\x01"
        obs = inputs(obs=known[0][0, :1])
        for headers in ({}, {"authorization": "Bearer wrong"}):
            with pytest.raises(InferenceServerException, match=r"UNAUTHENTICATED.*token"):
                client.infer(NAME, obs, headers=headers)
        told = client.infer(NAME, obs, headers={"authorization": "Bearer secret"})
        assert told.as_numpy("action").tolist() == [known[1][0, 0]]


def test_a_port_that_is_taken(policy, server):
    with pytest.raises(AssertionError, match="cannot be listened on"):
        Served(policy, "--grpc-port", address(server).rpartition(":")[2]).wait("nothing", 20)
