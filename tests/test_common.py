"""How a stage begins, shows its progress and ends; each as a real process."""

import os
import platform
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from copied_repo import warm

pytest.importorskip("torch")

ROOT = Path(__file__).parents[1]

STAGE = """
import sys, time
from stages.common import progress, stage
with stage("perception") as s:
    folder = s.checkpoint_dir("input.bin")
    if (folder / "step").exists():
        print("resumed at", (folder / "step").read_text(), flush=True)
    {body}
print("done", flush=True)
"""


@pytest.fixture
def repo(tmp_path):
    (tmp_path / ".dvc").mkdir()
    (tmp_path / "input.bin").write_text("1")
    shutil.copy(ROOT / "params.yaml", tmp_path)
    return tmp_path


# The stage's work alone, without params, PyTorch and tracking: quick to start.
LIGHT = """
import sys, time
from stages.common import one_line_errors, progress
with one_line_errors("perception"):
    {body}
"""

# These tests are not about MLflow: a stage also runs where it is not installed.
NO_MLFLOW = """
import sys, hamlet.tracking as t
t.RETRY_SECONDS = 0
for name in ("mlflow", *sys.modules):
    if name.split(".")[0] == "mlflow":
        sys.modules[name] = None
"""


def environment() -> dict[str, str]:
    keep = {k: v for k, v in os.environ.items() if k not in ("DVC_ROOT", "MLFLOW_TRACKING_URI")}
    return keep | {"PYTHONPATH": str(ROOT)}


def start(body, cwd, template=STAGE, python=sys.executable, env=None, **kwargs):
    code = NO_MLFLOW + template.format(body=body.replace("\n", "\n    "))
    defaults = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command, env = [python, "-c", code], env or environment()
    return subprocess.Popen(command, cwd=cwd, env=env, **{**defaults, **kwargs})


def finish(body, cwd, template=STAGE):
    """Of a whole stage, which imports PyTorch, a fork of a process that has it imported."""
    forked = ("python", warm(environment())) if template is STAGE else ()
    process = start(body, cwd, template, *forked)
    out, err = process.communicate(timeout=60)
    err = [line for line in err.splitlines() if not line.startswith("warning: sqlite")]
    return process.returncode, out, err


def test_a_users_error_is_one_line_and_exit_code_1(repo):
    (repo / "params.yaml").write_text("sed: 1\n")
    code, out, err = finish("", repo)
    assert code == 1
    assert "done" not in out
    assert len(err) == 1
    assert err[0].startswith("perception: params.yaml: unknown key `sed`")
    assert "did you mean `seed`" in err[0]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            "open('artifacts/dataset.bin')",
            "perception: artifacts/dataset.bin is missing: run `dvc repro collect`",
        ),
        ("raise MemoryError", "perception: the memory is full"),
    ],
)
def test_known_system_errors_are_one_line(repo, body, says):
    (repo / "dvc.yaml").write_text("stages: {collect: {cmd: x, outs: [artifacts/dataset.bin]}}")
    code, _, err = finish(body, repo, LIGHT)
    assert code == 1
    assert len(err) == 1
    assert err[0].startswith(says)


def test_a_bug_keeps_its_traceback(repo):
    code, _, err = finish("{}['x']", repo, LIGHT)
    assert code == 1
    assert "Traceback" in err[0]


WORK = """for step in progress(1000, "perception"):
    (folder / "step").write_text(str(step))
    if step == 3: print("working", flush=True)
    time.sleep(0.05)"""


def test_an_interrupt_is_one_line(repo):
    code, _, err = finish("raise KeyboardInterrupt", repo, LIGHT)
    assert code == 130
    assert err == ["perception was interrupted: run `dvc repro perception` to start it again"]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_keeps_the_checkpoint_and_says_so(repo, number, code):
    process = start(WORK, repo)
    assert process.stdout.readline() == "working\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code
    last = err.splitlines()[-1]
    assert "perception was interrupted: the checkpoint in checkpoints/perception-" in last
    assert "Traceback" not in err
    code, out, _ = finish("pass", repo)
    assert code == 0
    assert out.startswith("resumed at ")
    assert not list((repo / "checkpoints").glob("*/")), "removed after success"


@pytest.mark.slow
def test_other_params_or_inputs_do_not_resume(repo):
    body = "(folder / 'step').write_text('1'); raise KeyboardInterrupt"
    assert finish(body, repo)[0] == 130
    (repo / "input.bin").write_text("2")
    _, out, _ = finish("pass", repo)
    assert out == "done\n"
    (repo / "input.bin").write_text("1")
    text = (repo / "params.yaml").read_text()
    (repo / "params.yaml").write_text(re.sub(r"^seed: \d+", "seed: 987", text, flags=re.M))
    _, out, _ = finish("pass", repo)
    assert out == "done\n"
    (repo / "params.yaml").write_text(text)
    _, out, _ = finish("pass", repo)
    assert out == "resumed at 1\ndone\n"


