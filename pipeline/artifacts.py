"""Files that are either the good old version or the good new one, and cards that say what they are.

Every write goes to a temporary place beside its target, is flushed to the disk and renamed over the
target, so an interrupt, a crash or a full disk never leaves half a file in place of a good one.

A *card* is the JSON file beside a frozen artifact (`perception.pt2` has `perception.pt2.json`). It
holds the artifact's sha256, its schema and the sha256 of everything it was made from, and it is
checked before the artifact is opened: a corrupt or mismatched file is refused, never loaded.
"""

import errno
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

SIGNIFICANT_DIGITS = 6
_FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NAMED_ERROR = re.compile(r"[\w.]*(Error|Exception)[:(]")
# What PyTorch's own writer says when the disk is full; it reports no errno.
_FULL_DISK_TEXT = re.compile(
    r"No space left|File too large|PytorchStreamWriter failed writing|unexpected pos \d+ vs"
)


class HamletError(Exception):
    """An error of the user's, told in one line: what is wrong (naming the file or field): the fix.

    `HamletError("artifacts/a.pt2 is missing", "run `dvc repro perception`")` prints as
    "artifacts/a.pt2 is missing: run `dvc repro perception`".
    """

    def __init__(self, problem: str, fix: str = "") -> None:
        self.problem = " ".join(problem.split())
        self.fix = " ".join(fix.split())
        super().__init__(f"{self.problem}: {self.fix}" if self.fix else self.problem)


def in_one_line(error: BaseException) -> str:
    """The line of its message that says most: the innermost error that it names, else the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" :")]
    named = [line for line in lines if _NAMED_ERROR.match(line)]
    told = named[-1:] or [line for line in lines if not line.endswith(":")] or lines
    return (told or [type(error).__name__])[0][:200]


# ------------------------------------------------------------------------------------------------
# Atomic writes


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path to write `path` to; on success it replaces `path`, else nothing does.

    The temporary path has the name of the target, in a hidden folder beside it, so that writers
    which look at the name (or store it inside the file) behave as if they wrote the target itself.
    Missing parent folders are made.

    Raises:
        HamletError: the disk is full or the place cannot be written; the old file is untouched.
    """
    path = Path(path)
    with _scratch(path) as folder:
        temporary = folder / path.name
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)


@contextmanager
def atomic_dir(path: str | Path) -> Iterator[Path]:
    """Yield an empty temporary folder; on success it replaces the folder `path`, else nothing does.

    For data sets of many files. The old folder stays until the new one is complete.

    Raises:
        HamletError: the disk is full or the place cannot be written; the old folder is untouched.
    """
    path = Path(path)
    with _scratch(path) as folder:
        fresh, old = folder / path.name, folder / "old"
        fresh.mkdir()
        yield fresh
        for file in fresh.rglob("*"):
            if file.is_file():
                _sync(file)
        if path.exists():
            os.replace(path, old)
        try:
            os.replace(fresh, path)
        except BaseException:
            if old.exists():
                os.replace(old, path)
            raise
        _sync(path.parent)


def require_space(path: str | Path, nbytes: int) -> None:
    """Raise HamletError if the disk of `path` cannot take `nbytes` more bytes.

    Call before filling memory-mapped files: on a full disk those end in a bus error, not in an
    exception.
    """
    folder = Path(path).absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise HamletError(
            f"{path} needs {nbytes / 1e6:.0f} MB and the disk has {free / 1e6:.0f} MB left",
            "free some space, or make the data smaller in params.yaml",
        )


