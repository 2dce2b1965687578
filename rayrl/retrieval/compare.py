"""From per-row results of a cross-fit to claims with intervals.

Each question is tested once per memory draw as class A and once as near B, far questions once per draw and half. Draws
(and with them training seeds) are averaged first, per question and class; the question is then the unit. Intervals are
percentile bootstraps over questions, and over categories; both resample A and near-B results of a question together.
The balanced return is half A, a quarter near B, a quarter far B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from rayrl.evaluation.paired import holm, mcnemar_exact, minimum_detectable_effect, wilcoxon
from rayrl.evaluation.statistics import wilson
from rayrl.retrieval.pools import CLASS_WEIGHTS, Kind

Doubles = NDArray[np.float64]
BALANCED = np.array(CLASS_WEIGHTS)
HARD = np.array([0.5, 0.5, 0.0])
RESAMPLES = 5_000


@dataclass(frozen=True)
class Results:
    """All folds of one split, stacked. ``fields[method][field]`` and the others are ``[N]``."""

    question: NDArray[np.int64]
    kind: NDArray[np.int64]
    draw: NDArray[np.int64]
    oracle: Doubles
    gate_probability: Doubles
    logistic_probability: Doubles
    fields: dict[str, dict[str, Doubles]]


def load_results(folder: Path, split: str) -> Results:
    """Read ``fits/<split>-*.npz``.

    Methods that were fitted on some draws only hold NaN elsewhere.
    """
    question, kind, draw, oracle, gate, logistic = [], [], [], [], [], []
    parts: list[dict[str, Doubles]] = []
    for path in sorted((folder / "fits").glob(f"{split}-d*.npz")):
        with np.load(path) as data:
            arrays = {k: data[k] for k in data.files}
        question.append(arrays["question"])
        kind.append(arrays["kind"])
        draw.append(np.full(len(arrays["kind"]), int(path.stem.split("-d")[1].split("h")[0])))
        oracle.append(arrays["oracle"])
        gate.append(arrays["gate_probability"])
        logistic.append(arrays["logistic_probability"])
        parts.append({k: v.astype(np.float64) for k, v in arrays.items() if "/" in k})
    names = sorted({k for p in parts for k in p})
    lengths = [len(k) for k in kind]
    fields: dict[str, dict[str, Doubles]] = {}
    for name in names:
        method, _, field = name.partition("/")
        columns = [p.get(name, np.full(n, np.nan)) for p, n in zip(parts, lengths, strict=True)]
        fields.setdefault(method, {})[field] = np.concatenate(columns)
    return Results(
        np.concatenate(question),
        np.concatenate(kind),
        np.concatenate(draw),
        np.concatenate(oracle).astype(np.float64),
        np.concatenate(gate).astype(np.float64),
        np.concatenate(logistic).astype(np.float64),
        fields,
    )


@dataclass(frozen=True)
class Units:
    """Per-question means of one quantity: ``[Q, 3]`` by class, NaN where a question has no such class."""

    values: Doubles
    category: NDArray[np.str_]


def per_question(results: Results, values: Doubles, categories: Sequence[str]) -> Units:
    """Average over draws, per question and class. ``categories`` are those of all questions, by number."""
    n = len(categories)
    out = np.full((n, 3), np.nan)
    known = np.isfinite(values)
    for k in range(3):
        members = known & (results.kind == k)
        total = np.bincount(results.question[members], weights=values[members], minlength=n)
        count = np.bincount(results.question[members], minlength=n)
        out[:, k] = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return Units(out, np.array(categories))


def weighted(units: Doubles, weights: Doubles = BALANCED) -> float:
    """Balanced mean of ``[Q, 3]`` per-question values."""
    used = weights > 0
    return float((np.nanmean(units[:, used], axis=0) * weights[used]).sum())


def bootstrap(units: Units, *, by: str, weights: Doubles = BALANCED, resamples: int = RESAMPLES) -> tuple[float, float]:
    """95 % percentile interval of the balanced mean, resampling questions or categories.

    Trivia questions share one category name; they are resampled one by one in both cases, as a stratum of their own.
    """
    near = np.isfinite(units.values[:, :2]).any(1)
    rng = np.random.default_rng(20_240_917)
    keys = units.category if by == "category" else np.arange(len(units.category)).astype(str)
    means = np.zeros(resamples)
    for stratum, columns in ((near, [0, 1]), (~near, [2])):
        _, inverse = np.unique(keys[stratum], return_inverse=True)
        if by == "category" and columns == [2]:
            inverse = np.arange(int(stratum.sum()))
        groups = int(inverse.max()) + 1 if inverse.size else 0
        picks = rng.multinomial(groups, np.full(groups, 1 / groups), size=resamples).astype(np.float64)
        for column in columns:
            x = units.values[stratum, column]
            ok = np.isfinite(x)
            sums = np.bincount(inverse[ok], weights=x[ok], minlength=groups)
            counts = np.bincount(inverse[ok], minlength=groups).astype(np.float64)
            if weights[column]:
                means += weights[column] * (picks @ sums) / np.maximum(picks @ counts, 1e-9)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def summarise(results: Results, categories: Sequence[str]) -> dict[str, Any]:
    """Figures of every method: returns by class with intervals, rates."""
    out: dict[str, Any] = {}
    for method, fields in results.fields.items():
        units = per_question(results, fields["returns"], categories)
        out[method] = {
            "balanced": weighted(units.values),
            "balanced_interval": bootstrap(units, by="question"),
            "hard": weighted(units.values, HARD),
            **_by_class(results, fields),
        }
    units = per_question(results, results.oracle, categories)
    out["oracle"] = {
        "balanced": weighted(units.values),
        "hard": weighted(units.values, HARD),
        **{f"return_{n}": float(np.nanmean(units.values[:, k])) for k, n in enumerate(("a", "near_b", "far_b"))},
    }
    return out


def _by_class(results: Results, fields: Mapping[str, Doubles]) -> dict[str, Any]:
    known = np.isfinite(fields["returns"])
    out: dict[str, Any] = {"rows": int(known.sum())}
    for k, name in ((Kind.A, "a"), (Kind.NEAR_B, "near_b"), (Kind.FAR_B, "far_b")):
        m = known & (results.kind == int(k))
        if not m.any():
            continue
        x = fields["returns"][m]
        out[f"return_{name}"] = float(x.mean())
        retrieved = int((fields["retrievals"][m] > 0).sum())
        out[f"retrieval_rate_{name}"] = retrieved / int(m.sum())
        questions = len(np.unique(results.question[m]))
        out[f"retrieval_rate_{name}_interval"] = wilson(retrieved / m.sum() * questions, questions)
        out[f"right_rate_{name}"] = float(fields["right"][m].mean())
    a = known & (results.kind == int(Kind.A))
    out["hit_rate"] = float((fields["hit"][a] >= 1).mean())
    out["clean_rate"] = float(((fields["hit"][a] >= 1) & (fields["distractor"][a] == 0)).mean())
    out["steps"] = float(fields["steps"][known].mean())
    saw = known & (fields["saw_distractor"] > 0)
    out["forget_rate_given_distractor"] = float((fields["forgets"][saw] > 0).mean()) if saw.any() else None
    out["blocked"] = int((fields["block"][known] > 0).sum())
    return out


def compare(results: Results, categories: Sequence[str], a: str, b: str) -> dict[str, Any]:
    """Paired comparison ``a - b`` of balanced returns and right decisions."""
    x = per_question(results, results.fields[a]["returns"], categories)
    y = per_question(results, results.fields[b]["returns"], categories)
    difference = Units(x.values - y.values, x.category)
    flat = difference.values[np.isfinite(difference.values)]
    n = int(np.isfinite(difference.values[:, 0]).sum())
    low, high = bootstrap(difference, by="question")
    category = bootstrap(difference, by="category")
    only_a, only_b = discordant(results, categories, a, b)
    sd = _contribution_sd(difference)
    return {
        "a": a,
        "b": b,
        "difference": weighted(difference.values),
        "interval_questions": [low, high],
        "interval_categories": list(category),
        "hard_difference": weighted(difference.values, HARD),
        "by_class": {n: float(np.nanmean(difference.values[:, k])) for k, n in enumerate(("a", "near_b", "far_b"))},
        "mcnemar": {"only_a": only_a, "only_b": only_b, "p": mcnemar_exact(only_a, only_b)},
        "wilcoxon_p": wilcoxon(flat.tolist()) if np.any(flat != 0) else 1.0,
        # two methods that decide alike everywhere have no spread to plan with
        "minimum_detectable": minimum_detectable_effect(sd, n) if n >= 2 and sd > 0 else None,
        "per_draw": _per_draw(results, categories, a, b),
    }


def discordant(results: Results, categories: Sequence[str], a: str, b: str) -> tuple[int, int]:
    """Questions (per class) that only one of the two decides right, by majority over the draws; ties decide wrong."""
    counts = []
    right = [per_question(results, results.fields[m]["right"], categories).values for m in (a, b)]
    decided = [np.where(np.isfinite(r), r > 0.5, False) for r in right]
    counts = [int((decided[i] & ~decided[1 - i] & np.isfinite(right[0])).sum()) for i in (0, 1)]
    return counts[0], counts[1]


def _per_draw(results: Results, categories: Sequence[str], a: str, b: str) -> list[float]:
    out = []
    for draw in np.unique(results.draw):
        values = np.where(results.draw == draw, results.fields[a]["returns"] - results.fields[b]["returns"], np.nan)
        if np.isfinite(values).any():
            out.append(weighted(per_question(results, values, categories).values))
    return out


def _contribution_sd(difference: Units) -> float:
    """Standard deviation of a question's contribution to the balanced mean (A and near B together, far scaled in)."""
    values = np.nan_to_num(difference.values) * BALANCED
    near = np.isfinite(difference.values[:, 0])
    own = values[near, 0] + values[near, 1]
    far = values[~near, 2]
    n = max(int(near.sum()), 1)
    far_variance = far.var(ddof=1) / max(len(far), 1) * n if len(far) > 1 else 0.0
    return float(np.sqrt(own.var(ddof=1) + far_variance)) if len(own) > 1 else 0.0


def adjust(comparisons: list[dict[str, Any]]) -> None:
    """Add Holm-adjusted p-values of the McNemar and Wilcoxon tests over the comparisons of one split."""
    for key in ("mcnemar_p_holm", "wilcoxon_p_holm"):
        raw = [c["mcnemar"]["p"] if key.startswith("mcnemar") else c["wilcoxon_p"] for c in comparisons]
        for comparison, p in zip(comparisons, holm(raw), strict=True):
            comparison[key] = p


def reliability(
    probability: Doubles, truth: NDArray[np.bool_], weight: Doubles, bins: int = 10
) -> list[dict[str, float]]:
    """Predicted against observed share of class A in bins of equal weight-free width."""
    out = []
    edges = np.linspace(0, 1, bins + 1)
    place = np.clip(np.digitize(probability, edges) - 1, 0, bins - 1)
    for i in range(bins):
        members = place == i
        if members.any():
            w = weight[members]
            out.append(
                {
                    "predicted": float(np.average(probability[members], weights=w)),
                    "observed": float(np.average(truth[members], weights=w)),
                    "n": int(members.sum()),
                }
            )
    return out


def write_json(path: Path, value: Any) -> None:
    """Atomic JSON."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY))
    temporary.replace(path)
