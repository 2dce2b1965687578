"""The simple skill providers: none, bank, masked; and how a config names one.

A bank file is JSON: ``{"schema": "rayrl-skillbank-v1", "skills": [{"skill_id", "version", "content", "metadata",
"scope": "global" | {"task_ids": [...]}}]}``. A skill without scope is global. What else a snapshot holds
(:mod:`rayrl.skills.bank`) decides which of them are active. ``shopsimrl-skillbank-v1`` files are read as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from rayrl.config import Section, no_secrets, resolve_resource
from rayrl.errors import ConfigError, DataError, did_you_mean
from rayrl.registry import resolve_dotted
from rayrl.schemas import EpisodeJob, Frozen, JsonDict, PublicContext, Skill, canonical_json, sha256_hex
from rayrl.skills.base import SkillProvider

BANK_SCHEMA = "rayrl-skillbank-v1"
PUBLIC_BANK_SCHEMA = "shopsimrl-skillbank-v1"


class TaskScope(Frozen):
    """Restricts a skill to some tasks."""

    task_ids: list[int] = Field(min_length=1)


class BankEntry(Frozen):
    """One skill of a bank."""

    skill_id: str = Field(min_length=1)
    version: str = "1"
    content: str = Field(min_length=1)
    metadata: JsonDict = {}
    scope: Literal["global"] | TaskScope = "global"

    def applies(self, job: EpisodeJob) -> bool:
        """Whether the skill is in scope for ``job``."""
        return self.scope == "global" or job.task_id in self.scope.task_ids

    def skill(self) -> Skill:
        """The entry as it enters a prompt."""
        return Skill(skill_id=self.skill_id, version=self.version, content=self.content, metadata=self.metadata)


def read_bank_json(path: Path) -> JsonDict:
    """The JSON object of a bank file of a known schema.

    Raises:
        DataError: names the file and what was found.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"skill bank {path}: cannot be read as JSON: {error}") from None
    found = raw.get("schema", raw.get("schema_version")) if isinstance(raw, dict) else type(raw).__name__
    if not isinstance(raw, dict) or found not in (BANK_SCHEMA, PUBLIC_BANK_SCHEMA):
        raise DataError(f"skill bank {path}: schema is {found!r}, expected {BANK_SCHEMA!r}")
    return raw


def load_bank(path: Path) -> list[BankEntry]:
    """The active skills of a bank file: neither rejected in review nor stopped by the firewall.

    Raises:
        DataError: names the file and the entry.
    """
    from rayrl.skills.bank import load_snapshot  # the snapshot is made of the entries of this module

    raw = read_bank_json(path)
    seen: set[str] = set()
    for index, item in enumerate(raw.get("skills") or []):
        name = item.get("skill_id") if isinstance(item, dict) else None
        if name in seen:
            raise DataError(f"skill bank {path}: skills[{index}]: skill_id {name!r} occurs twice")
        seen.add(str(name))
        if raw.get("schema") == BANK_SCHEMA:
            _check_entry(item, f"skill bank {path}: skills[{index}]")
    return load_snapshot(path).active()