@pytest.mark.slow
def test_two_processes_at_the_same_work_do_not_share_a_folder(repo):
    body = "print(folder, flush=True); time.sleep({})"
    first = start(body.format(60), repo)
    one = first.stdout.readline()
    _, two, _ = finish(body.format(0), repo)
    first.kill()
    first.communicate()
    assert one.strip() != two.splitlines()[0]
    assert Path(one.strip()).is_dir()


def test_progress_is_plain_lines_without_a_terminal(repo):
    body = """import stages.common
stages.common.PLAIN_SECONDS = 0.1
bar = progress(30, "training", start=10)
for step in bar:
    bar.note(loss=step / 7)
    time.sleep(0.02)"""
    code, _, err = finish(body, repo, LIGHT)
    assert code == 0
    assert err[0] == "training: 10/30 (33 %)"
    assert 3 <= len(err) <= 8
    assert any("s left, loss" in line for line in err)
    assert err[-1].startswith("training: 30/30 (100 %)")
    assert err[-1].endswith("loss 4.143")
    assert "\x1b" not in "".join(err)


def test_progress_is_a_bar_on_a_terminal(repo):
    terminal, other_end = pty.openpty()
    body = "for x in progress(['a', 'b'], 'letters'): time.sleep(0.2)"
    process = start(body, repo, LIGHT, stderr=other_end, stdin=other_end)
    os.close(other_end)
    shown = b""
    while True:
        try:
            chunk = os.read(terminal, 4096)
        except OSError:
            break
        if not chunk:
            break
        shown += chunk
    assert process.wait(30) == 0
    assert b"letters" in shown
    assert "━".encode() in shown
    assert b"2/2" in shown
    assert shown.rfind(b"\x1b[?25h") > shown.rfind(b"\x1b[?25l"), "the cursor must come back"


@pytest.mark.slow
def test_seeds_threads_and_determinism(repo, monkeypatch):
    body = (
        "import torch; print(torch.rand(()).item(), torch.get_num_threads(), "
        "torch.are_deterministic_algorithms_enabled())"
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    first, second = (finish(body, repo)[1] for _ in range(2))
    assert first == second
    assert first.split()[1:3] == ["3", "True"]


def test_a_process_has_one_thread_unless_told_otherwise(monkeypatch):
    from stages.common import threads

    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads() == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert threads() == 1


def test_cores_are_those_of_the_process():
    from stages.common import cores

    assert 1 <= cores() <= (os.cpu_count() or 1)
    if hasattr(os, "sched_setaffinity"):
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(allowed)})
        try:
            assert cores() == 1
        finally:
            os.sched_setaffinity(0, allowed)


def test_start_is_quick_where_torch_is_not_needed():
    code = "import sys, stages.common; print('torch' in sys.modules, 'mlflow' in sys.modules)"
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False"], time.monotonic() - began


BORROWED = """
import ctypes, sys, torch
from stages.common import keep_memory
class Info(ctypes.Structure):  # malloc.h
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
        "fordblks", "keepcost")]
told = ctypes.CDLL(None).mallinfo2
told.restype = Info
if sys.argv[1] == "kept":
    keep_memory()
before = told().hblkhd
tensor = torch.ones(5_000_000)
print(told().hblkhd - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library's memory")
def test_a_large_tensor_is_not_given_back_to_the_system():
    """Nor borrowed from it for itself alone, which is what makes it go back when it is freed."""
    borrowed = {}
    for name in ("kept", "as_it_is"):
        command = [sys.executable, "-c", BORROWED, name]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        borrowed[name] = int(done.stdout)
    assert borrowed["as_it_is"] >= 20_000_000
    assert borrowed["kept"] == 0


@pytest.mark.parametrize(
    ("argument", "expected"), [("-m", "False True 20000"), ("-c", "True True 700")]
)
def test_garbage_is_looked_for_when_what_a_stage_needs_is_imported(argument, expected):
    body = f"""
import gc, sys
sys.argv[0] = "{argument}"  # as `python {argument}` has it while a package is imported
import stages
print(gc.isenabled())
from stages.common import one_line_errors
with one_line_errors("perception"):
    print(gc.isenabled(), gc.get_threshold()[0])
"""
    done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, check=True)
    assert done.stdout.split() == expected.split()
