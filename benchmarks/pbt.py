"""Population-based training beside random search of the same budget.

    python -m benchmarks.pbt [--seeds 3] [--steps 96]

Needs the data set and the frozen perception (`dvc repro`). Both train module C as `params.yaml` has
it but for the steps, with its members and space, from the same settings and initial weights; random
search is the same code with nobody replaced. Both choose their best member by the loss on every
second held-out world; told is its loss on the others. Each search is kept in `results/pbt.json`
when it ends, one that is there for the same parameters is not run again, and one that was stopped
goes on. The last line is JSON: the losses in nats, and what random search loses more, with its 95 %
interval over the seeds (Student's t).
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from benchmarks.study_report import interval
from hamlet.artifacts import HamletError, sha256_json
from hamlet.export.frozen import load_frozen
from hamlet.learning.engines import processes
from hamlet.learning.pbt import evolve, winner
from hamlet.learning.train_social import with_labels
from hamlet.learning.tune_social import SocialMember, held_out_loss, opened, share
from hamlet.params import Params, TuneParams, load_params
from stages import paths
from stages.common import cores
from stages.data import load_beliefs, load_dataset
from stages.tune import worlds_of

RESULTS = Path(__file__).parent / "results" / "pbt.json"


def shared(params: Params, folder: Path) -> Path:
    data = folder / "data"
    if not data.exists():
        recorded = load_dataset(params)
        perceive, card = load_frozen(paths.PERCEPTION, recorded.shape.pack_hash)
        labelled = with_labels(recorded.data, load_beliefs(recorded, perceive, card))
        share(data, labelled, worlds_of(recorded), recorded.shape)
    return data


def search(
    data: Path, folder: Path, params: Params, population: TuneParams, seed: int, title: str
) -> dict[str, Any]:
    """One search; the settings and losses of the member it chooses."""
    began = time.perf_counter()
    train = SocialMember(data, folder, params.social, seed, population.generations)
    with processes(min(cores(), population.members)) as run:
        generations = evolve(population, seed, folder, train, run)
        done = list(track(generations, title, total=population.generations))
    best = winner(done)
    torch.set_num_threads(1)
    opening, worlds, _ = opened(data)
    loss = held_out_loss(train.train(best), opening, worlds["test"], params.social.chunk)
    return {
        "test_loss": round(loss, 5),
        "chosen_by": round(-best.score, 5),
        "member": best.member,
        "settings": {name: float(f"{value:.4g}") for name, value in best.settings.items()},
        "seconds": round(time.perf_counter() - began),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=96, help="of every member")
    given = parser.parse_args(arguments)
    try:
        params = load_params("params.yaml")
        social = params.social.model_copy(update={"steps": given.steps})
        params = params.model_copy(update={"social": social})
        settings = {
            name: getattr(params, name).model_dump(mode="json") for name in ("social", "tune")
        }
        folder = Path("checkpoints/pbt-benchmark").absolute()
        data = shared(params, folder)
        folder = folder / sha256_json(settings)[:8]
    except HamletError as error:
        print(f"pbt: {error}", file=sys.stderr)
        return 2
    searches = {
        "pbt": params.tune,
        # Nobody is replaced, so one generation of all steps is the same as many.
        "random": params.tune.model_copy(update={"replaced": 0.0, "generations": 1}),
    }
    kept: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if kept.get("params") != settings:
        kept = {"params": settings, "searches": {name: {} for name in searches}}
    for seed in range(1, given.seeds + 1):
        for name, population in searches.items():
            if str(seed) in kept["searches"][name]:
                continue
            where = folder / f"{name}-{seed}"
            found = search(data, where, params, population, seed, f"{name}, seed {seed}")
            kept["searches"][name][str(seed)] = found
            print(f"{name} {seed}: {found}")
            RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
            shutil.rmtree(where)
    seeds = [str(seed) for seed in range(1, given.seeds + 1)]
    losses = {n: [kept["searches"][n][seed]["test_loss"] for seed in seeds] for n in searches}
    more = [r - p for r, p in zip(losses["random"], losses["pbt"], strict=True)]
    kept["random_less_pbt"] = [round(value, 5) for value in more]
    mean, half = interval(more)
    kept["mean"] = round(mean, 5)
    if math.isfinite(half):
        kept["interval_95"] = [round(mean - half, 5), round(mean + half, 5)]
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    shutil.rmtree(data.parent)
    print(json.dumps(kept))
    return 0


if __name__ == "__main__":
    sys.exit(main())
