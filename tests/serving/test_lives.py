"""Many lives in one request, over HTTP."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from served import Answer, Served

from benchmarks.gru import lives, write_gru

TICKS, LIVES = 12, 32
INFER = "/v2/models/gru/infer"


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return write_gru(tmp_path_factory.mktemp("gru") / "gru.onnx")


@pytest.fixture(scope="module")
def server(policy):
    with Served(policy, "--max-sessions", "100") as served:
        yield served


@pytest.fixture(scope="module")
def known(policy):
    return lives(policy, TICKS, LIVES)


def tensor(name, datatype, values, shape=None) -> dict:
    data = values.ravel().tolist() if isinstance(values, np.ndarray) else list(values)
    return {"name": name, "datatype": datatype, "shape": shape or [len(values)], "data": data}


def body(seen, ids, *more, outputs=("action",), **top) -> dict:
    kind = "BYTES" if isinstance(ids[0], str) else "INT64"
    inputs = [
        tensor("sequence_id", kind, ids),
        tensor("obs", "FP32", seen, [len(seen), seen.shape[1]]),
        *more,
    ]
    return {"inputs": inputs, "outputs": [{"name": name} for name in outputs], **top}


def started(flags) -> dict:
    return tensor("sequence_start", "BOOL", flags)


def actions(answer: Answer) -> list[int]:
    assert answer.status == 200, answer.body
    assert answer.json["outputs"][0]["shape"] == [len(answer.json["outputs"][0]["data"])]
    return answer.json["outputs"][0]["data"]


def open_ones(server) -> int:
    text = server.ask("GET", "/metrics").body.decode()
    lines = [line for line in text.splitlines() if line.startswith("hamlet_sessions{")]
    return sum(int(float(line.rpartition(" ")[2])) for line in lines)


def test_rows_are_lives_of_their_own_whatever_their_order(server, known):
    seen, expected = known
    rng = np.random.default_rng(3)
    for tick in range(TICKS):
        order = rng.permutation(LIVES)
        ids = [f"vector {i}" for i in order]
        answer = server.ask("POST", INFER, body(seen[tick, order], ids, started([not tick] * 32)))
        assert actions(answer) == expected[tick, order].tolist()
    # One of them goes on alone, in the usual way: it is the same life.
    end = tensor("sequence_end", "BOOL", [True] * LIVES)
    ids = [f"vector {i}" for i in range(LIVES)]
    assert server.ask("POST", INFER, body(seen[0], ids, end)).status == 200
    assert server.ask("POST", INFER, body(seen[0], ids)).status == 404


def test_each_row_is_reset_alone(server, known):
    seen, expected = known
    ids = [9001, 9002, 9003]
    for tick in range(4):
        flags = [tick == 0, tick in (0, 2), tick == 0]
        got = actions(server.ask("POST", INFER, body(seen[tick, :3], ids, started(flags))))
        assert got[0] == expected[tick, 0]
        assert got[2] == expected[tick, 2]
    alone = body(seen[2, 1:2], [9004], started([True]), outputs=["logits"])
    again = body(seen[3, 1:2], [9004], outputs=["logits"])
    server.ask("POST", INFER, alone)
    expected_logits = server.ask("POST", INFER, again).json["outputs"][0]["data"]
    # 9002 began anew at tick 2: one tick later it is where 9004 is.
    both = body(seen[3, 1:2], [9002], started([False]), outputs=["logits", "h_out"])
    restarted = body(seen[2, 1:2], [9002], started([True]))
    server.ask("POST", INFER, restarted)
    answer = server.ask("POST", INFER, both).json["outputs"]
    assert answer[0]["data"] == expected_logits
    assert answer[1]["shape"] == [1, 16]


def binary(seen, ids: list[str], start: bool) -> tuple[bytes, str]:
    packed = b"".join(struct.pack("<I", len(i.encode())) + i.encode() for i in ids)
    flags, floats = np.full(len(ids), start).tobytes(), seen.tobytes()

    def entry(name, datatype, shape, data):
        parameters = {"binary_data_size": len(data)}
        return {"name": name, "datatype": datatype, "shape": shape, "parameters": parameters}

    header = json.dumps(
        {
            "inputs": [
                entry("obs", "FP32", [*seen.shape], floats),
                entry("sequence_id", "BYTES", [len(ids), 1], packed),
                entry("sequence_start", "BOOL", [len(ids)], flags),
            ],
            "outputs": [{"name": "action", "parameters": {"binary_data": True}}],
        }
    ).encode()
    return header + floats + packed + flags, str(len(header))


def test_binary_tensors(server, known):
    seen, expected = known
    ids = [f"b{i}ü" for i in range(LIVES)]
    for tick in range(3):
        data, length = binary(seen[tick], ids, tick == 0)
        answer = server.ask("POST", INFER, data, Inference_Header_Content_Length=length)
        assert answer.status == 200, answer.body
        got = np.frombuffer(answer.body[-8 * LIVES :], np.int64)
        assert got.tolist() == expected[tick].tolist()


def drop_last(inputs):
    inputs[1]["data"].pop()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda i: i[0].update(data=[1, 1]), "sequence_id '1' has two rows"),
        (lambda i: i[0].update(data=[0, 1]), "names no life"),
        (lambda i: i[0].update(shape=[3]), "has 2 values, its shape says 3"),
        (lambda i: i[0].update(shape=[2, 2]), "has shape [2, 2]"),
        (lambda i: i[0].update(datatype="FP32"), "INT64 or UINT64 or BYTES"),
        (lambda i: i[0].update(data=[1.5, 2]), "1.5 cannot be the sequence_id"),
        (lambda i: i.append(started([True])), "'sequence_start' has 1 rows, 'sequence_id' 2"),
        (lambda i: i.append(started([True, 7])), "not true or false"),
        (lambda i: i.append(tensor("seed", "INT64", [1, -1])), "no seed"),
        (lambda i: i.append(dict(i[0])), "'sequence_id' is given twice"),
        (lambda i: i[1].update(shape=[1, 6], data=[0] * 6), "has 1 rows, 'sequence_id' 2"),
        (drop_last, "11 numbers"),
        (lambda i: i[1]["data"].__setitem__(0, "x"), "not FP32"),
        (lambda i: i.pop(1), "'obs' is missing"),
        (lambda i: i[1].update(name="nobody"), "'nobody' is unknown"),
        (lambda i: i.append(tensor("h_in", "FP32", [0.0] * 32, [2, 16])), "is kept here"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_begins(server, known, change, told):
    before = open_ones(server)
    asked = body(known[0][0, :2], [1, 2])
    change(asked["inputs"])
    answer = server.ask("POST", INFER, asked)
    assert answer.status == 400
    assert told in answer.error
    assert open_ones(server) == before


def test_no_row_ticks_if_one_life_is_not_there(server, known):
    seen, expected = known
    server.ask("POST", INFER, body(seen[0, :1], ["there"], started([True])))
    answer = server.ask("POST", INFER, body(seen[1, :2], ["there", "nowhere"]))
    assert answer.status == 404
    assert "'nowhere' is not open" in answer.error
    assert actions(server.ask("POST", INFER, body(seen[1, :1], ["there"]))) == [expected[1, 0]]


def test_no_row_begins_if_not_all_can(server, known):
    seen = np.repeat(known[0][0], 4, axis=0)
    before = open_ones(server)
    ids = [f"full {i}" for i in range(len(seen))]
    answer = server.ask("POST", INFER, body(seen, ids, started([True] * len(seen))))
    assert answer.status == 429
    assert open_ones(server) == before


def test_a_request_sent_again_is_answered_again(server, known):
    seen, expected = known
    server.ask("POST", INFER, body(seen[0, :2], ["r0", "r1"], started([True, True]), id="a"))
    for _ in range(2):
        got = server.ask("POST", INFER, body(seen[1, :2], ["r0", "r1"], id="b"))
        assert actions(got) == expected[1, :2].tolist()
    got = server.ask("POST", INFER, body(seen[2, :2], ["r0", "r1"], id="c"))
    assert actions(got) == expected[2, :2].tolist()
