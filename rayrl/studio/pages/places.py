"""Where runs, trainings, evaluations and banks lie below the runs root, found by the files they hold. Only reads.

Invariants: a place is named by its path below the root with ``~`` for ``/``; a name never leads out of the root, also
not over a link; whatever is damaged is a place with a problem, never an exception of a list.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from rayrl.errors import DataError
from rayrl.schemas import JsonDict
from rayrl.traces.manifest import MANIFEST
from rayrl.traces.store import TRACES
from rayrl.workbench.store import MissingError

DEPTH = 5
MAX_FOLDERS = 5000
SKIPPED = frozenset({"wandb", "checkpoints", "fits", "__pycache__", "tokenizer"})
MAX_JSON = 64 * 1024 * 1024
SEPARATOR = "~"


class UnknownError(MissingError):
    """What was named is not there; the pages say it in the reader's language by the message ``key``."""

    def __init__(self, key: str, text: str, **places: Any) -> None:
        super().__init__(text)
        self.key, self.places = key, places


@dataclass(frozen=True)
class Place:
    """A folder below the root and the names of the files in it."""

    slug: str
    path: Path
    files: frozenset[str]
    changed: float
    """Newest modification of the files that tell what it is, seconds since the epoch."""

    @property
    def name(self) -> str:
        """The slug as people read it."""
        return self.slug.replace(SEPARATOR, "/")

    def is_run(self) -> bool:
        """Whether it is a rollout run."""
        return MANIFEST in self.files or TRACES in self.files

    def is_training(self) -> bool:
        """Whether it is a training run of the retrieval policy."""
        if self.is_run() or "trial.json" in self.files:
            return False
        return "quickstart_training.json" in self.files or {"config.json", "fold.json"} <= self.files


def walk(root: Path) -> list[Place]:
    """Every folder below the root that holds files, at most :data:`MAX_FOLDERS`; none is looked for inside a run."""
    found: list[Place] = []
    waiting: list[tuple[Path, tuple[str, ...]]] = [(root, ())] if root.is_dir() else []
    seen = 0
    while waiting and seen < MAX_FOLDERS:
        folder, parts = waiting.pop()
        seen += 1
        try:
            with os.scandir(folder) as entries:
                listed = sorted(entries, key=lambda entry: entry.name)
        except OSError:
            continue
        files, folders, changed = [], [], 0.0
        for entry in listed:
            try:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
                elif entry.is_file():
                    files.append(entry.name)
                    changed = max(changed, entry.stat().st_mtime)
            except OSError:
                continue
        if parts and files:
            place = Place(SEPARATOR.join(parts), folder, frozenset(files), changed)
            found.append(place)
            if place.is_run():
                continue
        if len(parts) < DEPTH:
            waiting += [
                (folder / name, (*parts, name))
                for name in folders
                if name not in SKIPPED and name[0] not in ".-" and SEPARATOR not in name
            ]
    return found


def resolve(root: Path, slug: str) -> Path:
    """The folder a slug names.

    Raises:
        UnknownError: there is none, or the name would lead out of the root.
    """
    parts = slug.split(SEPARATOR)
    name = slug[:200].replace(SEPARATOR, "/")
    text = f"there is no folder {name!r} below the runs root {root}"
    missing = UnknownError("shell.missing.folder", text, name=name, root=str(root))
    if any(part in ("", ".", "..") or part[0] in ".-" or "/" in part or "\\" in part or "\0" in part for part in parts):
        raise missing
    try:
        top, path = root.resolve(), root.joinpath(*parts).resolve()
        there = path.is_dir() and path != top and top in path.parents
    except (OSError, ValueError, RuntimeError):
        raise missing from None
    if not there:
        raise missing
    return path


def slug_of(root: Path, path: Path) -> str | None:
    """The slug of a folder or file below the root; ``None`` outside of it."""
    try:
        return SEPARATOR.join(path.resolve().relative_to(root.resolve()).parts)
    except (ValueError, OSError):
        return None


def read_json(path: Path) -> Any:
    """A JSON file, kept in memory until it changes.

    Raises:
        DataError: it is missing, too large or not JSON; the message names it.
    """
    try:
        stat = path.stat()
    except OSError as error:
        raise DataError(f"{path.name}: cannot be read ({error.strerror or error})") from None
    if stat.st_size > MAX_JSON:
        raise DataError(f"{path.name}: is larger than {MAX_JSON // 1024 // 1024} MB")
    return _parsed(str(path), stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=64)
def _parsed(path: str, mtime_ns: int, size: int) -> Any:
    try:
        return orjson.loads(Path(path).read_bytes())
    except OSError as error:
        raise DataError(f"{Path(path).name}: cannot be read ({error.strerror or error})") from None
    except orjson.JSONDecodeError as error:
        raise DataError(f"{Path(path).name}: is not JSON ({error})") from None


def read_object(path: Path) -> JsonDict:
    """As :func:`read_json`, for a file that must hold an object.

    Raises:
        DataError: it does not.
    """
    value = read_json(path)
    if not isinstance(value, dict):
        raise DataError(f"{path.name}: is no JSON object")
    return value


def read_lines(path: Path, *, most_bytes: int = 8 * 1024 * 1024) -> list[JsonDict]:
    """The JSON objects of a JSONL file, the newest ``most_bytes`` of it; lines that are none are left out."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most_bytes))
            data = file.read()
    except OSError:
        return []
    out = []
    for line in data.split(b"\n"):
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(value, dict):
            out.append(value)
    return out


def guarded(make: Callable[[], Any]) -> tuple[Any, str | None]:
    """``(value, None)``, or ``(None, problem)`` where a file is damaged in whatever way.

    Raises:
        MissingError: what was asked for is not there at all.
    """
    try:
        return make(), None
    except MissingError:
        raise
    except DataError as error:
        return None, str(error)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OSError) as error:
        return None, f"a file here is not as expected ({type(error).__name__}: {str(error)[:200]})"
