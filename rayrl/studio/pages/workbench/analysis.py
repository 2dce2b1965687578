"""Figures of an experiment as its pages need them: metrics with intervals, and which rule of the Skill is at fault."""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import orjson
from sqlalchemy import func, select, text

from rayrl.evaluation.statistics import wilson
from rayrl.schemas import JsonDict
from rayrl.studio.context import Context
from rayrl.studio.pages.background import BACKGROUND
from rayrl.workbench import tables
from rayrl.workbench.metrics import experiment_metrics, rate
from rayrl.workbench.results import Filter, counts

RESAMPLES = 2000
SMALL = 5000
LARGE_WAIT_S = 0.04
MAX_READ = 5
Matrix = np.ndarray[Any, Any]


def cached(ctx: Context, experiment: JsonDict, kind: str, make: Callable[[], Any], most_s: float | None = None) -> Any:
    """``make()`` for the present state of an experiment; ``None`` while a large one is being computed.

    ``most_s``: how long a page waits for a large one at most.
    """
    stamp = (last_event(ctx, experiment["id"]), tuple(experiment["counts"].items()))
    key = (str(ctx.bench.store.root), experiment["id"], kind)
    wait_s = wait(experiment)
    if most_s is not None and experiment["n_cases"] > SMALL:
        wait_s = min(wait_s, most_s)
    return BACKGROUND.get(key, stamp, make, wait_s=wait_s)


def wait(*experiments: JsonDict) -> float:
    """How long a page waits for figures: small experiments are always shown at once."""
    return 30.0 if sum(e["n_cases"] for e in experiments) <= SMALL else LARGE_WAIT_S


def last_event(ctx: Context, experiment_id: str) -> int:
    """Number of the newest event of an experiment."""
    events = tables.events
    query = select(func.max(events.c.id)).where(events.c.experiment_id == experiment_id)
    with ctx.bench.store.read() as connection:
        return int(connection.execute(query).scalar() or 0)


def headlines(ctx: Context, experiments: Sequence[JsonDict]) -> list[JsonDict | None]:
    """Accuracy alone, for lists: all the large ones together are waited for no longer than one of them."""
    until = time.monotonic() + LARGE_WAIT_S
    return [headline(ctx, one, max(0.0, until - time.monotonic())) for one in experiments]


def headline(ctx: Context, experiment: JsonDict, most_s: float | None = None) -> JsonDict | None:
    """Accuracy alone, of one experiment."""
    r = tables.results
    query = (
        select((r.c.prediction == r.c.gold).label("right"), func.count())
        .where(r.c.experiment_id == experiment["id"], r.c.repeat == 0, r.c.gold.is_not(None))
        .where(r.c.state.in_(["completed", "failed"]), func.coalesce(r.c.failure, "") != "infrastructure")
        .group_by(text("1"))
    )

    def make() -> JsonDict:
        with ctx.bench.store.read() as connection:
            found: dict[Any, int] = {bool(right): 0 for right in (True, False)}
            for right, n in connection.execute(query):
                found[bool(right)] += n
        return rate(found[True], sum(found.values()))

    found: JsonDict | None = cached(ctx, experiment, "headline", make, most_s)
    return found


def overview(ctx: Context, experiment: JsonDict, view: str) -> JsonDict | None:
    """Metrics under a view of the labels; statistics without a formula for their interval get a bootstrapped one."""
    classes = ctx.bench.datasets.get(experiment["dataset_id"])["classes"]

    def make() -> JsonDict:
        found = experiment_metrics(ctx.bench.store, experiment, classes, view=view)
        whole = found["overall"]
        matrix = np.array(whole["confusion"]["matrix"])
        whole["kappa"] = bootstrap(matrix, kappas)
        whole["macro_f1"] = bootstrap(matrix, lambda m: np.nanmean(f1s(m, len(classes)), axis=-1))
        for i, name in enumerate(classes):
            whole["classes"][name]["f1"] = bootstrap(matrix, partial(f1_of, i=i))
        return found

    found: JsonDict | None = cached(ctx, experiment, f"overview {view}", make)
    return found


def f1_of(matrix: Matrix, i: int) -> Matrix:
    """F1 of class ``i``."""
    return f1s(matrix, i + 1)[..., i]


def f1s(matrix: Matrix, n_classes: int) -> Matrix:
    """F1 of each class of matrices of shape (..., k, k); NaN where a class neither occurs nor is said."""
    hits = np.diagonal(matrix, axis1=-2, axis2=-1)
    totals = matrix.sum(axis=-1) + matrix.sum(axis=-2)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(2 * hits / totals)[..., :n_classes]


def kappas(matrix: Matrix) -> Matrix:
    """Cohen's kappa of matrices of shape (..., k, k); NaN where chance agreement is perfect."""
    total = matrix.sum(axis=(-2, -1)).astype(float)
    agreed = np.trace(matrix, axis1=-2, axis2=-1) / total
    expected = (matrix.sum(axis=-2) * matrix.sum(axis=-1)).sum(axis=-1) / total**2
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(expected >= 1, np.nan, (agreed - expected) / (1 - expected)))


