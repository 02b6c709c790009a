"""Every trainer on a GPU that is emulated; which device a stage takes, and what it says if none."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.counts import Untrained, default_params
from benchmarks.device_work import numbers
from hamlet.artifacts import HamletError
from hamlet.device import Chosen, Found, check_ranks, memory_errors, resolve
from hamlet.learning import compiling, distributed
from hamlet.learning.captured import Captured
from hamlet.learning.compiling import compiled_or_plain
from hamlet.learning.population import thinking_slots
from hamlet.moving import constant, moved, uploaded
from stages.common import one_line_errors

ROOT = Path(__file__).parents[1]
CLOSE = 1e-5
BEFORE = "once, before the first tick or update"
ONCE = "a constant: made once per device"
WAITS = {
    "update.py:_apply": "each update: what is not a number must not reach the weights",
    "rollout.py:_learn": "each minibatch of PPO: whether it has gone far enough",
    "rollout.py:evaluate": "every GPU_TICKS ticks: whether all is over",
    "checkpoint.py:save": "every 20 seconds: the file is written from the CPU",
    "train_prover.py:consider": "15 times in a phase: proofs are ranked on the CPU",
    "train_prover.py:_search": "at the end of a search: its results go to the CPU",
    "players.py:_setup": BEFORE,
    "expert.py:_changes": BEFORE,
    "train_world_model.py:output_scale": BEFORE,
    "train_world_model.py:train_world_model": BEFORE,
}
"""Where the host waits for the GPU, and why."""
UPLOADS = {
    "buffer.py:minibatches": "each epoch: the order, drawn on the CPU",
    "sequences.py:sent": "each update: which rows to read, drawn on the CPU",
    "train_policy.py:learn": "each iteration: who deliberates",
    "train_policy.py:play": "each iteration: who deliberates and where the expert acts, all ticks",
    "world.py:eval": "each search: its queries",
    "world.py:train_pool": "each search: the training facts again",
    "elsewhere": "the tests' own data",
    **dict.fromkeys(
        (
            "expert.py:<genexpr>", "expert.py:<listcomp>", "expert.py:__init__",
            "players.py:_setup", "town.py:rearrange",
            "policy_losses.py:__init__", "train_perception.py:train_perception",
            "train_policy.py:train_policy", "train_social.py:train_social",
            "train_world_model.py:train_world_model",
        ),
        BEFORE,
    ),
    **dict.fromkeys(
        (
            "perception.py:draw",
            "policy.py:goal_ended", "social.py:logits",
            "world_model.py:apply_rules", "world_model.py:fields", "world_model.py:places_of",
            "critic.py:privileged_features", "policy.py:map_size", "policy.py:wait",
            "policy.py:posted_hours", "policy.py:place_facts", "policy.py:low_money_bias",
            "frontier.py:cell_at", "frontier.py:where_to_look",
        ),
        ONCE,
    ),
}  # fmt: skip
"""Where numbers are sent to the GPU, and when; nowhere at every tick."""


class Emulated:
    """What `tests.emulated` tells: each piece of work as soon as it is done."""

    def __init__(self, process: subprocess.Popen[str], said: Path) -> None:
        self.process, self.said, self.told = process, said, {}

    def __getitem__(self, name: str) -> Any:
        assert self.process.stdout
        while name not in self.told:
            line = self.process.stdout.readline()
            assert line, self.said.read_text()[-3000:]
            key, told = json.loads(line)
            self.told[key] = told
        return self.told[name]


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Iterator[Emulated]:
    """In a process of its own, which the emulated device changes."""
    said = tmp_path_factory.mktemp("device") / "stderr.txt"
    command = [sys.executable, "-m", "tests.emulated"]
    with (
        said.open("w") as stderr,
        subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True
        ) as process,
    ):
        yield Emulated(process, said)
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["perception", "world_model", "policy", "social", "prover"])
def test_training_on_a_gpu_measures_what_it_does_on_the_cpu(done, name):
    ours, theirs = (dict(numbers(done[name][device])) for device in ("cpu", "gpu"))
    for name in ours:
        assert theirs.pop(name) == pytest.approx(ours[name], rel=CLOSE, abs=CLOSE), name
    assert not theirs
    assert len(ours) > 16


@pytest.mark.slow
def test_what_began_on_one_device_goes_on_on_the_other_and_says_so(done):
    expected = dict(numbers(done["social"]["cpu"]["rows"]))
    for found in done["crossed"]:
        assert dict(numbers(found)) == pytest.approx(expected, rel=CLOSE, abs=CLOSE)
    for first, then in (("cpu", "gpu"), ("gpu", "cpu")):
        line = f"a training begun on {first} goes on on {then}: not bit for bit"
        assert done.said.read_text().count(line) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "allowed"), [("waits", WAITS), ("uploads", UPLOADS)])
def test_the_host_waits_and_sends_only_where_there_is_a_reason(done, kind, allowed):
    assert set(done["seen"][kind]) <= set(allowed), done["seen"][kind]


@pytest.mark.slow
def test_of_what_is_asked_at_every_update_there_is_one(done):
    seen = done["seen"]["waits"]
    rows = [done[name]["gpu"]["rows"] for name in ("perception", "world_model", "social", "prover")]
    rows += [done["policy"]["gpu"][name] for name in ("ppo", "impala")]
    assert seen["update.py:_apply"] <= 3 * sum(map(len, rows))


# ------------------------------------------------------------------------------------------------
# Which device


NOTHING = Found(0, "no usable GPU is found")


@pytest.mark.parametrize(
    ("asked", "gpus", "device"),
    [
        ("auto", NOTHING, "cpu"),
        ("auto", Found(2), "cuda:0"),
        ("cpu", Found(2), "cpu"),
        ("cuda", Found(1), "cuda:0"),
        ("cuda:1", Found(2), "cuda:1"),
    ],
)
def test_a_stage_takes_the_device_that_is_asked_for(asked, gpus, device):
    assert resolve(asked, gpus).device == torch.device(device)


def test_without_a_gpu_the_reason_is_told():
    assert resolve("auto", NOTHING).why == "no usable GPU is found"


@pytest.mark.parametrize(
    ("asked", "gpus", "told"),
    [
        ("gpu", Found(1), "HAMLET_DEVICE is 'gpu': give auto, cpu, cuda or cuda:N"),
        ("cuda:", Found(1), "HAMLET_DEVICE is 'cuda:': give auto"),
        ("cuda", NOTHING, "HAMLET_DEVICE is cuda and no usable GPU is found: give cpu"),
        ("cuda:2", Found(2), "HAMLET_DEVICE is cuda:2 and there is cuda:0 to cuda:1: give one"),
        ("cuda:1", Found(1), "HAMLET_DEVICE is cuda:1 and there is cuda:0 only: give one"),
        (
            "cuda",
            Found(0, "the NVIDIA driver is too old for this torch"),
            "HAMLET_DEVICE is cuda and the NVIDIA driver is too old for this torch: install a ",
        ),
    ],
)
def test_what_cannot_be_had_is_one_line(asked, gpus, told):
    with pytest.raises(HamletError) as error:
        resolve(asked, gpus)
    assert str(error.value).startswith(told)
    assert "\n" not in str(error.value)


def test_each_rank_has_a_gpu_of_its_own():
    taken = [resolve("auto", Found(4), rank, 4).device for rank in range(4)]
    assert taken == [torch.device("cuda", number) for number in range(4)]
    assert resolve("auto", NOTHING, 1, 2).device == torch.device("cpu")
    with pytest.raises(HamletError, match="cuda:1 for 2 ranks"):
        resolve("cuda:1", Found(2), 0, 2)


def test_more_ranks_than_gpus_is_one_line():
    check_ranks(2, 2)
    for gpus, told in ((1, "3 ranks are more than the 1 GPU here"), (2, "the 2 GPUs here")):
        with pytest.raises(HamletError, match=told):
            check_ranks(3, gpus)
        with pytest.raises(HamletError, match=told):
            resolve("auto", Found(gpus), 2, 3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to be had")
def test_a_stage_without_what_it_was_told_to_take_ends_at_once(tmp_path, monkeypatch):
    for file in ("params.yaml", "dvc.yaml"):
        (tmp_path / file).write_text((ROOT / file).read_text())
    monkeypatch.setenv("HAMLET_DEVICE", "cuda:7")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    ended = subprocess.run(
        [sys.executable, "-m", "stages.collect"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("collect: HAMLET_DEVICE is")


def test_a_full_gpu_names_what_to_make_smaller(capsys):
    with pytest.raises(SystemExit) as end, one_line_errors("policy"), memory_errors("policy"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore lines.")
    assert end.value.code == 1
    told = "policy: the GPU's memory is full: make policy.worlds smaller in params.yaml\n"
    assert capsys.readouterr().err == told


# ------------------------------------------------------------------------------------------------
# Moving


def test_what_is_there_already_is_not_copied():
    x = torch.ones(3)
    value = {"a": [x, (x, 1)], "b": "c"}
    assert moved(value, "cpu") is value
    away = moved(value, "meta")
    assert (away["a"][0].device.type, away["a"][1][1], away["b"]) == ("meta", 1, "c")


def test_tensors_sent_together_are_the_same_apart():
    parts = [torch.arange(n) for n in (3, 0, 2)]
    assert uploaded(parts, torch.device("cpu")) is parts
    sizes = [len(part) for part in uploaded(parts, torch.device("meta"))]
    assert sizes == [3, 0, 2]


def test_a_constant_is_made_once_but_on_the_cpu():
    one, other = (constant([[1], [2]], torch.float32, torch.device("meta")) for _ in range(2))
    assert one is other
    here = [constant([[1], [2]], torch.float32, torch.device("cpu")) for _ in range(2)]
    assert here[0] is not here[1]
    assert torch.equal(here[0], torch.tensor([[1.0], [2.0]]))


def test_a_constant_in_code_that_is_compiled_for_a_gpu_is_the_same():
    """As code for a device that has no numbers, and then run where there are some."""
    rows, index = [[1, 2, 3], [4, 5, 6]], (0, 2)

    def uses(x):
        numbers = constant(rows, torch.float32, x.device)
        return (x * numbers).index_select(-1, constant(index, torch.int64, x.device))

    kept = []

    def keep(graph, inputs):
        kept.append(graph)
        return graph.forward

    torch.compile(uses, fullgraph=True, backend=keep)(torch.empty(2, 3, device="meta"))
    (graph,) = kept
    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": "cpu"}
    graph.recompile()
    x = torch.rand(2, 3)
    assert torch.equal(graph(x)[0], (x * torch.tensor(rows))[:, [0, 2]])


class Elsewhere(torch.Tensor):
    """A tensor of the CPU that says it is not there."""

    @property
    def device(self):
        return torch.device("meta")


@pytest.mark.parametrize("tick", [0, 1, 7])
def test_a_gpu_need_not_be_asked_how_many_deliberate(tick):
    clock = torch.arange(8).repeat_interleave(3) + tick
    asked = thinking_slots(clock, 3, 4)
    assert len(asked) == 6
    told = thinking_slots(clock.as_subclass(Elsewhere), 3, 4)
    assert told.tolist() == asked.tolist()


def test_where_the_period_does_not_divide_the_worlds_a_gpu_is_asked():
    clock = torch.arange(3).repeat_interleave(4)  # of twelve agents those of one world deliberate
    asked = thinking_slots(clock, 4, 4)
    assert asked.tolist() == [0, 1, 2, 3]
    assert thinking_slots(clock.as_subclass(Elsewhere), 4, 4).tolist() == asked.tolist()


def test_what_is_compiled_for_a_gpu_is_compiled_for_each_size(monkeypatch):
    """A size that is not known is one that CUDA's GRU cannot be compiled for."""
    seen: list[bool] = []

    def keep(graph, inputs, **options):
        seen.append(all(isinstance(x, torch.Tensor) for x in inputs))
        return graph.forward

    real = torch.compile

    def compile(function, options, **others):
        return real(function, backend=keep, **others)

    monkeypatch.setattr(torch, "compile", compile)
    for name, fixed in (("cuda", True), ("cpu", False)):
        monkeypatch.setattr(compiling, "chosen", partial(Chosen, torch.device(name), "asked for"))
        twice = compiling.compiled(lambda x: x.sum() * len(x))
        assert [float(twice(torch.ones(n))) for n in (2, 3, 5)] == [4, 9, 25]
        assert all(seen) == fixed
        assert (len(seen) == 3) == fixed
        seen.clear()


