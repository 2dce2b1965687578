"""Figures of one experiment: agreement of verdicts with labels.

What is counted: labelled cases whose run has ended, first repeat. A case without a verdict (``(none)``) is wrong: the
model had its turn. A case lost to infrastructure is left out and its number stated, since neither Skill nor model had
a say. A verdict outside of the classes is ``(other)``. Rates carry Wilson intervals, which assume independent cases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import func, select

from rayrl.evaluation.statistics import wilson
from rayrl.schemas import JsonDict
from rayrl.workbench import tables
from rayrl.workbench.store import Store

NONE, OTHER = "(none)", "(other)"
_R, _V = tables.results, tables.reviews


@dataclass(frozen=True)
class Judged:
    """One labelled case with its outcome; ``prediction`` is ``None`` without a verdict."""

    case_id: str
    domain: str
    gold: str
    prediction: str | None


def rate(successes: int, n: int) -> JsonDict:
    """A proportion with its Wilson interval; all ``None`` for no cases."""
    if n == 0:
        return {"value": None, "low": None, "high": None, "successes": 0, "n": 0}
    low, high = wilson(successes, n)
    return {"value": successes / n, "low": low, "high": high, "successes": successes, "n": n}


def kappa(matrix: np.ndarray[Any, Any]) -> float | None:
    """Cohen's kappa of a square count matrix; ``None`` where chance agreement is perfect or there is nothing."""
    total = float(matrix.sum())
    if total == 0:
        return None
    expected = float((matrix.sum(axis=0) * matrix.sum(axis=1)).sum()) / total**2
    return None if expected >= 1 else (float(np.trace(matrix)) / total - expected) / (1 - expected)


def score(cases: Sequence[Judged], classes: list[str]) -> JsonDict:
    """Accuracy, per class precision, recall and F1, macro F1, kappa and the confusion matrix (rows: label)."""
    return score_pairs(Counter((case.gold, case.prediction) for case in cases), classes)


def score_pairs(pairs: Mapping[tuple[str, str | None], int], classes: list[str]) -> JsonDict:
    """The figures of :func:`score` from counts of (label, verdict)."""
    columns = [*classes, NONE, OTHER]
    place = {name: index for index, name in enumerate(columns)}
    matrix = np.zeros((len(columns), len(columns)), dtype=np.int64)
    for (gold, prediction), n in pairs.items():
        column = NONE if prediction is None else prediction
        matrix[place.get(gold, place[OTHER]), place.get(column, place[OTHER])] += n
    total = int(matrix.sum())
    per_class = {}
    for name in classes:
        i = place[name]
        hit, said, support = int(matrix[i, i]), int(matrix[:, i].sum()), int(matrix[i].sum())
        balance = 2 * hit / (said + support) if said + support else None
        per_class[name] = {
            "precision": rate(hit, said),
            "recall": rate(hit, support),
            "f1": balance,
            "support": support,
        }
    known: list[float] = [f1 for c in per_class.values() if isinstance(f1 := c["f1"], float)]
    return {
        "n": total,
        "accuracy": rate(int(np.trace(matrix)), total),
        "macro_f1": sum(known) / len(known) if known else None,
        "kappa": kappa(matrix),
        "classes": per_class,
        "confusion": {"labels": columns, "matrix": matrix.tolist()},
    }


GOLD_VIEWS = ("original", "reviewed", "ambiguous_removed")


def gold_under(view: str, gold: str | None, prediction: str | None, verdict: str | None) -> str | None:
    """The label of a case under a view of the reviews; ``None`` takes it out."""
    if view == "original":
        return gold
    if view == "ambiguous_removed" and verdict in ("ambiguous", "capability_missing", "undecided"):
        return None
    return prediction if verdict == "model_right" and prediction is not None else gold