@contextmanager
def _scratch(path: Path) -> Iterator[Path]:
    folder = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path)
        folder.mkdir()
        yield folder
    except Exception as error:
        if _is_full_disk(error):
            raise HamletError(
                f"the disk is full: {path} could not be written and was left as it was",
                "free some space and run again",
            ) from error
        if isinstance(error, PermissionError):
            raise HamletError(
                f"{path} cannot be written: permission denied",
                "check the owner and the rights of its folder",
            ) from error
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_leftovers(path: Path) -> None:
    """Remove what processes that were killed while writing `path` left beside it."""
    for folder in path.parent.glob(f".{path.name}.*.tmp"):
        pid = folder.name.removesuffix(".tmp").rpartition(".")[2]
        if pid.isdigit() and not _alive(int(pid)):
            if (folder / "old").exists() and not path.exists():
                os.replace(folder / "old", path)  # killed between the two renames of a folder
            shutil.rmtree(folder, ignore_errors=True)


def _alive(pid: int) -> bool:
    if pid == os.getpid():
        return False  # an earlier process had this id: what it left is nobody's now
    if os.name == "nt":
        return True  # there, signal 0 would end the process
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _sync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_full_disk(error: BaseException) -> bool:
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _FULL_DISK:
            return True
        if isinstance(seen, RuntimeError | OSError) and _FULL_DISK_TEXT.search(str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


# ------------------------------------------------------------------------------------------------
# JSON and hashes


def write_json(path: str | Path, data: Any) -> None:
    """Write JSON whose bytes depend on nothing but `data`.

    Keys sorted, indent 2, a final newline, floats rounded to 6 significant digits; NaN and infinity
    become null (JSON has no word for them); numpy and torch values become plain numbers and lists.
    """
    text = json.dumps(_plain(data), indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    with atomic_path(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8", newline="\n")


def parse_yaml(text: str) -> Any:
    """What a YAML text holds, read by libyaml where it is there: ten times as fast.

    Raises:
        yaml.YAMLError: it is not YAML.
    """
    import yaml

    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def read_json(path: str | Path) -> Any:
    """Read a JSON file.

    Raises:
        HamletError: it is missing (naming the stage that makes it) or is not JSON.
    """
    path = Path(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise HamletError(f"{path} is missing", how_to_make(path)) from None
    except (ValueError, UnicodeDecodeError) as error:
        raise HamletError(f"{path} is not valid JSON ({error})", how_to_make(path)) from None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
    if hasattr(value, "tolist"):  # numpy and torch, arrays and scalars
        return _plain(value.tolist())
    if isinstance(value, os.PathLike):
        return Path(value).as_posix()
    raise TypeError(f"cannot write {type(value).__name__} as JSON")


def sha256_file(path: str | Path) -> str:
    """Hex sha256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_path(path: str | Path) -> str:
    """Hex sha256 of a file, or of a folder: of the sorted names and hashes of the files in it."""
    path = Path(path)
    if not path.is_dir():
        return sha256_file(path)
    digest = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if p.is_file() and p.suffix != ".pyc"):
        digest.update(f"{file.relative_to(path).as_posix()}\0{sha256_file(file)}\n".encode())
    return digest.hexdigest()


def sha256_json(data: Any) -> str:
    """Hex sha256 of a value's JSON, keys sorted; for params and schemas. Floats are not rounded."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()


# ------------------------------------------------------------------------------------------------
# Cards


def card_path(path: str | Path) -> Path:
    """`artifacts/agent.onnx` -> `artifacts/agent.onnx.json`."""
    path = Path(path)
    return path.with_name(path.name + ".json")


def write_card(
    path: str | Path,
    kind: str,
    schema: Mapping[str, list[dict[str, Any]]],
    upstream: Mapping[str, str] | None = None,
    pack: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write the card of the artifact at `path` (a file or a folder) and return it.

    Args:
        kind: what it is, for example "perception".
        schema: {"inputs": [...], "outputs": [...]}, each entry {"name", "dtype", "shape"}; a
            dynamic dimension is its name.
        upstream: sha256 of each artifact it was made from, by kind.
        pack: sha256 of the town pack it was made for.
        extra: more facts, by key; no times and no absolute paths, or bytes differ between runs.
    """
    path = Path(path)
    card = {
        **(extra or {}),
        "file": path.name,
        "kind": kind,
        "sha256": sha256_path(path),
        "schema": _plain(schema),
        "upstream": dict(upstream or {}),
        "pack": pack,
    }
    write_json(card_path(path), card)
    return card


def check_card(
    path: str | Path,
    expect_schema: Mapping[str, list[dict[str, Any]]] | None = None,
    expect_pack: str | None = None,
    expect_upstream: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Check the artifact at `path` against its card, before it is opened; returns the card.

    Args:
        expect_schema: inputs and outputs the caller is going to use, as in `write_card`; a side
            left out is not compared.
        expect_pack: sha256 of the town pack the caller plays.
        expect_upstream: sha256 by kind of artifacts it must have been made from.

    Raises:
        HamletError: the artifact or its card is missing, or the hash, schema, pack or upstream
            differ; one line that names both sides and the command that makes the file again.
    """
    path = Path(path)
    if not path.exists():
        raise HamletError(f"{path} is missing", how_to_make(path))
    card = read_json(card_path(path))
    if not isinstance(card, dict) or not {"sha256", "schema", "upstream"} <= card.keys():
        raise HamletError(f"{card_path(path)} is not a card", how_to_make(path))
    actual = sha256_path(path)
    if actual != card["sha256"]:
        raise HamletError(
            f"{path} does not match its card: the file's sha256 is {actual}, "
            f"{card_path(path).name} says {card['sha256']}",
            how_to_make(path),
        )
    if expect_pack is not None and card.get("pack") != expect_pack:
        raise HamletError(
            f"{path} was made for another town pack: its card says {card.get('pack')}, "
            f"the pack in use is {expect_pack}",
            how_to_make(path),
        )
    for kind, sha in (expect_upstream or {}).items():
        if card["upstream"].get(kind) != sha:
            raise HamletError(
                f"{path} was made from another {kind}: its card says {card['upstream'].get(kind)}, "
                f"the {kind} in use is {sha}",
                how_to_make(path),
            )
    for side, entries in (expect_schema or {}).items():
        difference = _schema_difference(side, card["schema"].get(side, []), _plain(entries))
        if difference:
            raise HamletError(f"{path} has another schema: {difference}", how_to_make(path))
    return card


Entry = dict[str, Any]  # of a schema: a tensor's name, dtype and shape


def _schema_difference(side: str, have: list[Entry], want: list[Entry]) -> str:
    def show(entry: Entry) -> str:
        return f"{entry.get('dtype')} [{', '.join(map(str, entry.get('shape', [])))}]"

    have_by_name = {entry["name"]: entry for entry in have}
    want_by_name = {entry["name"]: entry for entry in want}
    for name, entry in want_by_name.items():
        if name not in have_by_name:
            return f"{side} `{name}` is not on its card, which has {', '.join(have_by_name)}"
        if show(entry) != show(have_by_name[name]):
            return f"{side} `{name}` is {show(have_by_name[name])}, expected {show(entry)}"
    for name in have_by_name:
        if name not in want_by_name:
            return f"{side} `{name}` is not expected here"
    if list(have_by_name) != list(want_by_name):
        return f"{side} come in the order {list(have_by_name)}, expected {list(want_by_name)}"
    return ""


def how_to_make(path: str | Path) -> str:
    """The command that makes the file `path`: of the stage in dvc.yaml whose output it is."""
    stage = _stage_of(Path(path))
    return f"run `dvc repro {stage}`" if stage else "run `dvc repro`"


def _stage_of(path: Path) -> str | None:
    path = path.absolute()
    for root in path.parents:
        if not (root / "dvc.yaml").is_file():
            continue
        with suppress(Exception):  # only a hint: the error it belongs to must reach the user
            stages = parse_yaml((root / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
            for name, stage in stages.items():
                for key in ("outs", "metrics", "plots"):
                    for out in stage.get(key) or []:
                        out = root / (next(iter(out)) if isinstance(out, dict) else out)
                        if out == path or out in path.parents:
                            return str(name)
        return None
    return None