# ------------------------------------------------------------------------------------------------
# The benchmark


def test_without_a_gpu_the_benchmark_says_so_and_measures_nothing(monkeypatch, capsys):
    monkeypatch.setenv("HAMLET_DEVICE", "auto")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert gpu.main([]) == 2
    assert "nothing is measured" in capsys.readouterr().err


@pytest.mark.slow
def test_its_measures_are_numbers_where_they_can_run():
    """Eager, on the CPU, at a size that says nothing of speed; each waits once for its turn."""
    setting, turns = Untrained(default_params(), torch.device("cpu")), []
    agents = setting.shape.num_agents
    for measure, way, size in (
        (gpu.town_speed, "eager", 2),
        (gpu.learning_speed, "eager", 8),
        (gpu.update_ms, "tf32", 4 * agents),
    ):
        assert measure(setting, way, size, 0.01, lambda: turns.append(1)) > 0
    assert len(turns) == 3


@pytest.mark.slow
def test_a_rollout_with_the_mind_is_measured():
    setting = Untrained(default_params(), torch.device("cpu"))
    assert gpu.mind_speed(setting, "eager", 8, 0.01, lambda: None) > 0


@pytest.mark.slow
def test_a_measure_of_its_own_process_waits_for_its_turn(monkeypatch):
    monkeypatch.setenv("HAMLET_DEVICE", "cpu")
    asked = gpu.Asked("town", "eager", 2, 0.01)
    asked.wait()
    assert asked.line == "ready\n"
    assert asked.process.poll() is None
    assert asked.answer() > 0


