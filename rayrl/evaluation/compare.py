"""Paired comparison of two runs: honest denominators, deltas with intervals, one sentence.

Pairs are equal (split, task, sample) that are complete in both runs. Everything that cannot be paired is counted and
named: only in A, only in B, failed in one, failed in both. Differences are B - A.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rayrl.errors import DataError
from rayrl.evaluation.paired import (
    cluster_t_p,
    holm,
    mcnemar_exact,
    minimum_detectable_effect,
    paired_difference,
    wilcoxon,
)
from rayrl.evaluation.statistics import LEVEL, is_proportion
from rayrl.evaluation.summary import COUNTS, Rows, as_table, results, score_columns, task_keys

COMPARISON_SCHEMA = "rayrl-comparison-v1"
BEHAVIOUR = (*COUNTS, "prompt_tokens", "completion_tokens", "duration_s")
LOWER_IS_BETTER = frozenset(BEHAVIOUR)
EQUAL_WITHIN = 0.05
"""Where no pair differs, two runs are called equal only if at most this share of all pairs could differ."""
Key = tuple[str, int, int]
FloatArray = npt.NDArray[np.float64]


class _Side:
    """The results of one run, addressable by (split, task, sample)."""

    def __init__(self, rows: Rows, label: str) -> None:
        self.table, _, self.counts = results(as_table(rows))
        if len(set(self.table["run"].to_pylist())) > 1:
            raise DataError(f"{label}: rows of several runs; compare one run at a time")
        splits = [s or "" for s in self.table["split"].to_pylist()]
        keys: list[Key] = list(
            zip(splits, self.table["task_id"].to_pylist(), self.table["sample_id"].to_pylist(), strict=True)
        )
        self.index = {key: n for n, key in enumerate(keys)}
        complete = self.table["complete"].to_pylist()
        self.complete = {key for key, done in zip(keys, complete, strict=True) if done}

    def take(self, keys: list[Key]) -> pa.Table:
        return self.table.take(pa.array([self.index[key] for key in keys], type=pa.int64()))


def _columns(table: pa.Table) -> dict[str, FloatArray]:
    out = score_columns(table)
    for name in BEHAVIOUR:
        out[name] = np.asarray(table[name].cast(pa.float64()).to_numpy(zero_copy_only=False), dtype=np.float64)
    return out


def _metric(x: FloatArray, y: FloatArray, clusters: npt.NDArray[np.int64], level: float) -> dict[str, Any]:
    both = np.isfinite(x) & np.isfinite(y)
    a, b, keys = x[both], y[both], clusters[both]
    found = paired_difference(a, b, keys, level=level)
    differences = b - a
    out: dict[str, Any] = {**found.as_dict(), "missing_pairs": int((~both).sum()), "p": cluster_t_p(a, b, keys)}
    unique, inverse = np.unique(keys, return_inverse=True)
    if unique.size:
        per_task = np.bincount(inverse, weights=differences) / np.bincount(inverse)
        out["wilcoxon_p"] = wilcoxon(per_task)
        if unique.size > 2 and np.std(per_task, ddof=1) > 0:
            out["minimum_detectable_effect"] = minimum_detectable_effect(
                float(np.std(per_task, ddof=1)), int(unique.size), alpha=1 - level
            )
    if a.size and is_proportion(a) and is_proportion(b):
        won, lost = int(((a == 0) & (b == 1)).sum()), int(((a == 1) & (b == 0)).sum())
        out["mcnemar_p"] = mcnemar_exact(lost, won)
        if unique.size == a.size:  # independent pairs: the exact test is the right one
            out["p"] = out["mcnemar_p"]
    return out


def _transitions(success_a: FloatArray, success_b: FloatArray, keys: list[Key]) -> dict[str, Any]:
    groups: dict[str, list[Key]] = {"won": [], "lost": [], "both": [], "neither": []}
    for a, b, key in zip(success_a.tolist(), success_b.tolist(), keys, strict=True):
        if np.isfinite(a) and np.isfinite(b):
            name = ("neither", "won", "lost", "both")[int(b == 1) + 2 * int(a == 1)]
            groups[name].append(key)
    return {
        name: {"n": len(found), "examples": [f"{s or '-'}/task-{t:06d}__sample-{k:03d}" for s, t, k in found[:10]]}
        for name, found in groups.items()
    }


def _by_category(
    left: pa.Table, a: FloatArray, b: FloatArray, clusters: npt.NDArray[np.int64], by: str, level: float
) -> dict[str, Any]:
    if left[by].null_count == left.num_rows:
        return {}
    labels = np.array(["(none)" if v is None else str(v) for v in left[by].to_pylist()], dtype=object)
    out = {}
    for label in sorted(set(labels.tolist())):
        rows = (labels == label) & np.isfinite(a) & np.isfinite(b)
        if rows.any():
            found = paired_difference(a[rows], b[rows], clusters[rows], level=level)
            p = cluster_t_p(a[rows], b[rows], clusters[rows].tolist())
            out[label] = {**found.as_dict(), "p": p}
    for item, adjusted in zip(out.values(), holm([v["p"] for v in out.values()]), strict=True):
        item["p_holm"] = adjusted
    return out


def sentence(name_a: str, name_b: str, metric: str, item: dict[str, Any], pairs: int, tasks: int, level: float) -> str:
    """The answer in one sentence, with its uncertainty."""
    difference = item["difference"]
    if pairs == 0 or difference["mean"] is None:
        return f"Nothing can be said: no episode is complete in both {name_a} and {name_b} with {metric}."
    values = f"{item['mean_b']:.3f} against {item['mean_a']:.3f}"
    scope = f"over {pairs} pairs of {tasks} tasks"
    if difference["low"] is None:
        return f"{name_b} scores {values} on {metric} {scope}; one task says nothing about a difference."
    span = f"{difference['mean']:+.3f}, {level:.0%} interval [{difference['low']:+.3f}, {difference['high']:+.3f}]"
    if difference["low"] > 0 or difference["high"] < 0:
        better = (difference["mean"] > 0) != (metric in LOWER_IS_BETTER)
        return f"{name_b} is {'better' if better else 'worse'} than {name_a} on {metric}: {values} ({span}) {scope}."
    share, _, upper = item["discordant"]
    if share == 0 and upper > EQUAL_WITHIN:
        return (
            f"{name_a} and {name_b} cannot be told apart on {metric}: too few pairs. All {pairs} pairs of {tasks} "
            f"tasks are equal, but up to {upper:.1%} of pairs may differ ({level:.0%} bound)."
        )
    if share == 0:
        return (
            f"No difference between {name_a} and {name_b} on {metric}: all {pairs} pairs of {tasks} tasks are equal "
            f"(at most {upper:.1%} of pairs differ, {level:.0%} bound)."
        )
    mde = item.get("minimum_detectable_effect")
    seen = f"; differences below {mde:.3f} would mostly go unseen" if mde is not None else ""
    return f"No clear difference between {name_a} and {name_b} on {metric}: {values} ({span}) {scope}{seen}."


def compare_rows(
    rows_a: Rows,
    rows_b: Rows,
    *,
    name_a: str = "A",
    name_b: str = "B",
    metric: str = "reward",
    by: str = "category",
    level: float = LEVEL,
) -> dict[str, Any]:
    """Compare run B with run A, paired by (split, task, sample).

    Args:
        rows_a: episode rows of one run (all attempts or results).
        rows_b: likewise.
        name_a: how to call it.
        name_b: how to call it.
        metric: the primary metric, the one the sentence is about.
        by: the row column that categories are taken from (of run A; pairs share the task).
        level: confidence level.

    Raises:
        DataError: rows of several runs on one side, or an unknown metric.
    """
    a, b = _Side(rows_a, name_a), _Side(rows_b, name_b)
    if by not in a.table.schema.names:
        raise DataError(f"--by {by}: not a column of the episode rows")
    shared = sorted(a.index.keys() & b.index.keys())
    pairs = sorted(a.complete & b.complete)
    left, right = a.take(pairs), b.take(pairs)
    clusters = task_keys(left)
    columns_a, columns_b = _columns(left), _columns(right)
    names = [name for name in columns_a if name in columns_b]
    if pairs and metric not in names:
        raise DataError(f"metric {metric!r} is not in both runs; there are: {', '.join(names)}")
    metrics = {name: _metric(columns_a[name], columns_b[name], clusters, level) for name in names}
    for item, adjusted in zip(metrics.values(), holm([m["p"] for m in metrics.values()]), strict=True):
        item["p_holm"] = adjusted
    tasks = int(np.unique(clusters).size)
    result: dict[str, Any] = {
        "schema": COMPARISON_SCHEMA,
        "a": name_a,
        "b": name_b,
        "level": level,
        "metric": metric,
        "pairing": {
            "pairs": len(pairs),
            "tasks": tasks,
            "only_in_a": len(a.index) - len(shared),
            "only_in_b": len(b.index) - len(shared),
            "failed_only_in_a": len([k for k in shared if k not in a.complete and k in b.complete]),
            "failed_only_in_b": len([k for k in shared if k in a.complete and k not in b.complete]),
            "failed_in_both": len([k for k in shared if k not in a.complete and k not in b.complete]),
            "duplicates_in_a": a.counts["duplicates"],
            "duplicates_in_b": b.counts["duplicates"],
        },
        "metrics": metrics,
        "transitions": {},
        "by_category": {},
        "by": by,
    }
    if pairs:
        if "r_success" in names:
            result["transitions"] = _transitions(columns_a["r_success"], columns_b["r_success"], pairs)
        result["by_category"] = _by_category(left, columns_a[metric], columns_b[metric], clusters, by, level)
        result["sentence"] = sentence(name_a, name_b, metric, metrics[metric], len(pairs), tasks, level)
    else:
        result["sentence"] = sentence(name_a, name_b, metric, {"difference": {"mean": None}}, 0, 0, level)
    return result
