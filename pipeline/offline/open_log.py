"""Any log as a store: a Parquet or Arrow file or folder, a Minari data set, or a store itself."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from hamlet.artifacts import HamletError, atomic_dir
from hamlet.offline.checks import Report, refuse
from hamlet.offline.log_store import FORMAT, LogStore, open_store
from hamlet.offline.minari_data import minari_folder, read_minari
from hamlet.offline.schema import load_schema
from hamlet.offline.tables import read_tables, table_files


def open_log(path: Path, schema: Path | None, cache: Path, report: Report = refuse) -> LogStore:
    """The store of a log; read again only if the log or its schema changed.

    Args:
        path: a Parquet or Arrow file, a folder of them, or a Minari data set.
        schema: its schema file; for tables `<path>.yaml` if None; Minari needs none.
        cache: folder in which the store is kept.
        report: told each problem of a row; the default raises the first.

    Raises:
        HamletError: the log cannot be read; one line that names file, row and fix.
    """
    minari = minari_folder(path)
    if minari is None:
        files = table_files(path)
        beside = path / "schema.yaml" if path.is_dir() else path.with_suffix(".yaml")
        schema = schema or beside
        wanted = load_schema(schema)
        said = schema.read_text()
    else:
        if schema is not None:
            raise HamletError(f"{path} is a Minari data set", "leave --schema out")
        files = sorted(p for p in minari.rglob("*") if p.is_file())
        said = ""
    key = _key(files, said)
    folder = cache / f"log-{key}"
    if not (folder / "meta.json").exists():
        with atomic_dir(folder) as fresh:
            if minari is None:
                read_tables(path, wanted, fresh, report)
            else:
                read_minari(minari, fresh, report)
    return open_store(folder)


def _key(files: list[Path], schema: str) -> str:
    """Of the contents: names and times may change."""
    digest = hashlib.sha256(json.dumps([FORMAT, schema, [p.name for p in files]]).encode())
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]
