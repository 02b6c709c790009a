"""world_model: train module B on the outputs of the frozen perception, and freeze it too."""

from __future__ import annotations

import torch

from hamlet.artifacts import write_json
from hamlet.export.frozen import freeze, load_frozen
from hamlet.learning.train_world_model import (
    calibrate,
    evaluate_world_model,
    experience,
    train_world_model,
)
from hamlet.modules.agent import IMAGINED_DISCOUNT
from stages import paths
from stages.common import stage
from stages.data import load_beliefs, load_dataset
from stages.log import StageLog

OUTPUTS = (
    "mean", "log_std", "known_state", "reward", "continue_probability", "value", "legal_logits",
    "disagreement", "confidence", "novel",
)  # fmt: skip


def main() -> None:
    with stage("world_model") as s:
        params, seed = s.params.world_model, s.params.seed
        recorded = load_dataset(s.params, s.device)
        perceive, upstream = load_frozen(paths.PERCEPTION, recorded.shape.pack_hash, s.device)
        beliefs = load_beliefs(recorded, perceive, upstream)
        lived = experience(recorded.data, beliefs, IMAGINED_DISCOUNT)
        folder = s.checkpoint_dir(
            "pipeline/modules/world_model.py", "pipeline/learning", extra=upstream
        )
        log = StageLog(s, folder, every=25)
        model = train_world_model(
            lived,
            recorded.training,
            recorded.shape,
            upstream["latent"],
            params,
            seed,
            folder / "checkpoint.pt",
            log,
        )
        if not s.first:
            return
        calibrate(model, lived, recorded.held_out, seed)
        meters, worlds = recorded.shape.num_meters, (recorded.held_out, recorded.mortal)
        numbers = evaluate_world_model(model, lived, *worlds, meters, IMAGINED_DISCOUNT, seed)
        d, k, a = upstream["belief_dim"], recorded.shape.self_dim, recorded.shape.num_actions
        freeze(
            model,
            {
                "mean": torch.zeros(4, d),
                "log_std": torch.zeros(4, d),
                "known_state": torch.rand(4, k),
                "action": torch.arange(4) % a,
            },
            OUTPUTS,
            paths.WORLD_MODEL,
            kind="world_model",
            pack=recorded.shape.pack_hash,
            upstream={"perception": upstream["sha256"], "dataset": recorded.card["sha256"]},
            extra={
                "members": params.members,
                "hidden": params.hidden,
                **s.made_on(params.precision),
            },
        )
        log.write(paths.curve("world_model"))
        write_json(paths.metrics("world_model"), numbers)
        s.run.metrics(numbers)


if __name__ == "__main__":
    main()
