"""What a gate is before it starts: its config, its jobs, its masks, and the effect it could see. Plays nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import Field

from rayrl.config import Section, operational, resolve_resource
from rayrl.errors import ConfigError, UserError
from rayrl.schemas import EpisodeJob, JsonDict, episode_seed
from rayrl.settings import RunConfig
from rayrl.skills.bank import SkillBank, load_snapshot
from rayrl.skills.firewall import leaks
from rayrl.skills.gate import can_screen, check_plan
from rayrl.skills.providers import BankEntry, MaskedSkills
from rayrl.skills.rule import GateRule, Look, unit_order
from rayrl.skills.selection import minimum_detectable, planned_se
from rayrl.skills.validation import Assign
from rayrl.tasks import load_split_manifest, sample_task_ids


class GateConfig(Section):
    """One gate: a bank, a checkpoint, tasks, a rule."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,60}$")
    """Name of the gate; its runs are called after it."""
    run: str
    """Rollout config: model, environment, prompt, limits. Its tasks and skills are replaced."""
    overrides: list[str] = []
    """``section.key=value`` on the rollout config."""
    bank: str
    """Bank whose active skills are judged."""
    split: str
    """Split to validate on (role val)."""
    tasks: int | None = Field(None, ge=2)
    """Tasks drawn from it with the experiment seed; null = all."""
    confirm_split: str | None = None
    """Split whose tasks took no part in selection: bare against the selected bank. Null = no confirmation."""
    confirm_tasks: int | None = Field(None, ge=2)
    """Tasks of the confirmation; null = all."""
    mask_seed: int = 0
    """Seed of the random subsets."""
    rule: GateRule = GateRule()
    """How rollouts are spent and what is selected."""
    bare_run_dir: str | None = operational(None)
    """A finished run without skills to reuse: as the second arm (design ``bare``), else as a third one where it has the
    same jobs."""
    assumed_sd: float = Field(0.5, gt=0)
    """Deviation of a reward difference inside a pair, for the power figure before the run."""
    min_effect: float | None = Field(None, gt=0)
    """Refuse to start when the minimum detectable effect is larger than this."""
    ledger: str | None = operational(None)
    """File that collects every candidate ever judged; null = ``ledger.jsonl`` in the output directory."""


@dataclass(frozen=True)
class Plan:
    """All a gate is before it starts. ``rule`` is the config's, less looks that come before anything can be seen."""

    config: GateConfig
    rule: GateRule
    bank: SkillBank
    entries: list[BankEntry]
    task_ids: list[int]
    stages: list[list[EpisodeJob]]
    standard_error: float
    detectable: float

    def as_dict(self) -> JsonDict:
        """For people and programs."""
        return {
            "name": self.config.name,
            "chunks": len(self.entries),
            "tasks": len(self.task_ids),
            "pairs_per_stage": [len(s) for s in self.stages],
            "rollouts_at_most": 2 * sum(len(s) for s in self.stages),
            "planned_standard_error": self.standard_error,
            "minimum_detectable_effect": self.detectable,
            "assumed_sd": self.config.assumed_sd,
            "rule_sha256": self.config.rule.sha256(),
        }


def plan_gate(config: GateConfig, run: RunConfig, base: Path) -> Plan:
    """Work out a gate and refuse what cannot work, without playing anything.

    Raises:
        UserError: no checkpoint id, no skills, one that gives answers away, too few tasks, an effect that cannot be
            seen.
        DataError: masks that do not tell the chunks apart.
    """
    if run.model.checkpoint_id is None:
        raise ConfigError(
            "model.checkpoint_id is not set: a gate must know which weights it speaks about "
            "(add overrides: [model.checkpoint_id=...])"
        )
    bank = load_snapshot(resolve_resource(config.bank, base))
    entries = bank.active()
    if not entries:
        raise UserError(f"{config.bank}: the bank has no active skill to judge")
    for name, reasons in leaks({e.skill_id: e.content for e in entries}).items():
        # whoever wrote the bank: it would help for the wrong reason
        raise UserError(
            f"{config.bank}: skill {name!r} {reasons[0]}; `rayrl skills check` lists all of them. Edit or reject it "
            "(`rayrl skills review`), then gate the new snapshot"
        )
    manifest = load_split_manifest(resolve_resource(run.tasks.manifest, base))
    split = manifest.split(config.split)
    if split.role == "test":
        raise ConfigError(
            f"split: {config.split!r} has role test; a gate selects, so it may only see val or train tasks"
        )
    task_ids = sample_task_ids(split.task_ids, config.tasks, experiment_seed=run.experiment.seed)
    if config.confirm_split == config.split:
        raise ConfigError("confirm_split: the same tasks cannot select and confirm")
    units = unit_order(task_ids, config.rule.total_pairs(len(task_ids)), mask_seed=config.mask_seed)
    jobs = [
        EpisodeJob(task_id=t, sample_id=s, seed=episode_seed(run.experiment.seed, t, s), split=config.split)
        for t, s in units
    ]
    names, assigned = [e.skill_id for e in entries], assignments(config, entries, None)
    rule = config.rule
    while rule.spending[0] == 0 and not can_screen(jobs[: rule.stage_sizes(len(task_ids))[0]], assigned, names):
        rule = rule.later()
    stages, start = [], 0
    for size in rule.stage_sizes(len(task_ids)):
        stages.append(jobs[start : start + size])
        start += size
    check_plan(stages[0], assigned, names)
    se = planned_se(
        tasks=len(task_ids),
        repeats=1,
        chunks=len(entries),
        inclusion=config.rule.inclusion,
        sd=config.assumed_sd / sum(config.rule.stages) ** 0.5,
        design="complement" if config.rule.design == "complement" else "independent",
    )
    detectable = minimum_detectable(se, len(task_ids) - 1, len(entries), q=config.rule.fdr * config.rule.spending[-1])
    if config.min_effect is not None and detectable > config.min_effect:
        factor = (detectable / config.min_effect) ** 2
        raise UserError(
            f"this gate sees effects from {detectable:.3f} on (80 % power), but min_effect is {config.min_effect:g}; "
            f"it needs about {factor:.1f} times as many pairs (more tasks, or longer rule.stages)"
        )
    return Plan(config, rule, bank, entries, task_ids, stages, se, detectable)


def assignments(config: GateConfig, entries: list[BankEntry], look: Look | None) -> list[Assign]:
    """What the two arms of a stage inject, given the look before it (``None`` = the first stage)."""
    masked = partial(
        MaskedSkills,
        entries,
        mask_seed=config.mask_seed,
        inclusion=config.rule.inclusion,
        without=dropped(look),
    )
    if config.rule.design == "bare":
        return [masked().assigned, no_skills]
    return [masked().assigned, masked(flip=flipped(config, look)).assigned]


def flipped(config: GateConfig, look: Look | None) -> list[str]:
    """``skills.flip`` of the complement arm."""
    return ["*"] if look is None or not config.rule.narrow else sorted(look.open)


def dropped(look: Look | None) -> list[str]:
    """``skills.without`` of both arms: what was found harmful."""
    return [] if look is None else sorted(look.dropped)


def no_skills(job: EpisodeJob) -> list[BankEntry]:
    """The assignment of a bare arm."""
    return []
