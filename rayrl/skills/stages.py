"""Durable stages: what a crash must not break.

A stage directory holds ``state.json`` with one entry per finished stage: the hash of its inputs and the hashes of the
files it wrote. Invariants:

* a stage's files appear atomically, and are entered in the state only after all of them are there;
* a stage whose inputs (or files) changed since is run again, and so is everything after it: the entries of what comes
  later are taken out before it starts, so that a kill in between cannot leave results of the old one in force;
* a stage that did not finish leaves no entry, so the next stage cannot start from half of it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import orjson

from rayrl.errors import DataError
from rayrl.schemas import JsonDict, canonical_json, sha256_hex
from rayrl.traces.manifest import write_json_atomic

STATE = "state.json"
STATE_SCHEMA = "rayrl-stages-v1"


def file_sha256(path: Path) -> str:
    """Hash of a file's bytes, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_lines_atomic(path: Path, items: Iterable[Any]) -> int:
    """JSON lines; a reader sees all of them or the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    count = 0
    with temporary.open("wb") as file:
        for item in items:
            file.write(orjson.dumps(item) + b"\n")
            count += 1
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return count


def read_lines(path: Path) -> list[Any]:
    """The items of a JSON-lines file."""
    return [orjson.loads(line) for line in path.read_bytes().splitlines() if line]


class Stages:
    """The stages of one directory. Call :meth:`run` in order; finished ones return what they returned before."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._state = self._load()
        self._passed: list[str] = []
        self.ran: list[str] = []

    def _load(self) -> JsonDict:
        path = self.folder / STATE
        if not path.exists():
            return {"schema": STATE_SCHEMA, "stages": {}}
        try:
            state = orjson.loads(path.read_bytes())
        except orjson.JSONDecodeError as error:
            raise DataError(f"{path}: not JSON: {error}") from None
        if not isinstance(state, dict) or state.get("schema") != STATE_SCHEMA:
            raise DataError(f"{path}: is no {STATE_SCHEMA}")
        return state

    def finished(self, name: str, inputs: JsonDict) -> JsonDict | None:
        """The facts of a stage that is done with exactly these inputs and whose files are untouched."""
        entry = self._state["stages"].get(name)
        if entry is None or entry["inputs_sha256"] != sha256_hex(canonical_json(inputs)):
            return None
        for file, digest in entry["files"].items():
            path = self.folder / file
            if not path.exists() or file_sha256(path) != digest:
                return None
        facts: JsonDict = entry["facts"]
        return facts

    def run(self, name: str, inputs: JsonDict, files: list[str], work: Callable[[], JsonDict]) -> JsonDict:
        """Run ``work`` unless it is done already; it must have written ``files`` when it returns its facts.

        Raises:
            DataError: the work ended without one of its files.
        """
        done = self.finished(name, inputs)
        if done is not None:
            self._passed.append(name)
            return done
        kept = {k: v for k, v in self._state["stages"].items() if k in self._passed}
        if len(kept) < len(self._state["stages"]):
            self._state["stages"] = kept
            write_json_atomic(self.folder / STATE, self._state)
        facts = work()
        missing = [f for f in files if not (self.folder / f).exists()]
        if missing:
            raise DataError(f"stage {name} ended without its file {missing[0]}")
        self._state["stages"][name] = {
            "inputs_sha256": sha256_hex(canonical_json(inputs)),
            "files": {f: file_sha256(self.folder / f) for f in files},
            "facts": facts,
        }
        write_json_atomic(self.folder / STATE, self._state)
        self._passed.append(name)
        self.ran.append(name)
        return facts

    def facts(self, name: str) -> JsonDict | None:
        """What a finished stage reported."""
        entry = self._state["stages"].get(name)
        return None if entry is None else entry["facts"]
