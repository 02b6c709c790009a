"""What MLflow is told of an ONNX file's inputs and outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow.models import ModelSignature
    from onnx import ModelProto


def mlflow_signature(model: ModelProto) -> ModelSignature:
    """Names, dtypes and shapes of a graph's inputs and outputs, with -1 for a free dimension."""
    import numpy as np
    import onnx
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    def specs(values: Any) -> Schema:
        return Schema(
            [
                TensorSpec(
                    np.dtype(onnx.helper.tensor_dtype_to_np_dtype(v.type.tensor_type.elem_type)),
                    [d.dim_value or -1 for d in v.type.tensor_type.shape.dim],
                    v.name,
                )
                for v in values
            ]
        )

    return ModelSignature(inputs=specs(model.graph.input), outputs=specs(model.graph.output))
