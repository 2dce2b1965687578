"""The run manifest: everything that gives a run its meaning, frozen before the first episode.

The **semantic fingerprint** is the SHA-256 of the canonical JSON of ``semantic``. Two runs with the same fingerprint
are the same experiment, whatever host, parallelism, address or directory they ran with.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from rayrl.errors import DataError, RunConflictError
from rayrl.schemas import MANIFEST_SCHEMA, JsonDict, canonical_json, sha256_hex

MANIFEST = "manifest.json"


def fingerprint(semantic: JsonDict) -> str:
    """64 hex characters; see the module docstring."""
    return sha256_hex(canonical_json(semantic))


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys of nested objects; lists are leaves."""
    if not isinstance(value, dict) or not value:
        return {prefix: value} if prefix else {}
    out: dict[str, Any] = {}
    for key, item in value.items():
        out.update(flatten(item, f"{prefix}.{key}" if prefix else str(key)))
    return out


def difference(old: JsonDict, new: JsonDict) -> list[tuple[str, Any, Any]]:
    """``(dotted key, old, new)`` for everything that differs; a missing key shows as ``None``."""
    a, b = flatten(old), flatten(new)
    return [(key, a.get(key), b.get(key)) for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)]


def describe_difference(old: JsonDict, new: JsonDict, *, limit: int = 12) -> str:
    """The difference as indented lines for people; long values are shortened."""
    rows = difference(old, new)
    lines = [f"  {key}: {_short(before)} -> {_short(after)}" for key, before, after in rows[:limit]]
    if len(rows) > limit:
        lines.append(f"  … and {len(rows) - limit} more")
    return "\n".join(lines)


def _short(value: Any) -> str:
    if isinstance(value, list):
        return f"list of {len(value)} ({sha256_hex(canonical_json(value))[:8]})"
    text = "(none)" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def make_manifest(*, experiment: str, semantic: JsonDict, operational: JsonDict, versions: JsonDict) -> JsonDict:
    """The object written to ``manifest.json``."""
    return {
        "schema": MANIFEST_SCHEMA,
        "experiment": experiment,
        "fingerprint": fingerprint(semantic),
        "created_at": datetime.now(UTC).isoformat(),
        "versions": versions,
        "semantic": semantic,
        "operational": operational,
    }


def read_manifest(run_dir: Path) -> JsonDict | None:
    """The manifest of a run directory, or ``None`` when there is none.

    Raises:
        DataError: it cannot be read, or is of another schema.
    """
    path = run_dir / MANIFEST
    if not path.exists():
        return None
    try:
        manifest: JsonDict = orjson.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("schema") != MANIFEST_SCHEMA:
        raise DataError(f"{path}: is no {MANIFEST_SCHEMA}")
    return manifest


def claim(run_dir: Path, manifest: JsonDict) -> bool:
    """Freeze ``manifest`` in ``run_dir``; ``True`` when the run existed already (a resume).

    Raises:
        RunConflictError: the directory belongs to another experiment (the message lists what differs), or holds
            traces of an unknown one.
    """
    existing = read_manifest(run_dir)
    if existing is None:
        traces = run_dir / "traces.jsonl"
        if traces.exists() and traces.stat().st_size:
            raise RunConflictError(
                f"{run_dir} holds traces but no {MANIFEST}: nobody can say which experiment they belong to. "
                "Give this one another experiment.name, or put the manifest back"
            )
        write_json_atomic(run_dir / MANIFEST, manifest)
        return False
    if existing["fingerprint"] != manifest["fingerprint"]:
        rows = describe_difference(existing["semantic"], manifest["semantic"])
        raise RunConflictError(
            f"{run_dir} holds another experiment (fingerprint {existing['fingerprint'][:12]}, "
            f"this one is {manifest['fingerprint'][:12]}). What differs:\n{rows}\n"
            "Give this one another experiment.name, or restore the old settings to go on with that run."
        )
    return True


def write_json_atomic(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS))
        file.write(b"\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
