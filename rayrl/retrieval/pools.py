"""What an agent can remember and what it is asked: memories, questions, pools, and their content hashes.

A question belongs to class A *relative to a memory*: at least one of its answers is in it. Class B is ``near`` when the
question comes from the memory's own domain (its answer is merely absent) and ``far`` when it comes from elsewhere.

On disk a pool is a folder: ``pool.json`` (name, source, licence, counts, hashes), ``memories.jsonl``,
``questions.jsonl``. The hash covers content, not paths or times, so the same pool built twice has the same hash.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import TypeVar

import orjson
from pydantic import Field, ValidationError

from rayrl.errors import DataError
from rayrl.schemas import Frozen, canonical_json, sha256_hex


class Kind(IntEnum):
    """Class of a question relative to a memory."""

    A = 0
    NEAR_B = 1
    FAR_B = 2


CLASS_WEIGHTS = (0.5, 0.25, 0.25)
"""Shares of class A, near B and far B wherever classes are balanced."""


class Memory(Frozen):
    """One thing the agent can recall. ``text`` is the key that is embedded and what enters a prompt."""

    id: str = Field(min_length=1)
    text: str = Field(min_length=1)
    category: str = ""
    domain: str = ""


class Question(Frozen):
    """One question with the ids of the memories that answer it (none: nobody's memory answers it)."""

    id: str = Field(min_length=1)
    text: str = Field(min_length=1)
    answer_ids: tuple[str, ...] = ()
    category: str = ""
    domain: str = ""


class PoolManifest(Frozen):
    """Where a pool comes from and what exactly is in it."""

    name: str
    source: str
    license: str
    version: str = ""
    memories: int
    questions: int
    memories_sha256: str
    questions_sha256: str


class MemoryPool(Frozen):
    """Memories and the questions asked about them."""

    name: str
    source: str = ""
    license: str = ""
    version: str = ""
    memories: tuple[Memory, ...]
    questions: tuple[Question, ...] = ()

    def manifest(self) -> PoolManifest:
        """Counts and hashes."""
        return PoolManifest(
            name=self.name,
            source=self.source,
            license=self.license,
            version=self.version,
            memories=len(self.memories),
            questions=len(self.questions),
            memories_sha256=content_hash(self.memories),
            questions_sha256=content_hash(self.questions),
        )

    def check(self) -> MemoryPool:
        """Ids are unique and every answer id exists.

        Raises:
            DataError: names the first offender.
        """
        ids = _unique((m.id for m in self.memories), self.name, "memory")
        _unique((q.id for q in self.questions), self.name, "question")
        for question in self.questions:
            for answer in question.answer_ids:
                if answer not in ids:
                    raise DataError(
                        f"pool {self.name}: question {question.id!r} names the answer {answer!r}, which no memory has"
                    )
        return self


def content_hash(records: Sequence[Frozen]) -> str:
    """SHA-256 over the canonical JSON of the records in order."""
    return sha256_hex(canonical_json([r.model_dump(mode="json") for r in records]))


def kind_of(question: Question, memory_ids: set[str] | frozenset[str], domains: set[str] | frozenset[str]) -> Kind:
    """Class of ``question`` relative to a memory with these ids and domains."""
    if any(answer in memory_ids for answer in question.answer_ids):
        return Kind.A
    return Kind.NEAR_B if question.domain in domains else Kind.FAR_B


def save_pool(pool: MemoryPool, folder: Path) -> PoolManifest:
    """Write a pool folder; each file is replaced atomically, the manifest last."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "memories.jsonl", _lines(pool.memories))
    _write(folder / "questions.jsonl", _lines(pool.questions))
    manifest = pool.manifest()
    _write(folder / "pool.json", orjson.dumps(manifest.model_dump(), option=orjson.OPT_INDENT_2) + b"\n")
    return manifest


def load_pool(folder: Path) -> MemoryPool:
    """Read a pool folder and check it against its manifest.

    Raises:
        DataError: a file is missing, a line is wrong (named), or the content does not match the manifest.
    """
    try:
        manifest = PoolManifest.model_validate_json((folder / "pool.json").read_bytes())
    except FileNotFoundError:
        raise DataError(
            f"{folder} is no memory pool: pool.json is missing; make one with `rayrl memory build`"
        ) from None
    except ValidationError as error:
        raise DataError(f"{folder / 'pool.json'}: {error.errors()[0]['msg']}") from None
    pool = MemoryPool(
        name=manifest.name,
        source=manifest.source,
        license=manifest.license,
        version=manifest.version,
        memories=tuple(read_records(folder / "memories.jsonl", Memory)),
        questions=tuple(read_records(folder / "questions.jsonl", Question)),
    )
    if pool.manifest() != manifest:
        raise DataError(f"{folder}: the content does not match pool.json (edited by hand?); build the pool again")
    return pool.check()


RecordT = TypeVar("RecordT", bound=Frozen)


def read_records(path: Path, model: type[RecordT]) -> list[RecordT]:
    """One record per JSONL line; blank lines are skipped.

    Raises:
        DataError: file missing, or a line that is no such record; file and line are named.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path} does not exist") from None
    records = []
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            records.append(model.model_validate(orjson.loads(line)))
        except orjson.JSONDecodeError as error:
            raise DataError(f"{path}:{number}: not JSON ({error})") from None
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise DataError(f"{path}:{number}: {where}: {first['msg']}") from None
    return records


def _unique(ids: Iterable[str], pool: str, what: str) -> set[str]:
    seen: set[str] = set()
    for identifier in ids:
        if identifier in seen:
            raise DataError(f"pool {pool}: {what} id {identifier!r} occurs twice")
        seen.add(identifier)
    return seen


def _lines(records: Sequence[Frozen]) -> bytes:
    return b"".join(orjson.dumps(r.model_dump(mode="json")) + b"\n" for r in records)


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
    temporary.replace(path)
