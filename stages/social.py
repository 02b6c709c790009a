"""social: train module C with true goals as labels, on the frozen perception, and freeze it."""

from __future__ import annotations

import torch

from hamlet.artifacts import write_json
from hamlet.export.frozen import freeze, load_frozen
from hamlet.export.sense import write_sense
from hamlet.learning.train_social import evaluate_social, train_social, with_labels
from hamlet.modules.contracts import SocialPrediction
from stages import paths
from stages.common import stage
from stages.data import load_beliefs, load_dataset
from stages.log import StageLog


def main() -> None:
    with stage("social") as s:
        params, seed = s.params.social, s.params.seed
        recorded = load_dataset(s.params, s.device)
        pack = recorded.shape.pack_hash
        perceive, upstream = load_frozen(paths.PERCEPTION, pack, s.device)
        data = with_labels(recorded.data, load_beliefs(recorded, perceive, upstream))
        folder = s.checkpoint_dir("pipeline/modules/social.py", "pipeline/learning", extra=upstream)
        log = StageLog(s, folder, every=10)
        model = train_social(
            data, recorded.training, recorded.shape, params, seed, folder / "checkpoint.pt", log
        )
        if not s.first:
            return
        shape, d = recorded.shape, upstream["belief_dim"]
        m = shape.num_others
        numbers: dict[str, float] = {}
        if m:
            numbers = evaluate_social(model, data, recorded.held_out, params.chunk)
        else:
            print(f"social: in {shape.pack} an agent is alone: there is nobody to read")
        freeze(
            model,
            {
                "mean": torch.zeros(4, d),
                "log_std": torch.zeros(4, d),
                "known_state": torch.rand(4, shape.self_dim),
                "cues": torch.zeros(4, m, shape.num_cues),
                "visible": torch.ones(4, m, dtype=torch.bool),
                "others_offset": torch.zeros(4, m, 2),
                "others_action": torch.zeros(4, m, dtype=torch.int64),
                "recurrent_state": torch.zeros(4, m, model.recurrent_dim),
            },
            (*SocialPrediction._fields, "recurrent_state"),
            paths.SOCIAL,
            kind="social",
            pack=pack,
            upstream={"perception": upstream["sha256"], "dataset": recorded.card["sha256"]},
            extra={"recurrent_dim": model.recurrent_dim, **s.made_on()},
        )
        read_others, card = load_frozen(paths.SOCIAL, pack)
        write_sense(
            load_frozen(paths.PERCEPTION, pack)[0],
            read_others,
            shape,
            (upstream["recurrent_dim"], card["recurrent_dim"]),
            paths.SENSE,
            {"perception": upstream["sha256"], "social": card["sha256"]},
        )
        log.write(paths.curve("social"))
        write_json(paths.metrics("social"), numbers)
        s.run.metrics(numbers)


if __name__ == "__main__":
    main()
