"""Whether there is a GPU to be had, asked of the system alone: PyTorch takes seconds to import."""

from __future__ import annotations

import ctypes
import os


def has_gpu() -> bool:
    """Whether an NVIDIA driver can be loaded: without one, CUDA is only a name on a list."""
    try:
        ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return False
    return True
