"""Is what the selector leaves out really of no use? Confirmed by rollouts, on tasks that it was not trained on.

The trained selector is an optimum of a fitted model, and whoever optimises meets the model's luckiest errors. So "all
chunks" and the selector are played on the same jobs with the same seeds; when the paired difference excludes losses
larger than the margin, the selector is served as it is. Otherwise chunks are dropped one by one, each drop confirmed
(:mod:`rayrl.skills.pruning`), and the policy clones the set that is left, in the last resort all of it.

Each evaluation is an ordinary run named by its contents: a process that was killed finds the finished ones again.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
from pydantic import Field

from jobs.skill_runs import SkillRuns
from jobs.train_selector import SelectorData, complete_results, public_task
from jobs.validate_skills import assigned_entries, selected_bank
from learners.selector import TrainedSelector, clone_set
from rayrl.config import Section
from rayrl.evaluation.statistics import mean_estimate
from rayrl.retrieval.policy import RetrievalPolicy
from rayrl.schemas import EpisodeJob, JsonDict
from rayrl.skills.bank import save_bank
from rayrl.skills.estimators import FloatArray
from rayrl.skills.outcome_model import OutcomeModel
from rayrl.skills.providers import BankEntry
from rayrl.skills.pruning import Kept, Pruned, SetDifference, prune
from rayrl.skills.selector import question, similarities, task_features
from rayrl.skills.validation import Arm, Assign, read_arm


class SelectorCheck(Section):
    """How what a selector drops is confirmed."""

    split: str | None = None
    """Tasks it is confirmed on, neither the gate's nor the unseen ones; null = the gate's ``confirm_split``."""
    tasks: int | None = Field(None, ge=2)
    """How many of them; null = all."""
    margin: float = Field(0.01, ge=0)
    """Loss of reward against all chunks that the 95 % interval may not reach beyond."""
    hidden_loss: float = Field(0.02, gt=0, lt=1)
    """A set that loses on this share of all tasks may look lossless with 2.5 % probability at most; too few tasks for
    that are refused."""
    tries: int | None = Field(None, ge=0)
    """Chunks that are tried one by one at most; null = every chunk once."""


class Confirmation:
    """The evaluations of one selector on one list of jobs. ``folder`` keeps the banks that are tried."""

    def __init__(self, made: SelectorData, jobs: list[EpisodeJob], name: str, folder: Path, runs: SkillRuns) -> None:
        self._made = made
        self._jobs = jobs
        self._name = name
        self._folder = folder
        self._runs = runs
        self._ids = [e.skill_id for e in made.bank.active()]
        self.runs = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._sets: dict[Kept, Arm] = {}
        self._all = self._played(frozenset(range(len(self._ids))), "all")

    def run(self, trained: TrainedSelector, candidate: Path, out: Path, check: SelectorCheck) -> JsonDict:
        """Confirm the selector in ``candidate`` or make the confirmed one; ``out`` gets it. Returns the facts."""
        kind = "rayrl.skills.selector:LearnedSkills"
        options = {"folder": str(candidate.resolve())}
        first = self._difference(self._play("trained", {"kind": kind, "path": None, "options": options}), self._all)
        facts: JsonDict = {"margin": check.margin, "tasks": len({j.task_id for j in self._jobs}), "trained": first}
        policy = trained.policy
        if SetDifference(first["mean"], first["low"], first["high"]).within(check.margin):
            facts |= {"served": "trained"}
        else:
            pruned = self._prune(trained.model, check)
            facts |= self._pruned_facts(pruned)
            policy = self._clone(pruned.kept)
        facts["rollouts"] = self.runs * len(self._jobs)
        found = {**trained.facts, "confirmation": facts}
        return {**found, "policy_checksum": self._made.save(out, policy, found)}

    def _prune(self, model: OutcomeModel, check: SelectorCheck) -> Pruned:
        features = self._made.pairs.data.features

        def compare(kept: Kept, other: Kept) -> SetDifference:
            found = self._difference(self._played(kept), self._played(other))
            return SetDifference(found["mean"], found["low"], found["high"])

        return prune(
            len(self._ids),
            lambda kept, chunk: model.expected_loss(features, self._mask(kept), chunk),
            compare,
            margin=check.margin,
            tries=check.tries,
        )

    def _pruned_facts(self, pruned: Pruned) -> JsonDict:
        tries = [{**asdict(t), "chunk": self._ids[t.chunk]} for t in pruned.tries]
        kept = [self._ids[j] for j in sorted(pruned.kept)]
        return {"served": "all" if len(kept) == len(self._ids) else "pruned", "kept": kept, "tries": tries}

    def _clone(self, kept: Kept) -> RetrievalPolicy:
        """A policy that takes this set on the gate's tasks and on those it was confirmed on."""
        made = self._made
        played = sorted(complete_results(self._all.run_dir), key=lambda item: item[0])  # same order, same weights
        public = [public_task(record) for _, record in played]
        features = np.array([task_features(*task) for task in public])
        nearness = similarities(made.encoder, made.bank.active(), [question(*task) for task in public])
        return clone_set(
            np.concatenate([made.pairs.data.features, features]),
            np.concatenate([made.nearness, nearness]),
            made.tokens,
            self._mask(kept),
            made.config,
        )

    def _mask(self, kept: Kept) -> FloatArray:
        mask = np.zeros(len(self._ids))
        mask[sorted(kept)] = 1.0
        return mask

    def _played(self, kept: Kept, label: str = "drop") -> Arm:
        """Outcomes under this set, played (or found) once."""
        if kept not in self._sets:
            skills: JsonDict = {"kind": "none", "path": None}
            entries: list[BankEntry] = []
            if kept:
                bank = selected_bank(self._made.bank, {self._ids[j] for j in kept}, {}, None, self._name)
                path = self._folder / f"{bank.sha256[:16]}.snapshot.json"
                path.unlink(missing_ok=True)
                save_bank(bank, path)
                skills, entries = {"kind": "bank", "path": str(path.resolve())}, bank.active()
            self._sets[kept] = self._play(label, skills, partial(assigned_entries, entries))
        return self._sets[kept]

    def _play(self, label: str, skills: JsonDict, assigned: Assign | None = None) -> Arm:
        tasks = {"split": self._jobs[0].split, "sample_size": None, "repeats": 1}
        experiment = self._runs.marked(f"{self._name}-check-{label}", {"tasks": tasks, "skills": skills}, self._jobs)
        arm = read_arm(self._runs.run(experiment), self._jobs, assigned)
        self.runs += 1
        return arm

    def _difference(self, arm: Arm, other: Arm) -> JsonDict:
        """Paired difference of rewards, ``arm`` minus ``other``: one kind of interval, whatever the rewards are."""
        keys = [(j.task_id, j.sample_id) for j in self._jobs]
        differences = [arm.reward(k) - other.reward(k) for k in keys]
        found = mean_estimate(differences, [t for t, _ in keys])
        return {**asdict(found), "differing": sum(d != 0 for d in differences)}
