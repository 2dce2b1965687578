"""A gate's evidence and report: from arms to contributions, pure.

``GateData`` collects blocks stage by stage; ``fit_metric`` estimates; ``contributions`` writes what readers need: every
effect with HC3, CR3 and bootstrap intervals, on every metric, with rank, status and power; how stable a refit would be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rayrl.schemas import EpisodeJob, JsonDict, sha256_hex
from rayrl.skills.design import Blocks, Design, contrast_design
from rayrl.skills.estimators import (
    Fit,
    FloatArray,
    bootstrap_draws,
    bootstrap_interval,
    check_rank,
    cluster_moments,
    fit_cluster,
    fit_hc3,
)
from rayrl.skills.providers import BankEntry
from rayrl.skills.rule import GateRule, Look, final_verdicts
from rayrl.skills.selection import adjusted_interval, minimum_detectable, rank_correlation
from rayrl.skills.validation import Arm, Assign, correlation_interval, pair_correlation, shared_metrics

LEVEL = 0.95
HALVES = 20
SCREEN_PAIRS = 4
"""Pairs per chunk from which a look may drop chunks and nothing else."""


@dataclass(frozen=True)
class Played:
    """One stage: the jobs, the arms in contrast order, and what each arm was assigned."""

    jobs: Sequence[EpisodeJob]
    arms: Sequence[Arm]
    assigned: Sequence[Assign]


@dataclass
class GateData:
    """Everything played so far. ``names`` are chunk ids in bank order."""

    names: list[str]
    stages: list[Played] = field(default_factory=list)

    def design(self, metric: str = "reward") -> Design:
        """Contrasts of all stages for one metric."""
        return contrast_design([self._blocks(stage, metric) for stage in self.stages])

    def _blocks(self, stage: Played, metric: str) -> Blocks:
        keys = [(job.task_id, job.sample_id) for job in stage.jobs]
        rewards = np.array([[arm.metrics[key][metric] for arm in stage.arms] for key in keys])
        masks = np.stack([mask_matrix(stage.jobs, a, self.names) for a in stage.assigned], axis=1)
        return Blocks(np.array([t for t, _ in keys]), rewards, masks)

    @property
    def pairs(self) -> int:
        """(task, sample) blocks so far."""
        return sum(len(stage.jobs) for stage in self.stages)

    def metrics(self) -> list[str]:
        """Metrics that can be fitted."""
        return shared_metrics([arm for stage in self.stages for arm in stage.arms])


def mask_matrix(jobs: Sequence[EpisodeJob], assigned: Assign, names: Sequence[str]) -> FloatArray:
    """0/1 matrix (jobs, chunks) of an assignment."""
    column = {name: i for i, name in enumerate(names)}
    out = np.zeros((len(jobs), len(names)))
    for row, job in enumerate(jobs):
        for entry in assigned(job):
            out[row, column[entry.skill_id]] = 1.0
    return out


def fit_metric(data: GateData, metric: str = "reward") -> Fit:
    """Effects on a metric with CR3 errors over tasks."""
    design = data.design(metric)
    return fit_cluster(design.x, design.y, design.tasks, data.names, weights=design.weights)


def check_plan(jobs: Sequence[EpisodeJob], assigned: Sequence[Assign], names: Sequence[str]) -> None:
    """Refuse a plan whose design cannot tell the chunks apart, before anything is played.

    Raises:
        DataError: names the chunks.
    """
    masks = np.stack([mask_matrix(jobs, a, names) for a in assigned], axis=1)
    empty = Blocks(np.array([j.task_id for j in jobs]), np.zeros(masks.shape[:2]), masks)
    check_rank(contrast_design([empty]).x, names)


def can_screen(jobs: Sequence[EpisodeJob], assigned: Sequence[Assign], names: Sequence[str]) -> bool:
    """Whether a first look at these jobs can tell the chunks apart, also with any one task left out.

    It asks for four pairs per chunk as well; with fewer the errors are too rough to act on.
    """
    if len(jobs) < SCREEN_PAIRS * len(names):
        return False
    masks = np.stack([mask_matrix(jobs, a, names) for a in assigned], axis=1)
    tasks = np.array([j.task_id for j in jobs])
    x = contrast_design([Blocks(tasks, np.zeros(masks.shape[:2]), masks)]).x
    grams, _ = cluster_moments(x, np.zeros(len(jobs)), tasks)
    return bool((np.linalg.cond(grams.sum(axis=0) - grams) < 1e12).all())


def contributions(
    data: GateData,
    rule: GateRule,
    look: Look,
    entries: Sequence[BankEntry],
    *,
    families: Mapping[str, str] | None = None,
    dropped_after: Mapping[str, int] | None = None,
) -> JsonDict:
    """The report of a finished gate; see the module docstring.

    ``dropped_after``: pairs after which a harmful chunk was dropped.
    """
    fit = fit_metric(data)
    verdicts = final_verdicts(rule, fit, look, families=families)
    chosen = [v.name for v in verdicts if v.status == "selected"]
    low, high = fit.interval(LEVEL)
    safe_low, safe_high = adjusted_interval(fit, len(chosen), q=rule.fdr)
    design = data.design()
    hc3 = fit_hc3(design.x, design.y, data.names, weights=design.weights)
    hc3_low, hc3_high = hc3.interval(LEVEL)
    draws = bootstrap_draws(design.x, design.y, design.tasks, weights=design.weights)
    boot_low, boot_high = bootstrap_interval(draws, LEVEL)
    rows = []
    for i, (entry, verdict) in enumerate(zip(entries, verdicts, strict=True)):
        rows.append(
            {
                "skill_id": entry.skill_id,
                "version": entry.version,
                "content_sha256": entry.skill().content_sha256,
                "family": (families or {}).get(entry.skill_id),
                "effect": float(fit.beta[i]),
                "standard_error": float(fit.se[i]),
                "interval": [float(low[i]), float(high[i])],
                "interval_hc3": [float(hc3_low[i]), float(hc3_high[i])],
                "interval_bootstrap": [float(boot_low[i]), float(boot_high[i])],
                "interval_adjusted": [float(safe_low[i]), float(safe_high[i])],
                "p_greater": float(fit.p_greater()[i]),
                "adjusted_p": verdict.adjusted_p,
                "rank": verdict.rank,
                "status": verdict.status,
                "dropped_after": (dropped_after or {}).get(entry.skill_id),
            }
        )
    return {
        "estimator": {
            "model": "differences inside blocks of equal task, sample and seed; least squares without intercept",
            "errors": "cr3 over tasks (hc3 and cluster bootstrap beside it)",
            "level": LEVEL,
        },
        "contributions": rows,
        "selected": [e.skill_id for e in entries if e.skill_id in set(chosen)],
        "metrics": metric_table(data),
        "pairs": data.pairs,
        "tasks": fit.clusters,
        "residual_sd": fit.residual_sd,
        "minimum_detectable_effect": minimum_detectable(
            float(np.median(fit.se)), fit.df, len(data.names), q=rule.fdr * rule.spending[look.index]
        ),
        "arms": arm_table(data),
        "stability": stability(data, fit),
        "tasks_table": task_table(data),
    }


def metric_table(data: GateData) -> dict[str, list[JsonDict]]:
    """Every effect on every metric, with cluster-robust and bootstrap intervals (no multiplicity control)."""
    table: dict[str, list[JsonDict]] = {}
    for metric in data.metrics():
        design = data.design(metric)
        fit = fit_cluster(design.x, design.y, design.tasks, data.names, weights=design.weights)
        low, high = fit.interval(LEVEL)
        draws = bootstrap_draws(design.x, design.y, design.tasks, weights=design.weights, resamples=1000)
        boot_low, boot_high = bootstrap_interval(draws, LEVEL)
        table[metric] = [
            {
                "skill_id": name,
                "effect": float(fit.beta[i]),
                "interval": [float(low[i]), float(high[i])],
                "interval_bootstrap": [float(boot_low[i]), float(boot_high[i])],
            }
            for i, name in enumerate(data.names)
        ]
    return table


def arm_table(data: GateData) -> list[JsonDict]:
    """Mean reward of the arms of each stage, and the correlation of the first two: what common seeds are worth.

    ``correlations`` has it for every metric, with a 95 % interval; a reward that is always the same has none.
    """
    out = []
    metrics = data.metrics()
    for index, stage in enumerate(data.stages):
        keys = [(job.task_id, job.sample_id) for job in stage.jobs]
        rewards = [[arm.reward(key) for key in keys] for arm in stage.arms]
        correlations: JsonDict = {}
        for metric in metrics:
            first, second = ([arm.metrics[key][metric] for key in keys] for arm in stage.arms[:2])
            value = pair_correlation(first, second)
            correlations[metric] = {"value": value, "interval": correlation_interval(value, len(keys))}
        out.append(
            {
                "stage": index,
                "pairs": len(keys),
                "mean_rewards": [float(np.mean(r)) for r in rewards],
                "correlation": correlations["reward"]["value"],
                "correlations": correlations,
                "sd_of_difference": float(np.std(np.subtract(rewards[0], rewards[1]), ddof=1)),
            }
        )
    return out


def stability(data: GateData, fit: Fit, *, halves: int = HALVES) -> JsonDict:
    """How a refit would rank the chunks.

    ``split_half``: mean Spearman of fits on two random halves of the tasks (a gate of half the size, so a pessimistic
    figure). ``refit``: mean Spearman of two refits simulated from the estimates shrunk by their reliability, with the
    estimated covariance: what to expect of a second gate of this size.
    """
    design = data.design()
    tasks = np.unique(design.tasks)
    found: list[float] = []
    for half in range(halves):
        order = sorted(tasks.tolist(), key=lambda t: sha256_hex(f"half:{half}:{t}"))
        first = np.isin(design.tasks, order[: len(order) // 2])
        betas: list[FloatArray] = []
        for side in (first, ~first):
            w = np.sqrt(design.weights[side]) if design.weights is not None else np.ones(int(side.sum()))
            x, y = design.x[side] * w[:, None], design.y[side] * w
            if np.linalg.matrix_rank(x) == x.shape[1]:
                betas.append(np.asarray(np.linalg.lstsq(x, y, rcond=None)[0], dtype=np.float64))
        if len(betas) == 2:
            found.append(rank_correlation(*betas))
    spread, noise = float(np.var(fit.beta)), float(np.mean(fit.se**2))
    reliability = max(0.0, 1 - noise / spread) if spread > 0 else 0.0
    centre = fit.beta.mean() + reliability * (fit.beta - fit.beta.mean())
    refits: list[float] = []
    if len(data.names) > 1:
        rng = np.random.default_rng(0)
        draws = rng.multivariate_normal(centre, fit.covariance, size=(200, 2), method="eigh")
        refits = [rank_correlation(a, b) for a, b in draws]
    return {
        "split_half_spearman": float(np.mean(found)) if found else None,
        "refit_spearman": float(np.mean(refits)) if refits else None,
        "reliability": reliability,
    }


def task_table(data: GateData) -> list[JsonDict]:
    """Per task: pairs played and the mean reward of the first and second arm."""
    rows: dict[int, list[tuple[float, float]]] = {}
    for stage in data.stages:
        for job in stage.jobs:
            key = (job.task_id, job.sample_id)
            rows.setdefault(job.task_id, []).append((stage.arms[0].reward(key), stage.arms[1].reward(key)))
    return [
        {
            "task_id": task,
            "pairs": len(values),
            "first": float(np.mean([a for a, _ in values])),
            "second": float(np.mean([b for _, b in values])),
        }
        for task, values in sorted(rows.items())
    ]
