"""Which device a stage runs on: `HAMLET_DEVICE` is auto, cpu, cuda or cuda:N.

`auto`, the default, takes CUDA where it works, else the CPU. It is never a part of params.yaml: DVC
must run nothing again because the machine is another one.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from hamlet.artifacts import HamletError, in_one_line

VARIABLE = "HAMLET_DEVICE"
_ASKED = re.compile(r"auto|cpu|cuda(:\d+)?")
_OLD_DRIVER = re.compile(r"driver .*too old|driver version is insufficient", re.IGNORECASE)
# Of each stage, the numbers in params.yaml that its memory grows with.
LARGE = {
    "collect": "collect.worlds",
    "perception": "perception.sequences",
    "world_model": "world_model.batch",
    "social": "social.sequences",
    "policy": "policy.worlds",
    "population": "population.worlds or policy.worlds",
    "tune": "social.sequences",
    "prove": "proofs.slots",
    "prove_evaluate": "proofs.slots",
}
"""The stages that run on the device; all others run on the CPU."""


class Found(NamedTuple):
    """What CUDA is on this machine.

    Attributes:
        number: GPUs that work.
        why: where there is none, the reason in a few words.
    """

    number: int
    why: str = ""


class Chosen(NamedTuple):
    """A device, and why it was taken, in a few words."""

    device: torch.device
    why: str


def found() -> Found:
    """Ask CUDA, once, without starting it."""
    if not torch.backends.cuda.is_built():
        return Found(0, "this torch is built without CUDA")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        works = torch.cuda.is_available()
    if works:
        return Found(torch.cuda.device_count())
    told = " ".join(str(each.message) for each in said)
    if _OLD_DRIVER.search(told):
        return Found(0, "the NVIDIA driver is too old for this torch")
    return Found(0, "no usable GPU is found")


def resolve(asked: str, gpus: Found, local_rank: int = 0, ranks: int = 1) -> Chosen:
    """The device of this process.

    Args:
        asked: the value of HAMLET_DEVICE.
        gpus: of `found`.
        local_rank: of this process among the `ranks` that share the machine: one GPU each.

    Raises:
        HamletError: a value that is none of those allowed; no usable GPU, or not that one; more
            ranks than GPUs.
    """
    if not _ASKED.fullmatch(asked):
        raise HamletError(f"{VARIABLE} is {asked!r}", "give auto, cpu, cuda or cuda:N")
    if asked == "cpu":
        return Chosen(torch.device("cpu"), f"{VARIABLE} is cpu")
    if not gpus.number:
        if asked == "auto":
            return Chosen(torch.device("cpu"), gpus.why)
        old = "driver" in gpus.why
        fix = "install a newer driver, or a torch of the driver's CUDA" if old else "give cpu"
        raise HamletError(f"{VARIABLE} is {asked} and {gpus.why}", fix)
    if ranks > 1:
        if ":" in asked:
            raise HamletError(
                f"{VARIABLE} is {asked} for {ranks} ranks, which take a GPU each", "give cuda"
            )
        check_ranks(ranks, gpus.number)
        return Chosen(torch.device("cuda", local_rank), "one GPU for each rank")
    number = int(asked.partition(":")[2] or 0)
    if number >= gpus.number:
        there = f"there is cuda:0{f' to cuda:{gpus.number - 1}' if gpus.number > 1 else ' only'}"
        raise HamletError(f"{VARIABLE} is {asked} and {there}", "give one of these")
    why = "CUDA works" if asked == "auto" else f"{VARIABLE} is {asked}"
    return Chosen(torch.device("cuda", number), why)


def check_ranks(ranks: int, gpus: int) -> None:
    """Raise a HamletError where ranks of one machine would have to share a GPU: NCCL cannot."""
    if ranks > gpus:
        raise HamletError(
            f"{ranks} ranks are more than the {gpus} GPU{'s' * (gpus > 1)} here, one for each",
            f"start {gpus} at most, or set {VARIABLE}=cpu",
        )


def chosen() -> Chosen:
    """The device that this process shall take, of its environment; see `resolve`."""
    asked = os.environ.get(VARIABLE, "auto").strip().lower()
    gpus = Found(0) if asked == "cpu" else found()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    return resolve(asked, gpus, int(os.environ.get("LOCAL_RANK", "0")), ranks)


def take(device: torch.device) -> None:
    """Start a GPU and make it the process's current one.

    Raises:
        HamletError: it does not start.
    """
    if device.type == "cpu":
        return
    try:
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    except RuntimeError as error:
        reason = in_one_line(error)
        if _OLD_DRIVER.search(str(error)):
            fix = "install a newer driver, or a torch of the driver's CUDA"
        else:
            fix = f"see `nvidia-smi`, or set {VARIABLE}=cpu"
        raise HamletError(f"{device} does not start ({reason})", fix) from None


def facts(device: torch.device) -> dict[str, str]:
    """What the run and the cards say of a device that is not the CPU: its type and its name."""
    if device.type == "cpu":
        return {}
    return {"device": device.type, "device_name": torch.cuda.get_device_name(device)}


@contextmanager
def memory_errors(stage: str) -> Iterator[None]:
    """Turn a GPU's full memory into one line that names what to make smaller.

    Raises:
        HamletError: instead of `torch.OutOfMemoryError`.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        smaller = LARGE.get(stage, "the batch")
        raise HamletError(
            "the GPU's memory is full", f"make {smaller} smaller in params.yaml"
        ) from None
