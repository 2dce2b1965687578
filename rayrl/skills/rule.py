"""The gate's rule as one frozen config, and the pure decisions it takes look by look.

A gate plays pairs of rollouts in stages. After each stage it looks: chunks whose one-sided p passes
Benjamini-Hochberg at that look's share of the false discovery rate are accepted for good; a chunk that has become
unlikely to pass at the last look is closed; when no chunk is open the gate stops early. The shares add up to the whole
rate, so the union over looks keeps it.

Invariant: nothing here draws random numbers or reads files. The simulator and the real gate call the same functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import Field, model_validator
from scipy import stats

from rayrl.config import Section
from rayrl.schemas import canonical_json, sha256_hex
from rayrl.skills.estimators import Fit
from rayrl.skills.selection import FDR, Verdict, family_winners, lower_bound, positive_top_k


class GateRule(Section):
    """How a gate spends rollouts and decides."""

    design: Literal["complement", "bare"] = "complement"
    """What a masked run is paired with: the same jobs with the complementary subset, or without any skill."""
    select: Literal["lower_bound", "positive_top_k"] = "lower_bound"
    """``lower_bound`` = one-sided Benjamini-Hochberg; ``positive_top_k`` = the largest positive coefficients."""
    fdr: float = Field(FDR, gt=0, lt=0.5)
    """False discovery rate of ``lower_bound``."""
    budget: int | None = Field(None, ge=1)
    """Most skills to select; null = as many as pass."""
    stages: list[float] = [1.0, 0.5, 0.5]
    """Pairs per task of each stage. ``[r]`` is a gate with r repeats and a single look."""
    spending: list[float] = [0.4, 0.3, 0.3]
    """Share of ``fdr`` spent at each look; adds up to 1."""
    futility: float = Field(0.1, ge=0, lt=1)
    """A chunk is closed when its chance to pass at the last look, given the data so far, is below this. 0 = never."""
    narrow: bool = False
    """In later stages vary only the chunks that are still open (the others keep the same bit in both arms)."""
    inclusion: float = Field(0.5, gt=0, lt=1)
    """Probability that a chunk is in a masked run; one half with ``complement``."""

    @model_validator(mode="after")
    def _consistent(self) -> GateRule:
        if not self.stages or any(not s > 0 for s in self.stages):
            raise ValueError("stages must be positive numbers of pairs per task")
        if len(self.spending) != len(self.stages) or any(s < 0 for s in self.spending):
            raise ValueError(f"spending needs one share per stage, {len(self.stages)} of them")
        if abs(sum(self.spending) - 1) > 1e-9:
            raise ValueError(f"spending adds up to {sum(self.spending):g}, not to 1")
        if self.design == "complement" and self.inclusion != 0.5:
            raise ValueError("the complement of a subset has the same distribution only with inclusion 0.5")
        return self

    def sha256(self) -> str:
        """Hash of the rule: what "frozen" means."""
        return sha256_hex(canonical_json(self.model_dump(mode="json")))

    def total_pairs(self, tasks: int) -> int:
        """Pairs of all stages."""
        return sum(self.stage_sizes(tasks))

    def stage_sizes(self, tasks: int) -> list[int]:
        """Pairs of each stage for a number of tasks."""
        ends = np.rint(np.cumsum(self.stages) * tasks).astype(int)
        return [int(b - a) for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def single(repeats: float, *, rule: GateRule | None = None) -> GateRule:
    """The same rule with all its pairs in one stage of ``repeats`` pairs per task."""
    return (rule or GateRule()).model_copy(update={"stages": [float(repeats)], "spending": [1.0]})


SEED_RULE = GateRule(design="bare", select="positive_top_k", budget=10, stages=[1.0], spending=[1.0], futility=0.0)
"""The public project's rule: bare against masked, the ten largest positive coefficients."""
PLAIN_RULE = GateRule(design="bare", stages=[1.0], spending=[1.0], futility=0.0)
"""Bare against masked with the lower-bound rule, one look."""


