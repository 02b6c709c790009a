"""tune: a population of trainings of module C finds its learning rate while it trains.

    python -m stages.tune [--engine ray]

Not part of `dvc repro`: it changes nothing that a stage makes. Needs the data set and the frozen
perception. Interrupted or killed, the same command goes on from the members' checkpoints.
"""

from __future__ import annotations

import argparse
import shutil

import torch
from rich.console import Console
from torch import Tensor

from hamlet.artifacts import atomic_path, write_json
from hamlet.export.frozen import load_frozen
from hamlet.learning.engines import processes, ray_tune
from hamlet.learning.pbt import Turn, checkpoint_of, evolve, lineage, winner
from hamlet.learning.train_social import with_labels
from hamlet.learning.tune_social import SocialMember, held_out_loss, opened, share
from hamlet.moving import moved
from stages import paths
from stages.common import cores, progress, stage
from stages.data import Recorded, load_beliefs, load_dataset


def worlds_of(recorded: Recorded) -> dict[str, Tensor]:
    """Every second held-out world has a say in who is replaced; the others have none."""
    held_out = recorded.held_out
    return {"learn": recorded.training, "choose": held_out[::2], "test": held_out[1::2]}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("processes", "ray"), default="processes")
    given = parser.parse_args(arguments)
    with stage("tune") as s:
        population, params, seed = s.params.tune, s.params.social, s.params.seed
        recorded = load_dataset(s.params, s.device)
        perceive, upstream = load_frozen(paths.PERCEPTION, recorded.shape.pack_hash, s.device)
        folder = s.checkpoint_dir(
            "pipeline/modules/social.py",
            "pipeline/learning",
            extra=[upstream, params.model_dump(mode="json")],
        ).absolute()
        data = folder / "data"
        if not data.exists():
            labelled = with_labels(recorded.data, load_beliefs(recorded, perceive, upstream))
            share(data, moved(labelled, "cpu"), worlds_of(recorded), recorded.shape)
            del labelled  # members read it from the disk
        device = str(s.device)
        train = SocialMember(data, folder, params, seed, population.generations, device)
        workers = min(cores(), population.members)
        engine = (
            processes(workers) if given.engine == "processes" else ray_tune(workers, folder / "ray")
        )
        done: list[list[Turn]] = []
        with engine as run:
            generations = evolve(population, seed, folder, train, run)
            bar = progress(generations, "tune", total=population.generations)
            for turns in bar:
                done.append(turns)
                best = winner(done)
                bar.note(loss=-best.score, **best.settings)
                s.run.metrics({"loss": -best.score, **best.settings}, best.generation)
        best = winner(done)
        torch.set_num_threads(1)  # as the members had, or the last digits differ
        shared, worlds, _ = opened(data, device)
        numbers = {
            "loss": -best.score,
            "test_loss": held_out_loss(train.train(best), shared, worlds["test"], params.chunk),
        }
        course = [turn.settings for turn in lineage(done, best)]
        write_json(paths.TUNED / "best.json", {"member": best.member, "course": course, **numbers})
        for source, name in (
            (folder / "log.jsonl", "log.jsonl"),
            (checkpoint_of(folder, best.generation, best.member), "best.pt"),
        ):
            with atomic_path(paths.TUNED / name) as temporary:
                shutil.copyfile(source, temporary)
        s.run.metrics(numbers)
        s.run.artifact(paths.TUNED / "log.jsonl")
    Console().print(
        f"held-out loss {numbers['test_loss']:.4f} of member {best.member}: see {paths.TUNED}"
    )


if __name__ == "__main__":
    main()
