"""Frozen task splits, deterministic sampling, and the jobs that follow from them.

A split is an explicit list of task ids, never a range: ids have holes. A split manifest is a JSON file

``{"version": "rayrl-splits-v1", "source": {"kind", "sha256", ...}, "splits": {name: {"role", "task_ids",
"task_ids_sha256", "persona"}}, "grouping": {...}}``

whose hashes are verified on every load, so a job list can be rebuilt exactly from (manifest, seed, sample size).
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from rayrl.errors import ConfigError, DataError, did_you_mean
from rayrl.schemas import EpisodeJob, Frozen, canonical_json, episode_seed, sha256_hex

SPLITS_VERSION: Literal["rayrl-splits-v1"] = "rayrl-splits-v1"
Role = Literal["train", "val", "test"]


def task_ids_sha256(task_ids: list[int]) -> str:
    """SHA-256 of the canonical JSON of the sorted ids."""
    return sha256_hex(canonical_json(sorted(task_ids)))


class Split(Frozen):
    """One named, frozen list of tasks."""

    role: Role
    task_ids: list[int] = Field(min_length=1)
    task_ids_sha256: str
    persona: bool | None = None
    """Whether these tasks are meant to be played with a persona; ``None`` = either."""

    @model_validator(mode="after")
    def _verify(self) -> Split:
        if len(set(self.task_ids)) != len(self.task_ids):
            raise ValueError("task_ids repeats an id")
        if min(self.task_ids) < 0:
            raise ValueError("task_ids holds a negative id")
        actual = task_ids_sha256(self.task_ids)
        if actual != self.task_ids_sha256:
            raise ValueError(
                f"task_ids_sha256 is {self.task_ids_sha256[:12]}… but the ids hash to {actual[:12]}…; "
                "the frozen list was edited"
            )
        return self


class SplitManifest(Frozen):
    """A set of disjoint splits over one source of tasks."""

    version: Literal["rayrl-splits-v1"] = SPLITS_VERSION
    source: dict[str, Any] = {}
    """What the ids refer to: ``kind`` (shop catalogue, import, ...), ``sha256`` where one is known."""
    splits: dict[str, Split] = Field(min_length=1)
    grouping: dict[str, Any] = {}
    """How related tasks were kept on one side: keys used, component counts, largest component."""

    @model_validator(mode="after")
    def _disjoint(self) -> SplitManifest:
        owner: dict[int, str] = {}
        for name, split in self.splits.items():
            for task_id in split.task_ids:
                other = owner.setdefault(task_id, name)
                if other != name:
                    raise ValueError(f"task {task_id} is in both {other!r} and {name!r}")
        return self

    def split(self, name: str) -> Split:
        """The split called ``name``.

        Raises:
            ConfigError: there is none; the message lists those there are.
        """
        if name not in self.splits:
            known = sorted(self.splits)
            raise ConfigError(
                f"tasks.split: no split {name!r} in the manifest{did_you_mean(name, known)}; it has {', '.join(known)}"
            )
        return self.splits[name]


def load_split_manifest(path: Path) -> SplitManifest:
    """Read and verify a split manifest.

    Raises:
        DataError: unreadable, not JSON, wrong version, edited lists, overlapping splits; names the file.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"split manifest {path}: cannot be read: {error}") from None
    except json.JSONDecodeError as error:
        raise DataError(f"split manifest {path}:{error.lineno}: not JSON: {error.msg}") from None
    if isinstance(raw, dict) and raw.get("version") != SPLITS_VERSION:
        raise DataError(
            f"split manifest {path}: version is {raw.get('version')!r}, expected {SPLITS_VERSION!r}; "
            "convert other formats with `rayrl splits import`"
        )
    try:
        return SplitManifest.model_validate(raw)
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, e['loc'])) or '(top level)'}: {e['msg']}" for e in error.errors()[:8]]
        raise DataError(f"split manifest {path} is not valid:\n" + "\n".join(lines)) from None


def sample_task_ids(task_ids: list[int], n: int | None, *, experiment_seed: int) -> list[int]:
    """All ids, sorted, or ``random.Random(experiment_seed).sample(sorted ids, n)`` in sampled order.

    Raises:
        ConfigError: fewer than ``n`` ids, or n < 1.
    """
    ordered = sorted(task_ids)
    if n is None:
        return ordered
    if n < 1:
        raise ConfigError(f"tasks.sample_size: {n} is not positive; leave it out for the whole split")
    if n > len(ordered):
        raise ConfigError(f"tasks.sample_size: {n} tasks asked for, but the split has only {len(ordered)}")
    return random.Random(experiment_seed).sample(ordered, n)


def make_jobs(task_ids: list[int], *, split: str, repeats: int, experiment_seed: int) -> list[EpisodeJob]:
    """``repeats`` jobs per task, in the order of ``task_ids``; see :func:`rayrl.schemas.episode_seed` for the seeds."""
    return [
        EpisodeJob(task_id=task_id, sample_id=sample, seed=episode_seed(experiment_seed, task_id, sample), split=split)
        for task_id in task_ids
        for sample in range(repeats)
    ]
