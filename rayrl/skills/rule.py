"""The gate's rule as one frozen config, and the pure decisions it takes look by look.

A gate plays pairs of rollouts in stages. After each stage it looks: chunks whose one-sided p passes
Benjamini-Hochberg at that look's share of the false discovery rate are accepted for good; a chunk that has become
unlikely to pass at the last look is closed; when no chunk is open the gate stops early. The shares add up to the whole
rate, so the union over looks keeps it. A chunk that does harm by the same test (the rate is split evenly over the
looks) is dropped: later pairs are played without it, because it would hide what the others are worth. Early looks that
may accept nothing (share 0) are there for that alone. All pairs stay in the fit; a dropped chunk's column is 0 in later
ones.

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
from rayrl.evaluation.paired import benjamini_hochberg
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
    stages: list[float] = [0.25, 0.25, 0.5, 0.5, 0.5]
    """Pairs per task of each stage. ``[r]`` is a gate with r repeats and a single look."""
    spending: list[float] = [0.0, 0.0, 0.4, 0.3, 0.3]
    """Share of ``fdr`` spent at each look; adds up to 1. A look with share 0 only screens for harm."""
    drop_harmful: bool = True
    """Play later pairs without chunks that significantly do harm. False = keep them in to the end."""
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
        if self.spending[-1] == 0:
            raise ValueError("spending: the last look must be able to accept something")
        if self.design == "complement" and self.inclusion != 0.5:
            raise ValueError("the complement of a subset has the same distribution only with inclusion 0.5")
        return self

    def sha256(self) -> str:
        """Hash of the rule: what "frozen" means."""
        return sha256_hex(canonical_json(self.model_dump(mode="json")))

    def harm_rate(self, look: int) -> float:
        """False discovery rate of "does harm" at a look; over all looks it adds up to ``fdr``."""
        if self.drop_harmful:
            return self.fdr / len(self.stages)
        return self.fdr if look == len(self.stages) - 1 else 0.0

    def later(self) -> GateRule:
        """The same rule without its first look, whose pairs and share go to the second; itself when it has one look."""
        if len(self.stages) == 1:
            return self
        stages, spending = self.stages, self.spending
        merged = {
            "stages": [stages[0] + stages[1], *stages[2:]],
            "spending": [spending[0] + spending[1], *spending[2:]],
        }
        return self.model_copy(update=merged)

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


def screened(repeats: float) -> GateRule:
    """One look that accepts, after ``repeats`` (> .5) pairs per task, behind the default rule's two looks for harm."""
    return GateRule(stages=[0.25, 0.25, repeats - 0.5], spending=[0.0, 0.0, 1.0], futility=0.0)


SEED_RULE = GateRule(design="bare", select="positive_top_k", budget=10, stages=[1.0], spending=[1.0], futility=0.0)
"""The public project's rule: bare against masked, the ten largest positive coefficients."""
PLAIN_RULE = GateRule(design="bare", stages=[1.0], spending=[1.0], futility=0.0)
"""Bare against masked with the lower-bound rule, one look."""


@dataclass(frozen=True)
class Look:
    """State after a look. ``accepted``, ``open`` and ``harmful`` are chunk names; ``stop``: nothing is open.

    ``dropped`` are the harmful ones that a later stage is played without.
    """

    index: int
    accepted: frozenset[str]
    open: frozenset[str]
    stop: bool
    harmful: frozenset[str] = frozenset()
    dropped: frozenset[str] = frozenset()


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
    dropped = before.dropped if before else frozenset()
    # the budget applies at the end: a larger effect may still be found
    found = lower_bound(fit, q=rule.fdr * rule.spending[index], families=families)
    accepted |= {v.name for v in found if v.status == "selected" and v.name not in dropped}
    down = benjamini_hochberg(list(fit.p_less()))
    harmful = dropped | {n for n, p in zip(fit.names, down, strict=True) if p <= rule.harm_rate(index)} - accepted
    if last:
        return Look(index, frozenset(accepted), frozenset(), True, harmful, dropped)
    chance = chance_to_pass(rule, fit, len(accepted), done=done, total=total)
    closed = accepted | harmful
    open_ = frozenset(n for n, p in zip(fit.names, chance, strict=True) if n not in closed and p >= rule.futility)
    if rule.spending[index] == 0:
        open_ = frozenset(fit.names) - closed  # nothing was asked of them yet
    stop = not open_
    return Look(index, frozenset(accepted), open_, stop, harmful, dropped if stop else harmful)


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
    statuses = {v.name: "harmful" if v.name in look.harmful else "undecided" for v in found}
    pool = [(n, b) for n, b in zip(fit.names, fit.beta, strict=True) if n in look.accepted]
    winners = family_winners([n for n, _ in pool], np.array([b for _, b in pool]), families or {})
    by_size = [n for n, _ in sorted(pool, key=lambda item: -item[1]) if n in winners]
    chosen = set(by_size if rule.budget is None else by_size[: rule.budget])
    out = []
    for verdict in found:
        status = statuses[verdict.name]
        if verdict.name in look.accepted:
            status = (
                "selected" if verdict.name in chosen else "beyond_budget" if verdict.name in winners else "family_loser"
            )
        elif verdict.status == "family_loser":
            status = verdict.status
        out.append(Verdict(verdict.name, status, verdict.rank, verdict.adjusted_p))
    return out
