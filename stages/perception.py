"""perception: train module A on the recorded worlds."""

from __future__ import annotations

import torch

from hamlet.artifacts import atomic_path, write_card, write_json
from hamlet.learning.train_perception import evaluate_perception, train_perception
from hamlet.moving import moved
from stages import paths
from stages.common import stage
from stages.data import load_dataset
from stages.log import StageLog


def main() -> None:
    with stage("perception") as s:
        params = s.params.perception
        recorded = load_dataset(s.params, s.device)
        folder = s.checkpoint_dir("pipeline/modules", "pipeline/learning", extra=recorded.card)
        log = StageLog(s, folder, every=10)
        module, heads = train_perception(
            recorded.data,
            recorded.training,
            recorded.shape,
            params,
            s.params.seed,
            folder / "checkpoint.pt",
            log,
        )
        if not s.first:
            return
        numbers = evaluate_perception(module, heads, recorded.data, recorded.held_out, params.chunk)
        with atomic_path(paths.PERCEPTION_WEIGHTS) as temporary:
            torch.save(moved(module.state_dict(), "cpu"), temporary)
        write_card(
            paths.PERCEPTION_WEIGHTS,
            kind="perception weights",
            schema={},
            upstream={"dataset": recorded.card["sha256"]},
            pack=recorded.shape.pack_hash,
            extra={
                "town": recorded.shape.to_dict(),
                "hidden": params.hidden,
                "latent": params.latent,
                **s.made_on(params.precision),
            },
        )
        log.write(paths.curve("perception"))
        write_json(paths.metrics("perception"), numbers)
        s.run.metrics(numbers)


if __name__ == "__main__":
    main()