def experiment_metrics(store: Store, experiment: JsonDict, classes: list[str], *, view: str = "original") -> JsonDict:
    """All figures of an experiment under one view of the labels. Cases are counted by the database."""
    rows = _groups(store, experiment["id"])
    domains: dict[str, Counter[tuple[str, str | None]]] = {}
    dropped = unlabelled = unfinished = 0
    for row in rows:
        if row["repeat"] != 0:
            continue
        gold = gold_under(view, row["gold"], row["prediction"], row["verdict"])
        if gold is None:
            unlabelled += row["n"]
        elif row["state"] in ("pending", "running", "cancelled"):
            unfinished += row["n"]
        elif row["failure"] == "infrastructure":
            dropped += row["n"]
        else:
            domains.setdefault(row["domain"], Counter())[gold, row["prediction"]] += row["n"]
    overall: Counter[tuple[str, str | None]] = sum(domains.values(), Counter())
    ended = [row for row in rows if row["state"] in ("completed", "failed")]
    first = [row for row in ended if row["repeat"] == 0]
    return {
        "view": view,
        "denominators": {
            "cases": experiment["n_cases"],
            "scored": sum(overall.values()),
            "without_label": unlabelled,
            "unfinished": unfinished,
            "infrastructure_failures": dropped,
        },
        "overall": score_pairs(overall, classes),
        "by_domain": {name: score_pairs(found, classes) for name, found in sorted(domains.items())},
        "predictions": _tally((row["prediction"] or NONE, row["n"]) for row in first),
        "evidence": _tally((row["evidence"], row["n"]) for row in first),
        "failures": _tally((row["failure"], row["n"]) for row in first),
        "flake": flake(_repeats(store, experiment)),
        "usage": {
            name: sum(row[name] or 0 for row in ended) for name in ("model_calls", "prompt_tokens", "completion_tokens")
        },
    }


def _tally(pairs: Iterable[tuple[str | None, int]]) -> dict[str, int]:
    out: Counter[str] = Counter()
    for name, n in pairs:
        if name:
            out[name] += n
    return dict(out)


def flake(rows: Sequence[Any]) -> JsonDict:
    """How often repeats of one case disagree: cases with more than one verdict among those with several repeats."""
    verdicts: dict[int, list[str | None]] = {}
    for row in rows:
        if row.state == "completed":
            verdicts.setdefault(row.ordinal, []).append(row.prediction)
    several = [found for found in verdicts.values() if len(found) > 1]
    return rate(sum(len(set(found)) > 1 for found in several), len(several))


def _groups(store: Store, experiment_id: str) -> list[JsonDict]:
    """Results counted by what figures depend on, the newest review verdict among it."""
    names = ("repeat", "domain", "gold", "state", "failure", "prediction", "evidence")
    sums = [func.sum(_R.c[name]).label(name) for name in ("model_calls", "prompt_tokens", "completion_tokens")]
    mine = _V.c.experiment_id == experiment_id
    newest = select(_V.c.ordinal, func.max(_V.c.version).label("version")).where(mine).group_by(_V.c.ordinal).subquery()
    reviewed = (
        select(_V.c.ordinal, _V.c.verdict)
        .join(newest, (newest.c.ordinal == _V.c.ordinal) & (newest.c.version == _V.c.version))
        .where(mine)
        .subquery()
    )
    keys = [*(_R.c[name] for name in names), reviewed.c.verdict]
    query = (
        select(*keys, func.count().label("n"), *sums)
        .select_from(_R.outerjoin(reviewed, reviewed.c.ordinal == _R.c.ordinal))
        .where(_R.c.experiment_id == experiment_id)
        .group_by(*keys)
    )
    with store.read() as connection:
        return [dict(row) for row in connection.execute(query).mappings()]


def _repeats(store: Store, experiment: JsonDict) -> list[Any]:
    if experiment["params"].get("repeats", 1) < 2:
        return []
    query = select(_R.c.ordinal, _R.c.state, _R.c.prediction).where(_R.c.experiment_id == experiment["id"])
    with store.read() as connection:
        return list(connection.execute(query).all())
