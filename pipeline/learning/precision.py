"""The precision of forward passes: what the hardware does best, and the context to do it in."""

from __future__ import annotations

from typing import Literal

import torch

Precision = Literal["fp32", "bf16", "fp16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: Precision, device: str | torch.device | None) -> torch.autocast:
    """The context in which forward passes run, in rollouts as in updates."""
    kind = torch.device(device or "cpu").type
    return torch.autocast(kind, DTYPES[precision], enabled=precision != "fp32")


def best_precision(device: str) -> Precision:
    """bf16 where the hardware multiplies matrices of it, fp16 on older GPUs, else fp32.

    A processor that has bf16 products only in its vectors (AVX512) gains nothing at these sizes:
    the policy's iterations took 1.2 times as long as in fp32.
    """
    if device.startswith("cuda"):
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return "bf16" if getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)() else "fp32"


def set_precision() -> dict[str, str]:
    """Set the precision of float32 matrix products once per process.

    Returns:
        what was set, to be recorded with the run.
    """
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    return {"float32_matmul_precision": torch.get_float32_matmul_precision(), "tf32": "True"}