def _check_entry(item: Any, where: str) -> None:
    try:
        BankEntry.model_validate(item)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise DataError(f"{where}.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def bank_hash(entries: list[BankEntry]) -> str:
    """Content address of a bank: independent of file layout, dependent on order (order is prompt order)."""
    return sha256_hex(canonical_json([entry.model_dump(mode="json") for entry in entries]))


class NoSkills:
    """No skills at all."""

    def identity(self) -> dict[str, Any]:
        """Fingerprint part."""
        return {"kind": "none"}

    async def select(self, context: PublicContext) -> list[Skill]:
        """Always empty."""
        return []


class BankSkills:
    """Global and task-scoped skills of a bank, in bank order, at most ``max_skills``."""

    def __init__(self, entries: list[BankEntry], *, max_skills: int | None = None) -> None:
        self.entries = entries
        self.max_skills = max_skills

    def identity(self) -> dict[str, Any]:
        """Fingerprint part."""
        return {"kind": "bank", "bank_sha256": bank_hash(self.entries), "max_skills": self.max_skills}

    async def select(self, context: PublicContext) -> list[Skill]:
        """The applicable skills."""
        skills = [entry.skill() for entry in self.entries if entry.applies(context.job)]
        return skills[: self.max_skills]


def mask_bit(mask_seed: int, job: EpisodeJob, skill_id: str, inclusion: float) -> bool:
    """Whether a skill is in the random subset of a job; a pure function of its arguments.

    First 8 bytes, big-endian, of SHA-256(``"{mask_seed}:{split}:{task}:{sample}:{chunk}"``) against ``inclusion`` *
    2^64.
    """
    text = f"{mask_seed}:{job.split}:{job.task_id}:{job.sample_id}:{skill_id}"
    value = int(sha256_hex(text)[:16], 16)
    return value < int(inclusion * 2**64)


class MaskedSkills:
    """A random subset of a bank per job, by :func:`mask_bit`; made for paired masked validation.

    ``flip`` inverts the bits of all skills (``["*"]``) or of the ones named: the same jobs with and without it make
    complementary pairs. Skills in ``without`` are in no subset, whatever their bit; the bits of the others stay.
    """

    def __init__(
        self,
        entries: list[BankEntry],
        *,
        mask_seed: int,
        inclusion: float,
        flip: list[str] | None = None,
        without: list[str] | None = None,
    ) -> None:
        if not 0 < inclusion < 1:
            raise ConfigError(f"skills.inclusion: {inclusion} is not strictly between 0 and 1")
        known = [entry.skill_id for entry in entries]
        for key, names in (("flip", flip or []), ("without", without or [])):
            for name in names:
                if name not in known and (key, name) != ("flip", "*"):
                    raise ConfigError(f"skills.{key}: the bank has no skill {name!r}{did_you_mean(name, known)}")
        self.entries = entries
        self.mask_seed = mask_seed
        self.inclusion = inclusion
        self.flip = sorted(set(flip or []))
        self.without = sorted(set(without or []))

    def identity(self) -> dict[str, Any]:
        """Fingerprint part."""
        return {
            "kind": "masked",
            "bank_sha256": bank_hash(self.entries),
            "mask_seed": self.mask_seed,
            "inclusion": self.inclusion,
            **({"flip": self.flip} if self.flip else {}),
            **({"without": self.without} if self.without else {}),
        }

    def assigned(self, job: EpisodeJob) -> list[BankEntry]:
        """The subset of a job, in bank order; pure."""
        return [
            entry
            for entry in self.entries
            if entry.applies(job)
            and entry.skill_id not in self.without
            and mask_bit(self.mask_seed, job, entry.skill_id, self.inclusion) != self._flipped(entry.skill_id)
        ]

    def _flipped(self, skill_id: str) -> bool:
        return "*" in self.flip or skill_id in self.flip

    async def select(self, context: PublicContext) -> list[Skill]:
        """The assigned subset, in bank order."""
        return [entry.skill() for entry in self.assigned(context.job)]


class SkillsConfig(Section):
    """Which skills an episode gets."""

    kind: str = "none"
    """``none``, ``bank``, ``masked``, or a dotted path ``pkg.module:Provider`` called with ``options``."""
    path: str | None = None
    """Bank file for ``bank`` and ``masked``."""
    max_skills: int | None = Field(default=None, ge=0)
    """At most this many skills per episode (``bank``)."""
    mask_seed: int = 0
    """Seed of the random subsets (``masked``)."""
    inclusion: float = 0.5
    """Probability that a skill is in a job's subset (``masked``)."""
    flip: list[str] = []
    """Skills whose bit is inverted, ``["*"]`` for all (``masked``): the other half of a complementary pair."""
    without: list[str] = []
    """Skills that are in no subset (``masked``): a gate drops what it has found harmful."""
    options: dict[str, Any] = {}
    """Keyword arguments for a provider of your own. In the fingerprint through its ``identity()``."""

    _no_secrets = field_validator("options")(no_secrets)


def _from_bank(config: SkillsConfig, base: Path | None, make: Callable[[list[BankEntry]], SkillProvider]) -> Any:
    if config.path is None:
        raise ConfigError(f"skills.path: needed for skills.kind={config.kind}")
    return make(load_bank(resolve_resource(config.path, base)))


def build_skills(config: SkillsConfig, base: Path | None = None) -> SkillProvider:
    """The provider a config names; ``base`` is the folder relative paths start from.

    Raises:
        ConfigError, DataError: unknown kind, missing or broken bank.
    """
    if config.kind == "none":
        if config.path is not None:
            raise ConfigError("skills.path is set but skills.kind is none; say kind: bank, or drop the path")
        return NoSkills()
    if config.kind == "bank":
        return _from_bank(config, base, lambda bank: BankSkills(bank, max_skills=config.max_skills))  # type: ignore[no-any-return]
    if config.kind == "masked":
        return _from_bank(  # type: ignore[no-any-return]
            config,
            base,
            lambda bank: MaskedSkills(
                bank,
                mask_seed=config.mask_seed,
                inclusion=config.inclusion,
                flip=config.flip,
                without=config.without,
            ),
        )
    if ":" not in config.kind:
        raise ConfigError(f"skills.kind: {config.kind!r} is none of none, bank, masked, or pkg.module:Name")
    make = resolve_dotted(config.kind, "skills.kind")
    try:
        provider = make(**config.options)
    except TypeError as error:
        raise ConfigError(f"skills.kind {config.kind!r} cannot be built from skills.options: {error}") from error
    if not isinstance(provider, SkillProvider):
        raise ConfigError(f"skills.kind: {config.kind} does not offer identity() and select()")
    return provider