@dataclass(frozen=True)
class Look:
    """State after a look. ``accepted`` and ``open`` are chunk names; ``stop`` says that nothing is open."""

    index: int
    accepted: frozenset[str]
    open: frozenset[str]
    stop: bool


def unit_order(task_ids: Sequence[int], pairs: int, *, mask_seed: int) -> list[tuple[int, int]]:
    """The first ``pairs`` (task, sample) units: every task once before any task twice, in hashed order.

    Depends on the tasks and the mask seed alone, so a stage is the same set whoever asks.
    """
    ordered = sorted(task_ids, key=lambda t: sha256_hex(f"unit:{mask_seed}:{t}"))
    rounds = -(-pairs // max(1, len(ordered)))
    return [(task, sample) for sample in range(rounds) for task in ordered][:pairs]


def take_look(
    rule: GateRule,
    index: int,
    fit: Fit,
    before: Look | None,
    *,
    done: int,
    total: int,
    families: Mapping[str, str] | None = None,
) -> Look:
    """Decide after stage ``index`` from a fit on everything so far (``done`` of ``total`` pairs)."""
    accepted = set(before.accepted if before else ())
    last = index == len(rule.stages) - 1
    if rule.select == "positive_top_k":
        if last:
            found = positive_top_k(fit, budget=rule.budget, families=families)
            accepted = {v.name for v in found if v.status == "selected"}
        return Look(index, frozenset(accepted), frozenset(() if last else fit.names), last)
    # the budget applies at the end: a larger effect may still be found
    found = lower_bound(fit, q=rule.fdr * rule.spending[index], families=families)
    accepted |= {v.name for v in found if v.status == "selected"}
    if last:
        return Look(index, frozenset(accepted), frozenset(), True)
    chance = chance_to_pass(rule, fit, len(accepted), done=done, total=total)
    open_ = {name for name, p in zip(fit.names, chance, strict=True) if name not in accepted and p >= rule.futility}
    return Look(index, frozenset(accepted), frozenset(open_), not open_)


def chance_to_pass(rule: GateRule, fit: Fit, accepted: int, *, done: int, total: int) -> list[float]:
    """Predictive probability that each chunk passes at the last look, given its estimate now.

    With a flat prior the final estimate is normal around the present one with variance ``se_now^2 - se_end^2``. The
    critical value is the one of BH when one more than the accepted chunks pass.
    """
    m = len(fit.names)
    alpha = rule.fdr * rule.spending[-1] * min(accepted + 1, m) / m
    critical = float(stats.norm.isf(alpha))
    end = fit.se * np.sqrt(done / total)
    spread = np.sqrt(np.maximum(fit.se**2 - end**2, 1e-18))
    return [float(p) for p in stats.norm.sf((critical * end - fit.beta) / spread)]


def final_verdicts(rule: GateRule, fit: Fit, look: Look, *, families: Mapping[str, str] | None = None) -> list[Verdict]:
    """Status of every chunk at the end, with what earlier looks accepted, family winners and the budget applied."""
    if rule.select == "positive_top_k":
        return positive_top_k(fit, budget=rule.budget, families=families)
    found = lower_bound(fit, q=rule.fdr * rule.spending[look.index], families=families)
    pool = [(n, b) for n, b in zip(fit.names, fit.beta, strict=True) if n in look.accepted]
    winners = family_winners([n for n, _ in pool], np.array([b for _, b in pool]), families or {})
    by_size = [n for n, _ in sorted(pool, key=lambda item: -item[1]) if n in winners]
    chosen = set(by_size if rule.budget is None else by_size[: rule.budget])
    out = []
    for verdict in found:
        status = verdict.status
        if verdict.name in look.accepted:
            status = (
                "selected" if verdict.name in chosen else "beyond_budget" if verdict.name in winners else "family_loser"
            )
        elif status == "selected":
            status = "undecided"
        out.append(Verdict(verdict.name, status, verdict.rank, verdict.adjusted_p))
    return out
