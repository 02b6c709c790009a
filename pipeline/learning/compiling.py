"""`torch.compile` as this project uses it, on the CPU as on a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from hamlet.artifacts import in_one_line
from hamlet.device import chosen


def inductor_options() -> dict[str, Any]:
    """What every compiled function is compiled with.

    A compiler that is called g++ is told by inductor not to vectorise loops, which also hits those
    inside its own vector types (loads of bools, gathers): the same compiler by its other name, c++,
    makes code that is up to six times as fast.
    """
    spare_work()
    if "CXX" in os.environ or not shutil.which("c++"):
        return {}
    find_headers()
    return {"cpp.cxx": (None, "c++")}


@cache
def spare_work() -> None:
    """Let inductor fill its one table of the types that operations give once.

    It fills it anew for every operation that it writes down, which is a seventh of a compilation.
    """
    import torch._inductor.lowering  # noqa: F401 - late, as to import it takes a while; its rules
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler

    if DtypePropagationOpsHandler() is DtypePropagationOpsHandler():  # else each has its own
        setattr(DtypePropagationOpsHandler, "__init__", lambda table: None)  # noqa: B010


@cache
def find_headers() -> None:
    """Let inductor's precompiled headers be named as the GNU compiler looks for them.

    By the name c++ inductor takes it for another one, whose headers end in .pch: these are never
    found, and every kernel reads PyTorch's headers anew, which is half of its compilation.
    """
    from torch._inductor.cpp_builder import CppBuilder  # late: it takes a while to import

    told = subprocess.run(["c++", "--version"], capture_output=True, text=True).stdout
    if "Free Software Foundation" in told:
        name = "_CppBuilder__get_precompiled_header_flags"
        setattr(CppBuilder, name, staticmethod(lambda: (".gch", "-o")))


def with_room(function: Callable) -> Callable:
    """The function, with room for the frames of all that it calls.

    CPython keeps frames in chunks of 16 kB. Where a loop calls across the end of one, every call
    asks the system for memory and gives it back: a million times in one compilation, which is an
    eighth of its time. A frame that is large begins a chunk of 1 MB. To call it takes 11 us.
    """

    def call(*inputs: Any) -> Any:
        return function(*inputs)

    call.__code__ = call.__code__.replace(co_stacksize=65_000)  # words
    return call


def compiled(function: Callable, fixed: bool = False) -> Callable:
    """Compile a function of a world's state.

    That the tables' indices are within bounds is known; loops over all agents may be long. New
    weights in a module are seen. What is compiled for one world is kept apart from what is compiled
    for another.

    Args:
        fixed: the world, its mode and whatever else the function reads beside its arguments never
            change, and a tensor argument always is one: only tensors are looked at before a call.
    """
    gpu = chosen().device.type != "cpu"
    options = inductor_options() | {
        "assert_indirect_indexing": False,
        "size_asserts": False,
        "max_fusion_size": 256,
        "cpp.max_horizontal_fusion_size": 64,
        "cpp_wrapper": not gpu,  # on a GPU it would keep graphs from capture
        "combo_kernels": True,  # on a GPU: one kernel for several that do not wait for each other
    }
    if fixed:
        options["guard_filter_fn"] = torch.compiler.keep_tensor_guards_unsafe

    def apart(*inputs: Any) -> Any:
        return function(*inputs)

    # Dynamo keeps its graphs with the code object: this function gets one of its own.
    apart.__code__ = apart.__code__.replace()
    # CUDA's GRU is known for fixed sizes only, and a CUDA graph has only one.
    dynamic = False if gpu else None
    made = torch.compile(apart, fullgraph=True, dynamic=dynamic, options=options)
    first = True

    def call(*inputs: Any) -> Any:
        nonlocal first
        if first:
            first = False
            return with_room(made)(*inputs)
        return made(*inputs)

    return call


def compiled_or_plain(function: Callable) -> Callable:
    """As `compiled`, or the function itself, with one warning, where compiling it fails."""
    taken: Callable | None = None

    def call(*inputs: Any) -> Any:
        nonlocal taken
        if taken is None:
            taken = compiled(function)
            try:
                return taken(*inputs)
            except Exception as error:
                reason = in_one_line(error)
                warnings.warn(f"compiling failed, eager from now on: {reason}", stacklevel=2)
                taken = function
        return taken(*inputs)

    return call
