"""Learning from logs: memory and speed for a million rows; returns beside d3rlpy's.

    python -m benchmarks.offline rows [--rows 1000000]
    python -m benchmarks.offline peers [--seeds 3]

`rows` writes a Parquet log of so many decisions, reads it into a store and trains PPO on it, each
row once, in processes of their own: one undisturbed, one killed by SIGKILL after its first
checkpoint and started again. It tells rows per second, the largest resident memory, PyTorch's own
included, and whether both made the same bytes. Exit code 1 if not, or if the memory passed 1 GB.

`peers` records CartPole as a Minari data set: an expert of 500 steps an episode in one of 40
episodes, a random policy in the others. Our imitation, PPO and IMPALA and d3rlpy's discrete BC and
CQL learn from the same rows; each plays by its likeliest action in the real environment, with the
same starts. d3rlpy's algorithms keep their defaults but for CQL's learning rate, which is BC's (its
own is meant for Atari). The seconds are those of training alone, on one thread.

Results go to benchmarks/results/offline_rows.json, offline_peers.json and offline_peers.md.
Needs the `bench` extra.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from hamlet.artifacts import atomic_path, read_json, sha256_file, write_json
from hamlet.offline.gym import play, record
from hamlet.offline.log_store import LogStore
from hamlet.offline.open_log import open_log
from hamlet.offline.train import OfflineParams, new_policy, train_policy_on_log

RESULTS = Path(__file__).parent / "results"
LIMIT = 1e9  # bytes
FEATURES, ACTIONS, LENGTH = 16, 6, 100
SCHEMA = f"""\
actions: {ACTIONS}
log_prob: log_prob
terminated: terminated
fields:
  seen: {{kind: vector, columns: [{", ".join(f"x{i}" for i in range(FEATURES))}]}}
"""


class Progress:
    """A log of a training that tells how long the steps took, without the first."""

    def __init__(self) -> None:
        self.began, self.seconds, self.done = 0.0, 0.0, 0

    def steps(self, total: int, start: int) -> range:
        return range(start, total)

    def record(self, step: int, metrics: Any) -> None:
        if not self.began:
            self.began = time.monotonic()
            return
        self.done += 1
        self.seconds = time.monotonic() - self.began


# ------------------------------------------------------------------------------------------------
# A million rows


def write_log(path: Path, rows: int) -> None:
    """Write a Parquet log of random decisions; half of the reward tells of the action."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng, writer = np.random.default_rng(0), None
    for start in range(0, rows, 100_000):
        n = min(100_000, rows - start)
        number = start + np.arange(n)
        seen = rng.normal(size=(FEATURES, n)).astype(np.float32)
        action = rng.integers(ACTIONS, size=n)
        columns = {f"x{i}": x for i, x in enumerate(seen)} | {
            "episode": number // LENGTH, "step": number % LENGTH, "action": action,
            "log_prob": np.full(n, -np.log(ACTIONS)), "terminated": number % LENGTH == LENGTH - 1,
            "reward": (action == seen[:ACTIONS].argmax(0)) + rng.normal(size=n),
        }  # fmt: skip
        table = pa.table(columns)
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    if writer:
        writer.close()
    path.with_suffix(".yaml").write_text(SCHEMA)


