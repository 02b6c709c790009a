"""prove: train the prover of the second world, and export its scorer."""

from __future__ import annotations

from torch import Tensor

from hamlet.artifacts import atomic_path, write_card, write_json
from hamlet.export.onnx import export_onnx
from hamlet.learning.train_prover import TrainConfig, build_prover, train_prover
from hamlet.proofs import build_world, open_graph, save_prover
from hamlet.proofs.saved import example_inputs
from stages import paths
from stages.common import stage
from stages.log import StageLog


def main() -> None:
    with stage("prove") as s:
        params = s.params.proofs
        graph = open_graph(params.data, s.params.seed)
        world = build_world(graph, params.rounds)
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
        save_prover(paths.PROVER, prover, world, params.rounds)
        inputs = example_inputs(world)
        outputs = ("logits", "value", "score")
        with atomic_path(paths.PROVER_ONNX) as temporary:
            model = export_onnx(prover.eval(), inputs, outputs)
            temporary.write_bytes(model.SerializeToString(deterministic=True))
        write_card(
            paths.PROVER_ONNX,
            kind="prover scorer",
            schema={
                "inputs": [
                    {"name": n, "dtype": str(x.dtype)[6:], "shape": ["batch", *x.shape[1:]]}
                    for n, x in inputs.items()
                ],
                "outputs": [{"name": n, "dtype": "float32", "shape": ["batch"]} for n in outputs],
            },
        )
        log.write(paths.curve("prove"))
        numbers = {k: v for k, v in numbers.items() if k != "training_seconds"}
        write_json(paths.metrics("prove"), numbers)
        s.run.metrics(numbers)


if __name__ == "__main__":
    main()
