"""From estimated effects to a decision: multiplicity control, two selection rules, rewrite families, power.

Rules (both pure, both look at nothing but the fit):

* ``positive_top_k``: the largest positive coefficients, at most k. Simple, and says nothing about chance.
* ``lower_bound``: one-sided p values under Benjamini-Hochberg; a chunk is selected when its adjusted p is at most q,
  which is when its multiplicity-adjusted lower bound lies above 0.

Versions of one chunk (rewrites) are a family: at most one of them can be selected, the one with the largest
coefficient, and only it competes outside the family.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, stats

from rayrl.evaluation.paired import benjamini_hochberg
from rayrl.skills.estimators import Fit, FloatArray

FDR = 0.05
RULES = ("lower_bound", "positive_top_k")


@dataclass(frozen=True)
class Verdict:
    """What a rule says about one chunk. ``adjusted_p`` is one-sided for ``lower_bound``, else ``None``.

    Status: ``selected``, ``harmful`` (its effect is below 0 under the same control), ``undecided``, ``family_loser``,
    or ``beyond_budget`` (positive, but more than k others are larger).
    """

    name: str
    status: str
    rank: int
    adjusted_p: float | None


def _ranks(beta: FloatArray) -> list[int]:
    """1 for the largest coefficient; ties by position, so that ranks are a permutation."""
    order = np.argsort(-beta, kind="stable")
    ranks = np.empty(beta.size, dtype=int)
    ranks[order] = np.arange(1, beta.size + 1)
    return [int(r) for r in ranks]


def rank_correlation(a: FloatArray, b: FloatArray) -> float:
    """Spearman's correlation; 0 when one side is constant, because it then ranks nothing."""
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return 0.0
    return float(stats.spearmanr(a, b).statistic)


def decided_effects(effects: FloatArray, statuses: Sequence[str]) -> FloatArray:
    """Effects with 0 for every undecided chunk, so that all of them share one rank.

    Chunks that do nothing are ranked by noise alone, and no gate of any size can repeat that.
    """
    return np.where([s == "undecided" for s in statuses], 0.0, effects)


def family_winners(names: Sequence[str], beta: FloatArray, families: Mapping[str, str]) -> set[str]:
    """The member of every family with the largest coefficient; a chunk without family is its own."""
    best: dict[str, int] = {}
    for index, name in enumerate(names):
        family = families.get(name, name)
        if family not in best or beta[index] > beta[best[family]]:
            best[family] = index
    return {names[index] for index in best.values()}


def lower_bound(
    fit: Fit, *, q: float = FDR, budget: int | None = None, families: Mapping[str, str] | None = None
) -> list[Verdict]:
    """Select by BH-adjusted one-sided p values; see the module docstring.

    All members of a family enter the adjustment (choosing the largest of several is itself a selection); ``budget``
    keeps the largest selected ones.
    """
    up = benjamini_hochberg(list(fit.p_greater()))
    down = benjamini_hochberg(list(fit.p_less()))
    winners = family_winners(fit.names, fit.beta, families or {})
    ranks = _ranks(fit.beta)
    passing = sorted(r for r, n, p in zip(ranks, fit.names, up, strict=True) if p <= q and n in winners)
    limit = math.inf if budget is None or len(passing) <= budget else (passing[budget - 1] if budget else 0)
    out = []
    for name, rank, p_up, p_down in zip(fit.names, ranks, up, down, strict=True):
        if p_up <= q and name not in winners:
            status = "family_loser"
        elif p_up <= q:
            status = "selected" if rank <= limit else "beyond_budget"
        else:
            status = "harmful" if p_down <= q else "undecided"
        out.append(Verdict(name, status, rank, p_up))
    return out


def positive_top_k(fit: Fit, *, budget: int | None, families: Mapping[str, str] | None = None) -> list[Verdict]:
    """Select the largest positive coefficients, at most ``budget``; no test of any kind."""
    winners = family_winners(fit.names, fit.beta, families or {})
    ranks = _ranks(fit.beta)
    passing = sorted(r for r, n, b in zip(ranks, fit.names, fit.beta, strict=True) if b > 0 and n in winners)
    chosen = set(passing if budget is None else passing[:budget])
    out = []
    for name, rank, value in zip(fit.names, ranks, fit.beta, strict=True):
        if value <= 0:
            status = "undecided"
        elif name not in winners:
            status = "family_loser"
        else:
            status = "selected" if rank in chosen else "beyond_budget"
        out.append(Verdict(name, status, rank, None))
    return out


def adjusted_interval(fit: Fit, selected: int, *, q: float = FDR) -> tuple[FloatArray, FloatArray]:
    """Two-sided intervals that keep their coverage over the ``selected`` chunks (Benjamini and Yekutieli 2005).

    Their level is ``1 - 2 q R / m`` with R selected of m: the lower end of a chunk chosen by :func:`lower_bound` is
    above 0 exactly when its raw one-sided p is at most ``q R / m``.
    """
    m = len(fit.names)
    return fit.interval(1 - 2 * q * max(selected, 1) / m)


def power_of_effect(effect: float, se: float, df: int, *, alpha: float) -> float:
    """Power of the one-sided t test of level ``alpha`` for a coefficient with standard error ``se``."""
    if se <= 0:
        return 1.0 if effect > 0 else 0.0
    critical = float(stats.t.ppf(1 - alpha, df))
    value = float(stats.nct.sf(critical, df, effect / se))
    return value if math.isfinite(value) else float(stats.norm.sf(critical - effect / se))


def minimum_detectable(se: float, df: int, chunks: int, *, q: float = FDR, power: float = 0.8) -> float:
    """Smallest effect seen with probability ``power`` at the strictest level BH may ask for, ``q / chunks``.

    That is what a single helpful chunk among useless ones faces; with several helpful ones the true figure is smaller.
    """
    alpha = q / chunks
    high = 2 * se * (float(stats.norm.ppf(1 - alpha)) + float(stats.norm.ppf(power))) + 1e-12
    while power_of_effect(high, se, df, alpha=alpha) < power:
        high *= 2
    return float(optimize.brentq(lambda e: power_of_effect(e, se, df, alpha=alpha) - power, 0.0, high, xtol=1e-9))


def planned_se(*, tasks: int, repeats: int, chunks: int, inclusion: float, sd: float, design: str) -> float:
    """Standard error of an effect before the run, from the deviation ``sd`` of a difference inside a pair.

    ``independent`` (bare against masked): the inverse of ``p (1 - p) I + p^2 J`` has diagonal
    ``(1 - p^2 / (p (1 - p) + k p^2)) / (p (1 - p))``. ``complement`` (masked against its complement, fair masks):
    1. Tasks are taken as the only clusters, so it assumes that repeats are independent given the task's difference.
    """
    pairs = tasks * repeats
    if design == "complement":
        return sd / math.sqrt(pairs)
    spread, together = inclusion * (1 - inclusion), inclusion * inclusion
    diagonal = (1 - together / (spread + chunks * together)) / spread
    return sd * math.sqrt(diagonal / pairs)
