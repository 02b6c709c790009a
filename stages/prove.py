"""prove: train the prover of the second world, and export its scorer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hamlet.artifacts import atomic_path, write_card, write_json
from hamlet.export.onnx import export_onnx
from hamlet.learning.train_prover import TrainConfig, build_prover, train_prover
from hamlet.proofs import build_world, open_graph, save_prover
from hamlet.proofs.policy import Prover
from hamlet.proofs.saved import example_inputs
from stages import paths
from stages.common import stage
from stages.log import StageLog


def main() -> None:
    with stage("prove") as s:
        params = s.params.proofs
        graph = open_graph(params.data, s.params.seed)
        world = build_world(graph, params.rounds, device=s.device)
        extra = [params.model_dump(mode="json"), graph.name]
        folder = s.checkpoint_dir("pipeline/proofs", "pipeline/learning", extra=extra)
        log = StageLog(s, folder, every=1)
        config = TrainConfig(
            slots=params.slots,
            imitation_steps=params.imitation_steps,
            ppo_steps=params.ppo_steps,
            learning_rate=params.learning_rate,
            entropy=params.entropy,
        )
        prover = build_prover(world, hidden=params.hidden)
        offset = {"imitation": 0, "ppo": config.imitation_steps}

        def report(phase: str, step: int, total: int, numbers: dict[str, Tensor]) -> None:
            log.record(offset[phase] + step, numbers)

        numbers = train_prover(
            world, prover, config, s.params.seed, report, folder / "checkpoint.pt"
        )
        if not s.first:
            return
        save_prover(paths.PROVER, prover, world, params.rounds, s.made_on())
        export(prover.cpu().eval(), example_inputs(world))
        log.write(paths.curve("prove"))
        numbers = {k: v for k, v in numbers.items() if k != "training_seconds"}
        write_json(paths.metrics("prove"), numbers)
        s.run.metrics(numbers)


def export(prover: Prover, inputs: dict[str, Tensor]) -> None:
    """Write the scorer and its card: what it answers with is the score."""
    with torch.no_grad():
        outputs = prover(*inputs.values())._asdict()
    with atomic_path(paths.PROVER_ONNX) as temporary:
        model = export_onnx(prover, inputs, tuple(outputs))
        temporary.write_bytes(model.SerializeToString(deterministic=True))
    write_card(
        paths.PROVER_ONNX,
        kind="prover scorer",
        schema={"inputs": described(inputs), "outputs": described(outputs)},
        extra={"policy": {"states": {}, "action": "score"}},
    )


def described(tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Name, dtype and shape of each, as a card says them."""
    return [
        {"name": name, "dtype": str(x.dtype)[6:], "shape": ["batch", *x.shape[1:]]}
        for name, x in tensors.items()
    ]


if __name__ == "__main__":
    main()
