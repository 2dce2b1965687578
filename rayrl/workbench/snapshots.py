"""Skill snapshots of the workbench: frozen on disk by :mod:`rayrl.skills.snapshot`, listed in the store."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, insert, select

from rayrl.schemas import JsonDict, canonical_json, sha256_hex
from rayrl.skills.markdown import headings, lines_of, render, resolve
from rayrl.skills.snapshot import Taken, file_bytes, load, take_folder, take_git, verify, write_snapshot
from rayrl.workbench import tables
from rayrl.workbench.store import MissingError, Store, now

_S = tables.snapshots
FOLDER = "skill_snapshots"
_VERSION = re.compile(r"^[vV]?\d[\w.-]{0,30}$")


class Snapshots:
    """See the module docstring."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._loaded: dict[str, Taken] = {}

    def add_folder(self, folder: Path) -> JsonDict:
        """Freeze a folder as it is; inside a checkout it is a draft when it differs from HEAD."""
        return self.add(take_folder(folder))

    def add_git(self, repository: Path, ref: str, path: str) -> JsonDict:
        """Freeze a commit or tag."""
        return self.add(take_git(repository, ref, path))

    def add(self, taken: Taken) -> JsonDict:
        """Freeze what was taken. The same content from the same source is the same snapshot."""
        manifest = taken.manifest
        folder = write_snapshot(taken, self.store.root / FOLDER)
        facts = [manifest.status, manifest.git_commit or "", manifest.git_tag or "", manifest.repository or ""]
        key = sha256_hex(canonical_json([manifest.name, manifest.content_sha256, *facts]))[:16]
        row: dict[str, Any] = {
            "id": f"sk_{key}",
            "name": manifest.name,
            "content_sha256": manifest.content_sha256,
            "status": manifest.status,
            "source": manifest.source,
            "repository": manifest.repository,
            "git_commit": manifest.git_commit,
            "git_tag": manifest.git_tag,
            "path": str(folder.relative_to(self.store.root)),
            "n_files": len(manifest.files),
            "findings": [finding.model_dump() for finding in manifest.findings],
            "created_at": now(),
        }
        with self.store.write() as connection:
            known = connection.execute(select(_S).where(_S.c.id == row["id"])).mappings().first()
            if known is not None:
                return dict(known)
            connection.execute(insert(_S).values(row))
        return row

    def get(self, snapshot_id: str) -> JsonDict:
        """One snapshot.

        Raises:
            DataError: there is none of this id.
        """
        with self.store.read() as connection:
            return get_snapshot(connection, snapshot_id)

    def all(self) -> list[JsonDict]:
        """All snapshots, newest first."""
        with self.store.read() as connection:
            return [dict(r) for r in connection.execute(select(_S).order_by(_S.c.created_at.desc())).mappings()]

    def folder(self, snapshot_id: str) -> Path:
        """Where its files lie."""
        return self.store.root / str(self.get(snapshot_id)["path"])

    def verify(self, snapshot_id: str) -> JsonDict:
        """Compare with the hashes taken when it was frozen."""
        return verify(self.folder(snapshot_id)).model_dump()

    def load(self, snapshot_id: str) -> Taken:
        """The Skill with its bytes; verified on the first load."""
        if snapshot_id not in self._loaded:
            if len(self._loaded) > 16:
                self._loaded.clear()
            self._loaded[snapshot_id] = load(self.folder(snapshot_id))
        return self._loaded[snapshot_id]

    def file(self, snapshot_id: str, path: str) -> JsonDict:
        """A file with its headings, as text and safe HTML; binary files say so.

        Raises:
            DataError: no such file.
        """
        data = file_bytes(self.load(snapshot_id), path)
        if data is None:
            raise MissingError(f"the snapshot has no file {path!r}")
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            return {"path": path, "size": len(data), "binary": True}
        markdown = path.lower().endswith((".md", ".markdown"))
        return {
            "path": path,
            "size": len(data),
            "binary": False,
            "text": text,
            "html": render(text) if markdown else None,
            "headings": [heading.__dict__ for heading in headings(text)] if markdown else [],
        }

    def passage(self, snapshot_id: str, ref: str) -> JsonDict:
        """The text a reference (``file.md#slug``, ``file.md#L3-L9``) leads to.

        Raises:
            DataError: it leads nowhere.
        """
        path, _, anchor = ref.partition("#")
        data = file_bytes(self.load(snapshot_id), path)
        text = data.decode("utf-8", "replace") if data is not None else ""
        found = resolve(path, text, anchor or None) if data is not None else None
        if found is None:
            raise MissingError(f"the reference {ref!r} leads nowhere in this snapshot")
        part = lines_of(text, found.start, found.end)
        return {
            "ref": ref,
            "path": path,
            "section": found.section,
            "lines": [found.start, found.end],
            "text": part,
            "html": render(part) if path.endswith(".md") else None,
        }


def snapshot_label(snapshot: JsonDict) -> str:
    """A Skill and its version: the tag, else the beginning of its content hash, which no two contents share.

    A folder above it that is named like a version (``v2``) is said too, and so is that it is a draft.
    """
    version = snapshot["git_tag"] or snapshot["content_sha256"][:7]
    above = Path(str(snapshot["source"] or "").rpartition(":")[2]).parent.name
    folder = f" {above}" if _VERSION.match(above) and above != version else ""
    return f"{snapshot['name']}{folder} @ {version}" + (" (draft)" if snapshot["status"] == "draft" else "")


def distinct_contents(rows: list[JsonDict], keep: str = "") -> list[JsonDict]:
    """Snapshots with equal contents folded into one: the one of id ``keep``, else the first."""
    out: dict[tuple[str, str], JsonDict] = {}
    for row in rows:
        key = (row["name"], row["content_sha256"])
        if key not in out or row["id"] == keep:
            out[key] = row
    return list(out.values())


def get_snapshot(connection: Connection, snapshot_id: str) -> JsonDict:
    """One snapshot of an open connection.

    Raises:
        DataError: there is none of this id.
    """
    row = connection.execute(select(_S).where(_S.c.id == snapshot_id)).mappings().first()
    if row is None:
        raise MissingError(f"there is no Skill snapshot {snapshot_id!r}")
    return dict(row)