def train_once(log: Path, out: Path) -> None:
    """What a child does: read the log, train each row once, tell of it in `out`/told.json."""
    began = time.monotonic()
    store = open_log(log, None, out / "cache")
    reading = time.monotonic() - began
    rows = int(store.facts["rows"])
    params = OfflineParams(steps=max(rows * 4 // 5 // (64 * 50), 2), window=50, windows=64)
    policy, progress = new_policy(store, params), Progress()
    train_policy_on_log(store, policy, params, out / "checkpoint.pt", progress)
    torch.save(policy.state_dict(), out / "policy.pt")
    write_json(out / "told.json", {
        "reading_rows_per_second": rows / reading,
        "training_rows_per_second": progress.done * 64 * 50 / max(progress.seconds, 1e-9),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    })  # fmt: skip


def child(log: Path, out: Path) -> subprocess.Popen:
    out.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "benchmarks.offline", "child", str(log), str(out)]
    return subprocess.Popen(command)


def measure_rows(rows: int) -> dict[str, Any]:
    """See the top of this file."""
    with TemporaryDirectory() as folder:
        log, whole, cut = (Path(folder) / name for name in ("log.parquet", "whole", "cut"))
        write_log(log, rows)
        if child(log, whole).wait():
            raise SystemExit(1)
        first = child(log, cut)
        while not (cut / "checkpoint.pt").exists() and first.poll() is None:
            time.sleep(0.05)
        killed = first.poll() is None
        first.send_signal(signal.SIGKILL)
        first.wait()
        if child(log, cut).wait():
            raise SystemExit(1)
        told = read_json(whole / "told.json")
        again = read_json(cut / "told.json")
        return told | {
            "rows": rows,
            "peak_bytes": max(told["peak_bytes"], again["peak_bytes"]),
            "killed": killed,
            "same_bytes": sha256_file(whole / "policy.pt") == sha256_file(cut / "policy.pt"),
        }


# ------------------------------------------------------------------------------------------------
# Beside d3rlpy


def expert(seen: np.ndarray) -> np.ndarray:
    """Log-probabilities float [2] of one who keeps CartPole up for 500 steps."""
    fall = 20 * float(seen @ np.array([0.05, 0.1, 1.0, 0.5]))
    return -np.logaddexp(0, [fall, -fall])


def uniform(seen: np.ndarray) -> np.ndarray:
    """Log-probabilities float [2] of one who tosses a coin."""
    return np.log([0.5, 0.5])


def ours(objective: str, store: LogStore, seed: int, folder: Path) -> Callable:
    """Train; returns what acts."""
    params = OfflineParams(objective=objective, seed=seed)  # type: ignore[arg-type]
    policy = new_policy(store, params)
    train_policy_on_log(store, policy, params, folder / f"{objective}-{seed}.pt", Progress())

    @torch.no_grad()
    def act(seen: np.ndarray) -> int:
        logits, _ = policy.heads(
            policy.trunk(policy.encode({"observation": torch.from_numpy(seen)[None].float()})), None
        )
        return int(logits.argmax())

    return act


def theirs(name: str, store: LogStore, seed: int, folder: Path) -> Callable:
    """d3rlpy on the rows that ours learn from; returns what acts."""
    import d3rlpy
    from d3rlpy.dataset import MDPDataset
    from d3rlpy.logging import NoopAdapterFactory

    d3rlpy.seed(seed)
    learned = np.repeat(~store.held_out(), np.diff(store.starts))
    action = (store.flags & 4 == 0) & learned  # a final row has none
    dataset = MDPDataset(
        np.asarray(store.fields["observation"])[action], np.asarray(store.action)[action],
        np.asarray(store.reward)[action], (store.flags[action] & 1 > 0).astype(np.float32),
        (store.flags[action] & 2 > 0).astype(np.float32),
        action_space=d3rlpy.constants.ActionSpace.DISCRETE,
    )  # fmt: skip
    config = {
        "bc": d3rlpy.algos.DiscreteBCConfig(),
        "cql": d3rlpy.algos.DiscreteCQLConfig(learning_rate=1e-3),
    }[name]
    algorithm = config.create(device="cpu:0")
    algorithm.fit(
        dataset, n_steps=4_000, n_steps_per_epoch=4_000, show_progress=False,
        logger_adapter=NoopAdapterFactory(),
    )  # fmt: skip
    return lambda seen: int(algorithm.predict(seen[None])[0])


LEARNERS: dict[str, tuple[Callable, str]] = {
    "ours, imitation": (ours, "imitation"),
    "ours, PPO": (ours, "ppo"),
    "ours, IMPALA": (ours, "impala"),
    "d3rlpy, discrete BC": (theirs, "bc"),
    "d3rlpy, discrete CQL": (theirs, "cql"),
}


def measure_peers(seeds: int) -> dict[str, Any]:
    """Returns and seconds of each learner, by seed."""
    import gymnasium

    torch.set_num_threads(1)
    env = gymnasium.make("CartPole-v1")
    found: dict[str, Any] = {name: {"returns": [], "seconds": []} for name in LEARNERS}
    with TemporaryDirectory() as folder:
        os.environ["MINARI_DATASETS_PATH"] = folder
        policies = [expert] + [uniform] * 39
        data = record(env, "cartpole/mixed-v0", 400, policies, np.random.default_rng(0))
        store = open_log(data, None, Path(folder) / "cache")
        for seed in range(seeds):
            for name, (learn, which) in LEARNERS.items():
                began = time.monotonic()
                act = learn(which, store, seed, Path(folder))
                found[name]["seconds"].append(time.monotonic() - began)
                found[name]["returns"].append(float(np.mean(play(env, act, 20, 1_000))))
                print(name, seed, found[name]["returns"][-1], flush=True)
        rows = store.facts["rows"]
    rng = np.random.default_rng(1)
    for name, odds in (("the expert", expert), ("random", uniform)):
        acts = lambda seen, odds=odds: int(rng.random() > np.exp(odds(seen)[0]))  # noqa: E731
        found[name] = {"returns": [float(np.mean(play(env, acts, 20, 1_000)))], "seconds": []}
    return {"rows": rows, "seeds": seeds, "episodes": 400, "learners": found}


def table(found: dict[str, Any]) -> str:
    """The committed page."""
    lines = [
        "# Learning from a log, beside d3rlpy", "",
        f"By `python -m benchmarks.offline peers`: {found['rows']} rows of CartPole, of an expert "
        f"in one of 40 episodes and a random policy in the others; {found['seeds']} seeds. Returns "
        "are means of 20 episodes in the real environment, 500 at most; seconds of training on one "
        "thread of a machine that others used too, so only their order tells.", "",
        "| | return | lowest seed | seconds |", "| --- | --- | --- | --- |",
    ]  # fmt: skip
    for name, x in found["learners"].items():
        seconds = f"{np.mean(x['seconds']):.1f}" if x["seconds"] else ""
        returns = x["returns"]
        lines.append(f"| {name} | {np.mean(returns):.0f} | {min(returns):.0f} | {seconds} |")
    return "\n".join([*lines, ""])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("rows").add_argument("--rows", type=int, default=1_000_000)
    commands.add_parser("peers").add_argument("--seeds", type=int, default=3)
    one = commands.add_parser("child")
    one.add_argument("log", type=Path)
    one.add_argument("out", type=Path)
    given = parser.parse_args(arguments)
    if given.command == "child":
        train_once(given.log, given.out)
        return 0
    if given.command == "peers":
        peers = measure_peers(given.seeds)
        write_json(RESULTS / "offline_peers.json", peers)
        with atomic_path(RESULTS / "offline_peers.md") as path:
            path.write_text(table(peers), encoding="utf-8")
        print(table(peers))
        return 0
    rows = measure_rows(given.rows)
    rows["holds"] = rows["killed"] and rows["same_bytes"] and rows["peak_bytes"] < LIMIT
    write_json(RESULTS / "offline_rows.json", rows)
    print(rows)
    return 0 if rows["holds"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
