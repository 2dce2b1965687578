"""The skill bank: immutable, content-addressed snapshots of procedural knowledge and where each piece comes from.

A snapshot is one JSON file ``{"schema": "rayrl-skillbank-v1", "snapshot_sha256", "bank_version", "parent", "metadata",
"skills": [...], "records": {...}}``. ``skills`` is what providers inject; ``records`` says for every skill which
episodes speak for and against it, who built it, its cluster, review and leak check. Invariants:

* the snapshot hash covers skills, records and metadata, and is verified on every load: an edited file is refused;
* a change makes a new snapshot that names its parent; nothing is ever edited in place;
* only skills whose review is not ``rejected`` and whose leak check passed are injected.

The public project's ``shopsimrl-skillbank-v1`` is read and written too; its ``content_sha256`` is the hash of the
content as a JSON string, quotes and escapes included.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError, model_validator

from rayrl.errors import DataError, UserError, did_you_mean
from rayrl.schemas import Frozen, JsonDict, canonical_json, sha256_hex
from rayrl.skills.providers import BANK_SCHEMA, PUBLIC_BANK_SCHEMA, BankEntry, TaskScope, read_bank_json
from rayrl.traces.manifest import write_json_atomic

ReviewStatus = Literal["unreviewed", "accepted", "edited", "rejected"]


class EvidenceRef(Frozen):
    """Some steps of one frozen episode."""

    run: str = ""
    episode_id: str
    steps: list[int] = []


class Builder(Frozen):
    """Who wrote a skill."""

    kind: str = "human"
    """``rules``, ``llm``, ``human``, ``import``."""
    model: JsonDict = {}
    """Identity of the model, for ``llm``."""
    prompt_sha256: str | None = None


class Review(Frozen):
    """What a person said."""

    status: ReviewStatus = "unreviewed"
    by: str = ""
    note: str = ""
    at: str = ""
    """UTC time, as given by the reviewer's client."""


class LeakCheck(Frozen):
    """Result of the gold firewall; ``checked`` is false for banks that came from elsewhere."""

    checked: bool = False
    passed: bool = True
    reasons: list[str] = []


class GateResult(Frozen):
    """What the last gate measured."""

    gate: str
    effect: float
    low: float
    high: float
    rank: int
    status: str
    checkpoint_id: str | None = None


class SkillRecord(Frozen):
    """Everything known about a skill besides its text."""

    title: str = ""
    mechanism: str = ""
    evidence_for: list[EvidenceRef] = []
    evidence_against: list[EvidenceRef] = []
    builder: Builder = Builder()
    cluster: str = ""
    cards: list[str] = []
    """Ids of the cards it was compiled from."""
    family: str | None = None
    """Rewrites of one chunk share a family; at most one of a family is ever active."""
    review: Review = Review()
    leak_check: LeakCheck = LeakCheck()
    gate: GateResult | None = None


class SkillBank(Frozen):
    """A snapshot. Make one with :func:`make_bank`, change it with the functions below."""

    bank_version: str = "1"
    parent: str | None = None
    """Hash of the snapshot this one came from."""
    metadata: JsonDict = {}
    skills: list[BankEntry] = []
    records: dict[str, SkillRecord] = {}

    @model_validator(mode="after")
    def _consistent(self) -> SkillBank:
        ids = [skill.skill_id for skill in self.skills]
        if len(set(ids)) != len(ids):
            raise ValueError(f"skill_id {next(i for i in ids if ids.count(i) > 1)!r} occurs twice")
        stray = sorted(set(self.records) - set(ids))
        if stray:
            raise ValueError(f"records speak of {stray[0]!r}, which is no skill of the bank")
        return self

    @property
    def sha256(self) -> str:
        """Content address."""
        return sha256_hex(canonical_json(self.model_dump(mode="json")))

    def record(self, skill_id: str) -> SkillRecord:
        """The record of a skill, empty where there is none."""
        return self.records.get(skill_id, SkillRecord())

    def entry(self, skill_id: str) -> BankEntry:
        """A skill by id.

        Raises:
            UserError: there is none; near names are listed.
        """
        for skill in self.skills:
            if skill.skill_id == skill_id:
                return skill
        known = [skill.skill_id for skill in self.skills]
        raise UserError(f"the bank has no skill {skill_id!r}{did_you_mean(skill_id, known)}; it has {', '.join(known)}")

    def active(self) -> list[BankEntry]:
        """Skills that may be injected, in bank order."""
        return [
            s
            for s in self.skills
            if self.record(s.skill_id).review.status != "rejected" and self.record(s.skill_id).leak_check.passed
        ]

    def families(self) -> dict[str, str]:
        """Family by skill id, for those that have one."""
        return {i: r.family for i, r in self.records.items() if r.family is not None}