def test_a_measure_that_fails_before_its_turn_says_why(monkeypatch):
    monkeypatch.setenv("HAMLET_DEVICE", "cpu")
    monkeypatch.setattr(gpu, "MEASURES", {"town": gpu.town_speed})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.stdin", None)  # nobody is asked for a turn
        told = gpu.one_measure("town", "graph", 2, 0.01)
    assert isinstance(told, str)
    assert "\n" not in told


def test_a_graph_that_was_not_captured_is_an_error():
    def ask():
        gpu.replayed(Captured(lambda x: x))
        return 1.0

    told = gpu.or_reason(ask)
    assert told == "not captured: 0 replays, 0 calls outside"
    assert gpu.failed({"graph": {1024: told}})
    assert not gpu.failed({"graph": {1024: 1.0}, "fp8": {"none": "too small"}})


def test_what_ran_slower_instead_is_no_measure():
    def ask():
        compiled_or_plain(broken)(torch.ones(1))
        return 1.0

    assert gpu.or_reason(ask).startswith("compiling failed, eager from now on: ")


def broken(x):
    """Cannot be compiled as one graph."""
    print("seen")
    return x


def test_the_noise_that_is_compared_is_the_noise_of_training():
    like = torch.zeros(3, 4, 5)
    drawn = []
    for noise in (distributed.noise, gpu.noise_of_the_cpu):
        torch.manual_seed(3)
        drawn.append(noise(like, 1))
    assert torch.equal(*drawn)
