"""Opening ONNX files: one healthy ONNX Runtime, a checked file, and the providers that really run.

Needs onnxruntime and the standard library only, so that a deployment without PyTorch can use it.
"""

import contextlib
import io
import platform
import re
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from hamlet.artifacts import HamletError, check_card, how_to_make, in_one_line

# Distributions that all install the same `onnxruntime` package, over one another.
_VARIANTS = ("", "-gpu", "-nightly", "-nightly-gpu", "-directml", "-openvino", "-qnn", "-rocm")
_BUILDS = [name + variant for name in ("onnxruntime", "ort") for variant in _VARIANTS]
# What ONNX Runtime says of a graph that only a newer one understands.
_TOO_OLD = re.compile(r"NOT_IMPLEMENTED|Failed to find kernel|IR version|opset|is not a registered")


def installed_runtimes() -> dict[str, str]:
    """Installed distributions of ONNX Runtime: name -> version.

    Asked for by name: to read what all others say of themselves takes a tenth of a second.
    """
    found = {name: list(distributions(name=name)) for name in _BUILDS}
    return {name: some[-1].version for name, some in sorted(found.items()) if some}


def check_runtime() -> tuple[str, str]:
    """The one installed ONNX Runtime: (distribution, version).

    Raises:
        HamletError: none, several (they overwrite each other's files, and pip does not notice) or
            a broken one is installed; with the command that mends it.
    """
    found = installed_runtimes()
    wanted = "onnxruntime-gpu" if _gpu_build_exists() else "onnxruntime"
    pip = f"{Path(sys.executable).name} -m pip"
    if not found:
        raise HamletError(
            "no ONNX Runtime is installed", f"run `{pip} install onnxruntime` (or hamlet[cpu])"
        )
    keep = wanted if wanted in found else next(iter(found))
    mend = (
        f"run `{pip} uninstall -y {' '.join(found)} && "
        f"{pip} install --no-deps {keep}=={found[keep]}`"
    )
    if len(found) > 1:
        both = " and ".join(f"{name} {version}" for name, version in found.items())
        raise HamletError(f"{both} are installed together and corrupt each other", mend)
    try:
        import onnxruntime
    except ImportError as error:
        raise HamletError(f"{keep} {found[keep]} cannot be imported ({error})", mend) from None
    if not hasattr(onnxruntime, "InferenceSession"):
        raise HamletError(f"{keep} {found[keep]} has lost its files", mend)
    return keep, found[keep]


def _gpu_build_exists() -> bool:
    return sys.platform in ("linux", "win32") and platform.machine() in ("x86_64", "AMD64")


def open_session(
    path: str | Path, providers: list[str] | None = None, threads: int = 1
) -> Any:  # onnxruntime.InferenceSession
    """Check an ONNX file against its card and open it.

    Args:
        path: the `.onnx` file; its card is `<path>.json`.
        providers: execution providers to ask for; default: the CPU, on every machine, so that a
            driver changes no number.
        threads: threads inside one operator. 1 is fastest at batch 1.

    Returns:
        An `onnxruntime.InferenceSession`; what it runs on is `session.get_providers()`.

    Raises:
        HamletError: see `check_runtime` and `check_card`; or a provider that was asked for by name
            does not run here.
    """
    check_runtime()
    path = Path(path)
    card = check_card(path)
    if "OpenVINOExecutionProvider" in (providers or []) and card.get("runtimes"):
        raise HamletError(
            f"{path} cannot run in OpenVINO: {card['runtimes']}", "ask for CPUExecutionProvider"
        )
    return open_unchecked(path.as_posix(), providers, threads, name=str(path))


def open_unchecked(
    model: str | bytes, providers: list[str] | None = None, threads: int = 1, name: str = "model"
) -> Any:
    """As `open_session`, without the card: for bytes just made, or a file checked otherwise."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    available = onnxruntime.get_available_providers()
    missing = set(providers or []) - set(available)
    if missing:
        raise HamletError(
            f"{name}: this ONNX Runtime has no {', '.join(sorted(missing))}",
            f"ask for one of {', '.join(available)}",
        )
    cuda = "CUDAExecutionProvider"
    wanted = list(providers or ())
    if "CPUExecutionProvider" not in wanted:
        wanted.append("CPUExecutionProvider")
    # A provider that cannot start says so at length on both streams and falls back to the CPU; what
    # counts is what the session then runs on, and that is checked below.
    onnxruntime.set_default_logger_severity(4)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            if cuda in wanted:
                getattr(onnxruntime, "preload_dlls", lambda: None)()  # since 1.21
            session = onnxruntime.InferenceSession(model, options, providers=wanted)
    except Exception as error:  # ONNX Runtime's own exceptions share no base
        reason = in_one_line(error)
        fix = how_to_make(name) if isinstance(model, str) else ""
        if _TOO_OLD.search(reason):
            fix = f"this onnxruntime {onnxruntime.__version__} is too old for it: install a newer"
        raise HamletError(f"{name} cannot be opened by ONNX Runtime ({reason})", fix) from None
    finally:
        onnxruntime.set_default_logger_severity(2)
    lost = set(providers or []) - set(session.get_providers())
    if lost:
        raise HamletError(
            f"{name}: {', '.join(sorted(lost))} was asked for and does not run here",
            "run `hamlet doctor` to see which providers do",
        )
    return session