def make_bank(
    skills: list[BankEntry],
    records: dict[str, SkillRecord] | None = None,
    *,
    bank_version: str = "1",
    parent: SkillBank | None = None,
    metadata: JsonDict | None = None,
) -> SkillBank:
    """A snapshot.

    Raises:
        DataError: ids repeat, or records without a skill.
    """
    try:
        return SkillBank(
            bank_version=bank_version,
            parent=parent.sha256 if parent is not None else None,
            metadata=metadata or {},
            skills=skills,
            records=records or {},
        )
    except ValidationError as error:
        raise DataError(f"skill bank: {error.errors(include_url=False)[0]['msg']}") from None


def save_bank(bank: SkillBank, path: Path) -> str:
    """Write a snapshot atomically; returns its hash.

    Raises:
        DataError: ``path`` holds another snapshot already (snapshots are immutable).
    """
    if path.exists() and load_snapshot(path).sha256 != bank.sha256:
        raise DataError(f"{path} already holds another snapshot; snapshots are immutable, choose another file")
    write_json_atomic(path, {"schema": BANK_SCHEMA, "snapshot_sha256": bank.sha256, **bank.model_dump(mode="json")})
    return bank.sha256


def load_snapshot(path: Path) -> SkillBank:
    """Read a bank of either schema; a plain list of skills (no hash, no records) is fine too.

    Raises:
        DataError: unreadable, unknown schema, or its content does not match its hash.
    """
    raw = read_bank_json(path)
    if raw.get("schema_version") == PUBLIC_BANK_SCHEMA:
        return from_public(raw, source=str(path))
    body = {key: value for key, value in raw.items() if key not in ("schema", "snapshot_sha256")}
    try:
        bank = SkillBank.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise DataError(f"skill bank {path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    claimed = raw.get("snapshot_sha256")
    if claimed is not None and claimed != bank.sha256:
        raise DataError(
            f"skill bank {path}: its content hashes to {bank.sha256}, but it says {str(claimed)[:80]}: the file "
            "was edited. Make changes with `rayrl skills review`, which writes a new snapshot"
        )
    return bank


def public_content_sha256(content: str) -> str:
    """The public project's content hash: of the JSON string, not of the text."""
    return sha256_hex(canonical_json(content))


def from_public(raw: JsonDict, *, source: str = "") -> SkillBank:
    """A ``shopsimrl-skillbank-v1`` payload as a snapshot. Disabled skills become rejected ones.

    Raises:
        DataError: an entry without id or content, or a content hash that does not fit.
    """
    skills: list[BankEntry] = []
    records: dict[str, SkillRecord] = {}
    items = raw.get("skills")
    if not isinstance(items, list):
        raise DataError(f"skill bank {source}: 'skills' must be a list")
    for index, item in enumerate(items):
        where = f"skill bank {source}: skills[{index}]"
        content, name = (item or {}).get("content"), (item or {}).get("skill_id")
        if not (isinstance(content, str) and content.strip() and isinstance(name, str) and name.strip()):
            raise DataError(f"{where}: needs a non-empty skill_id and content")
        metadata = dict(item.get("metadata") or {})
        claimed = item.get("content_sha256", metadata.get("content_sha256"))
        if claimed is not None and claimed != public_content_sha256(content):
            raise DataError(f"{where}: content_sha256 does not fit the content (it is the hash of the JSON string)")
        tasks = item.get("task_ids")
        skills.append(
            BankEntry(
                skill_id=name,
                version=str(item.get("version", "1")),
                content=content,
                metadata=metadata,
                scope=TaskScope(task_ids=tasks) if tasks else "global",
            )
        )
        rejected = (
            Review(status="rejected", note="disabled in the source") if item.get("enabled") is False else Review()
        )
        records[name] = SkillRecord(builder=Builder(kind="import"), review=rejected)
    return make_bank(
        skills, records, bank_version=str(raw.get("bank_version", "1")), metadata=dict(raw.get("metadata") or {})
    )


def to_public(bank: SkillBank) -> JsonDict:
    """The snapshot as a ``shopsimrl-skillbank-v1`` payload; records travel under ``metadata.rayrl``."""
    skills = []
    for skill in bank.skills:
        record = bank.record(skill.skill_id)
        item: dict[str, Any] = {
            "skill_id": skill.skill_id,
            "version": skill.version,
            "enabled": skill in bank.active(),
            "content": skill.content,
            "content_sha256": public_content_sha256(skill.content),
            "metadata": {**skill.metadata, "rayrl": record.model_dump(mode="json", exclude_defaults=True)},
        }
        if isinstance(skill.scope, TaskScope):
            item["task_ids"] = list(skill.scope.task_ids)
        skills.append(item)
    return {
        "schema_version": PUBLIC_BANK_SCHEMA,
        "bank_version": bank.bank_version,
        "metadata": {**bank.metadata, "rayrl_snapshot_sha256": bank.sha256},
        "skills": skills,
    }


def review_skill(
    bank: SkillBank,
    skill_id: str,
    status: Literal["accepted", "edited", "rejected"],
    *,
    by: str,
    at: str,
    note: str = "",
    content: str | None = None,
) -> SkillBank:
    """A new snapshot with a person's verdict on one skill. An edit needs new ``content`` and bumps the version; the
    edited text has to pass the firewall again, so its leak check starts unchecked.

    Raises:
        UserError: unknown skill, an edit without text, or text without an edit.
    """
    entry, record = bank.entry(skill_id), bank.record(skill_id)
    if (status == "edited") != (content is not None and content != entry.content):
        raise UserError(f"{skill_id}: 'edited' needs a changed text, and only an edit may change it")
    if content is not None and not content.strip():
        raise UserError(f"{skill_id}: the edited text is empty; reject the skill instead")
    update: dict[str, Any] = {"review": Review(status=status, by=by, note=note, at=at)}
    if status == "edited" and content is not None:
        entry = entry.model_copy(update={"content": content, "version": next_version(entry.version)})
        update |= {"leak_check": LeakCheck(), "gate": None}
    skills = [entry if s.skill_id == skill_id else s for s in bank.skills]
    records = {**bank.records, skill_id: record.model_copy(update=update)}
    return make_bank(skills, records, bank_version=bank.bank_version, parent=bank, metadata=bank.metadata)


def next_version(version: str) -> str:
    """``"1"`` to ``"2"``; a version that is no number gets ``.2``, ``.3``, ..."""
    head, _, tail = version.rpartition(".")
    if version.isdigit():
        return str(int(version) + 1)
    return f"{head}.{int(tail) + 1}" if head and tail.isdigit() else f"{version}.2"


def diff_banks(old: SkillBank, new: SkillBank) -> JsonDict:
    """``{added, removed, moved, changed: {id: {field: [old, new]}}, same}``; texts are given whole."""
    before, after = {s.skill_id: s for s in old.skills}, {s.skill_id: s for s in new.skills}
    shared_old = [i for i in before if i in after]
    shared_new = [i for i in after if i in before]
    changed: dict[str, dict[str, list[Any]]] = {}
    for name in shared_new:
        a = {**before[name].model_dump(mode="json"), **old.record(name).model_dump(mode="json")}
        b = {**after[name].model_dump(mode="json"), **new.record(name).model_dump(mode="json")}
        fields = {key: [a[key], b[key]] for key in a if a[key] != b[key]}
        if fields:
            changed[name] = fields
    return {
        "old": old.sha256,
        "new": new.sha256,
        "child": new.parent == old.sha256,
        "added": [i for i in after if i not in before],
        "removed": [i for i in before if i not in after],
        "moved": shared_old != shared_new,
        "changed": changed,
        "same": sum(1 for i in shared_new if i not in changed),
    }


def dump_json(value: Any) -> str:
    """JSON text for files that people read: sorted, indented, non-ASCII kept."""
    return json.dumps(value, ensure_ascii=False, indent=2, sort_keys=True) + "\n"
