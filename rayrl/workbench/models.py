"""Model profiles: named, versioned model configs that experiments freeze.

Profiles that come over HTTP may not name code by dotted path (but for the shipped reader): importing and calling what a
request names would run anything.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from sqlalchemy import insert, select

from rayrl.config import configs_root, parse_config
from rayrl.errors import ConfigError
from rayrl.models.config import ModelConfig
from rayrl.schemas import JsonDict, canonical_json, sha256_hex
from rayrl.workbench import tables
from rayrl.workbench.store import MissingError, Store, now

READER = "rayrl.workbench.reader:ScriptedReader"
_M = tables.model_profiles


class ModelProfiles:
    """See the module docstring."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def save(self, name: str, body: JsonDict, *, trusted: bool = False) -> JsonDict:
        """A new version of a profile; equal content is the version it is.

        Raises:
            ConfigError: not a valid model config, or code named by an untrusted caller.
        """
        config = parse_config(body, ModelConfig, source=f"model profile {name!r}")
        if not trusted and ":" in config.kind and config.kind != READER:
            raise ConfigError(
                f"model profile {name!r}: kind {config.kind!r} names code; such profiles are added by command "
                "(rayrl workbench models), not over HTTP"
            )
        kept = config.model_dump(mode="json", exclude_defaults=True)
        digest = sha256_hex(canonical_json(kept))
        with self.store.write() as connection:
            newest = (
                connection.execute(select(_M).where(_M.c.name == name).order_by(_M.c.version.desc())).mappings().first()
            )
            if newest is not None and newest["sha256"] == digest:
                return dict(newest)
            version = (newest["version"] if newest else 0) + 1
            row: dict[str, Any] = {
                "name": name,
                "version": version,
                "body": kept,
                "sha256": digest,
                "created_at": now(),
            }
            connection.execute(insert(_M).values(row))
        return row

    def get(self, name: str, version: int | None = None) -> JsonDict:
        """A profile, its newest version unless one is named.

        Raises:
            DataError: there is none.
        """
        query = select(_M).where(_M.c.name == name).order_by(_M.c.version.desc())
        if version is not None:
            query = query.where(_M.c.version == version)
        with self.store.read() as connection:
            row = connection.execute(query).mappings().first()
        if row is None:
            known = ", ".join(sorted({p["name"] for p in self.all()})) or "none"
            raise MissingError(
                f"there is no model profile {name!r}" + (f" version {version}" if version else "") + f"; known: {known}"
            )
        return dict(row)

    def all(self) -> list[JsonDict]:
        """Every version of every profile."""
        with self.store.read() as connection:
            return [dict(r) for r in connection.execute(select(_M).order_by(_M.c.name, _M.c.version)).mappings()]

    def seed(self, path: Path | None = None) -> None:
        """Add the shipped profiles (``configs/workbench/models.yaml``) where a name is not there yet."""
        path = path or configs_root() / "workbench" / "models.yaml"
        known = {profile["name"] for profile in self.all()}
        for name, body in (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).items():
            if name not in known:
                self.save(name, body, trusted=True)
