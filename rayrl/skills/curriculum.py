"""Exposure of skills in training rollouts: helpful ones often, doubtful ones seldom, and some groups none at all.

inclusion = clip(rho_min + (rho_max - rho_min) * effect / scale, rho_min, rho_max)

Every decision is a hash of (seed, split, task), never of the sample: all siblings of a group see the same skills, or
their rewards could not be compared. A share of groups stays skill-free, so that the policy learns to do without.

A group that is all wrong gets one retry with every skill. If the retry succeeds, the policy could do it with the text
and has not taken it in (internalisation deficit); if it fails, no skill helps yet, and the failure analyst should look.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rayrl.errors import ConfigError
from rayrl.evaluation.rows import is_complete_row, number
from rayrl.schemas import EpisodeJob, JsonDict, PublicContext, Skill, episode_seed, sha256_hex
from rayrl.skills.bank import SkillBank, load_snapshot
from rayrl.skills.providers import BankEntry, bank_hash

Triage = Literal["mixed", "all_right", "internalisation_deficit", "analyst", "retry_missing", "incomplete"]


def inclusion_probability(effect: float, *, rho_min: float, rho_max: float, scale: float) -> float:
    """Probability that a group sees a skill of this measured effect; see the module docstring."""
    return min(rho_max, max(rho_min, rho_min + (rho_max - rho_min) * effect / scale))


def share(text: str) -> float:
    """A number in [0, 1) that depends on ``text`` alone: the first 8 bytes of its SHA-256."""
    return int(sha256_hex(text)[:16], 16) / 2**64


class CurriculumSkills:
    """Group-shared random exposure of a gated bank.

    In a config: ``skills: {kind: "rayrl.skills.curriculum:CurriculumSkills", options: {bank: ..., seed: 1}}``.
    """

    def __init__(
        self,
        bank: str,
        seed: int = 0,
        rho_min: float = 0.1,
        rho_max: float = 0.9,
        scale: float = 0.1,
        skill_free: float = 0.2,
    ) -> None:
        """Load the bank.

        Raises:
            ConfigError: probabilities out of order.
        """
        if not (0 <= rho_min <= rho_max <= 1 and scale > 0 and 0 <= skill_free <= 1):
            raise ConfigError(
                f"curriculum: needs 0 <= rho_min <= rho_max <= 1, scale > 0 and 0 <= skill_free <= 1, got rho_min="
                f"{rho_min}, rho_max={rho_max}, scale={scale}, skill_free={skill_free}"
            )
        self._bank: SkillBank = load_snapshot(Path(bank))
        self.entries = self._bank.active()
        self.seed, self.skill_free = seed, skill_free
        self._settings = {"rho_min": rho_min, "rho_max": rho_max, "scale": scale}
        self.probabilities = {
            e.skill_id: inclusion_probability(
                measured.effect if (measured := self._bank.record(e.skill_id).gate) is not None else 0.0,
                **self._settings,
            )
            for e in self.entries
        }

    def identity(self) -> dict[str, Any]:
        """Fingerprint part."""
        return {
            "kind": "curriculum",
            "bank_sha256": bank_hash(self.entries),
            "snapshot_sha256": self._bank.sha256,
            "seed": self.seed,
            "skill_free": self.skill_free,
            **self._settings,
        }

    def assigned(self, job: EpisodeJob) -> list[BankEntry]:
        """The skills of a job's group, in bank order; the sample plays no part."""
        group = f"{self.seed}:{job.split}:{job.task_id}"
        if share(f"free:{group}") < self.skill_free:
            return []
        return [
            e
            for e in self.entries
            if e.applies(job) and share(f"{group}:{e.skill_id}") < self.probabilities[e.skill_id]
        ]

    async def select(self, context: PublicContext) -> list[Skill]:
        """The group's skills."""
        return [e.skill() for e in self.assigned(context.job)]


@dataclass(frozen=True)
class GroupOutcome:
    """Rewards of the complete samples of one task."""

    split: str
    task_id: int
    rewards: tuple[float, ...]
    successes: int
    next_sample: int
    """Lowest sample id above all that were tried."""

    @property
    def all_wrong(self) -> bool:
        """At least one complete sample, and none succeeded."""
        return bool(self.rewards) and self.successes == 0


def group_outcomes(records: Iterable[JsonDict]) -> list[GroupOutcome]:
    """Groups by (split, task), in order; the first complete record of an episode counts, failures count nothing."""
    found: dict[tuple[str, int], dict[int, tuple[float, bool]]] = defaultdict(dict)
    last: dict[tuple[str, int], int] = defaultdict(lambda: -1)
    for record in records:
        job = record.get("job") or {}
        key = (str(job.get("split")), int(job["task_id"]))
        sample = int(job["sample_id"])
        last[key] = max(last[key], sample)
        final = record.get("final") or {}
        reward = number(final.get("reward"))
        if is_complete_row(record) and reward is not None:
            detail = final.get("reward_detail") or {}
            success = detail["r_success"] == 1 if "r_success" in detail else reward >= 1
            found[key].setdefault(sample, (reward, bool(success)))
    return [
        GroupOutcome(
            split,
            task,
            tuple(found[split, task][s][0] for s in sorted(found[split, task])),
            sum(ok for _, ok in found[split, task].values()),
            last[split, task] + 1,
        )
        for split, task in sorted(last)
    ]


def retry_jobs(groups: Iterable[GroupOutcome], *, experiment_seed: int) -> list[EpisodeJob]:
    """One job per all-wrong group, as a further sample of its task: no seed of the group is used twice."""
    return [
        EpisodeJob(
            task_id=g.task_id,
            sample_id=g.next_sample,
            seed=episode_seed(experiment_seed, g.task_id, g.next_sample),
            split=g.split,
        )
        for g in groups
        if g.all_wrong
    ]


def triage(groups: Iterable[GroupOutcome], retries: Iterable[GroupOutcome]) -> list[JsonDict]:
    """What each group needs; see the module docstring. Retries that never completed leave ``retry_missing``."""
    second = {(r.split, r.task_id): r for r in retries if r.rewards}
    out = []
    for g in groups:
        retry = second.get((g.split, g.task_id))
        verdict: Triage
        if not g.rewards:
            verdict = "incomplete"
        elif not g.all_wrong:
            verdict = "all_right" if g.successes == len(g.rewards) else "mixed"
        elif retry is None:
            verdict = "retry_missing"
        else:
            verdict = "internalisation_deficit" if retry.successes else "analyst"
        out.append(
            {
                "split": g.split,
                "task_id": g.task_id,
                "samples": len(g.rewards),
                "successes": g.successes,
                "class": verdict,
                "retry_reward": retry.rewards[0] if retry is not None else None,
            }
        )
    return out