def bootstrap(matrix: Matrix, statistic: Callable[[Matrix], Matrix]) -> JsonDict:
    """A statistic of a confusion matrix with its 95 % percentile interval over resampled cases.

    Resampling cases with replacement is a multinomial draw over the cells of the matrix. Resamples in which the
    statistic has no value are left out.
    """
    n = int(matrix.sum())
    if n == 0:
        return {"value": None, "low": None, "high": None, "n": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the mean of no classes is NaN, and handled
        value = float(statistic(matrix))
        draws = np.random.default_rng(0).multinomial(n, matrix.ravel() / n, size=RESAMPLES).reshape(-1, *matrix.shape)
        found = statistic(draws)
    found = found[~np.isnan(found)]
    if math.isnan(value) or n < 2 or not len(found):
        return {"value": None if math.isnan(value) else value, "low": None, "high": None, "n": n}
    low, high = np.percentile(found, [2.5, 97.5])
    return {"value": value, "low": float(low), "high": float(high), "n": n}


def tab_counts(ctx: Context, experiment: JsonDict) -> JsonDict | None:
    """Numbers beside tabs and on buttons.

    ``disagreements`` are first repeats whose label and verdict differ, ``to_look`` has those of low confidence or
    without a basis too; ``open`` and ``open_wide`` are the parts of both that nobody has reviewed, ``reviewed`` is
    every reviewed case, and ``again`` the runs (of all repeats) that running the disagreements again would repeat.
    """

    def make() -> JsonDict:
        differ, wide = Filter(agrees=False, repeat=0), Filter(disagreements=True, repeat=0)
        wanted = {
            "disagreements": differ,
            "open": differ.model_copy(update={"review": "none"}),
            "to_look": wide,
            "open_wide": wide.model_copy(update={"review": "none"}),
            "low": wide.model_copy(update={"max_confidence": experiment["params"]["low_confidence"]}),
            "no_basis": wide.model_copy(update={"evidence": "none"}),
            "reviewed": Filter(review="any", repeat=0),
            "again": Filter(agrees=False, state="completed"),
        }
        return counts(ctx.bench, experiment["id"], wanted)

    found: JsonDict | None = cached(ctx, experiment, "tabs", make)
    return found


_CITED = text(
    """
    SELECT json_extract(detail, '$.evidence.cited') AS cited, gold, prediction, agrees, evidence, count(*) AS n,
           CASE WHEN evidence = 'none' THEN json_extract(detail, '$.evidence.read_not_cited') END AS opened
    FROM evaluation_results
    WHERE experiment_id = :experiment AND repeat = 0 AND state = 'completed' AND gold IS NOT NULL
    GROUP BY gold, prediction, agrees, evidence, cited, opened
    """
)
"""Verdicts by what they cite, or read where they cite nothing: many are alike, so that each list is read once."""
Basis = tuple[str, tuple[str, ...] | None]
"""A cited passage; or the empty reference with the files that were read, ``None`` for files of every other kind."""


def bases(row: Any) -> Iterator[tuple[Basis, bool]]:
    """The passages a verdict cites, and whether they are there; the files that were read where it cites nothing."""
    for item in orjson.loads(row["cited"] or "[]"):
        path = item.get("path") if item.get("path") is not None else item.get("ref")
        ref = f"{path}#{item['section']}" if item.get("section") else str(path)
        yield (ref, None), bool(item.get("exists"))
    if row["evidence"] == "none":
        yield ("", files_read(orjson.loads(row["opened"] or "[]"))), False


def files_read(paths: Sequence[str]) -> tuple[str, ...]:
    """The knowledge files among those that were read; the main file is in the prompt of every case."""
    return tuple(sorted({path for path in paths if path != "SKILL.md"}))


def rules(ctx: Context, experiment: JsonDict) -> list[JsonDict] | None:
    """Each cited passage of the Skill with how many labelled verdicts rest on it and how many of them are wrong.

    Ordered by the lower end of the interval of the error rate, so that a rule with many wrong verdicts comes before one
    that was unlucky once. A verdict that cites several passages counts for each; those that cite none stand under the
    empty reference, divided by the ``files`` they read (``None``: any others): what they needed may lie in another one.
    """

    def make() -> list[JsonDict]:
        with ctx.bench.store.read() as connection:
            rows = connection.execute(_CITED, {"experiment": experiment["id"]}).mappings().all()
        wrong: Counter[Basis] = Counter()
        for row in rows:
            for basis, _ in bases(row):
                wrong[basis] += row["n"] * (row["agrees"] == 0)
        shown = {basis for basis, _ in [one for one in wrong.most_common() if not one[0][0]][:MAX_READ]}
        found: dict[Basis, JsonDict] = {}
        for row in rows:
            for basis, exists in bases(row):
                key = basis if basis[0] or basis in shown else ("", None)
                new: JsonDict = {"ref": key[0], "files": key[1], "exists": exists, "n": 0, "wrong": 0, "turns": {}}
                one = found.setdefault(key, new)
                one["n"] += row["n"]
                if row["agrees"] == 0:
                    one["wrong"] += row["n"]
                    turn = f"{row['gold']} → {row['prediction']}"
                    one["turns"][turn] = one["turns"].get(turn, 0) + row["n"]
        out = [one | {"rate": rate(one["wrong"], one["n"])} for one in found.values() if one["wrong"]]
        least = {id(one): wilson(one["wrong"], one["n"])[0] for one in out}
        return sorted(out, key=lambda one: (-least[id(one)], -one["wrong"], one["ref"], one["files"] or ()))

    found: list[JsonDict] | None = cached(ctx, experiment, "rules", make)
    return found
