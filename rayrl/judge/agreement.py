"""Agreement of a judge with human labels: kappa with intervals; and a summary of judge scores.

Human labels are JSON lines ``{"episode_id", "scores": {criterion: integer or null}}``, with ``run`` where several are
judged. Only episodes and criteria that both sides scored count; how many were left out is always said.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from sklearn.metrics import cohen_kappa_score

from rayrl.errors import DataError
from rayrl.evaluation.statistics import LEVEL, estimate, wilson
from rayrl.judge.rubric import Rubric
from rayrl.schemas import JsonDict

RESAMPLES = 1000
IntArray = npt.NDArray[np.int64]


def quadratic_kappa(a: IntArray, b: IntArray, categories: int) -> float:
    """Cohen's kappa with quadratic weights of codes 0..categories-1; NaN where chance agreement is complete.

    Assumes the same items were scored by both raters, independently.
    """
    observed = np.zeros((categories, categories))
    np.add.at(observed, (a, b), 1.0)
    grid = np.arange(categories)
    weights = (grid[:, None] - grid[None, :]) ** 2
    expected = np.outer(observed.sum(1), observed.sum(0)) / max(1, a.size)
    scale = float((weights * expected).sum())
    return float("nan") if scale == 0 else 1.0 - float((weights * observed).sum()) / scale


def kappa_interval(a: IntArray, b: IntArray, categories: int, level: float = LEVEL) -> tuple[float, float] | None:
    """Percentile bootstrap interval of the quadratic kappa over items; ``None`` below 5 items or without spread.

    Deterministic: the generator is seeded by the number of items, and items are sorted first.
    """
    n = a.size
    if n < 5:
        return None
    order = np.lexsort((b, a))
    a, b = a[order], b[order]
    digest = hashlib.sha256(f"kappa:{n}".encode()).digest()
    rng = np.random.default_rng(int.from_bytes(digest[:8], "big"))
    picks = rng.integers(0, n, size=(RESAMPLES, n))
    values = np.array([quadratic_kappa(a[row], b[row], categories) for row in picks])
    values = values[np.isfinite(values)]
    if values.size < RESAMPLES // 2:
        return None
    low, high = np.quantile(values, [0.5 - level / 2, 0.5 + level / 2])
    return float(low), float(high)


def read_labels(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Human scores by (run or "", episode id).

    Raises:
        DataError: a line is no label; names file and line.
    """
    out: dict[tuple[str, str], dict[str, Any]] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            item = orjson.loads(line)
            out[str(item.get("run") or ""), str(item["episode_id"])] = dict(item["scores"])
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{path}:{number}: expected {{episode_id, scores}}: {type(error).__name__}") from None
    return out


def agreement(
    outputs: Iterable[JsonDict], labels: dict[tuple[str, str], dict[str, Any]], rubric: Rubric, *, level: float = LEVEL
) -> dict[str, Any]:
    """Per criterion: items, exact agreement (Wilson), kappa (unweighted and quadratic) with an interval, mean bias."""
    items = list(outputs)
    out: dict[str, Any] = {}
    for criterion in rubric.criteria:
        judge: list[int] = []
        human: list[int] = []
        left_out = 0
        for item in items:
            given = labels.get((str(item.get("run") or ""), item["episode_id"])) or labels.get(("", item["episode_id"]))
            if given is None:
                continue
            theirs, ours = given.get(criterion.id), (item.get("scores") or {}).get(criterion.id)
            in_range = isinstance(theirs, int) and criterion.minimum <= theirs <= criterion.maximum
            if not in_range or ours is None:
                left_out += 1
                continue
            human.append(int(theirs))  # type: ignore[arg-type]
            judge.append(int(ours))
        out[criterion.id] = {"left_out": left_out, **_agree(judge, human, criterion.minimum, criterion.maximum, level)}
    return out


def _agree(judge: list[int], human: list[int], minimum: int, maximum: int, level: float) -> dict[str, Any]:
    n = len(judge)
    if n == 0:
        return {"n": 0}
    a, b = np.array(judge, dtype=np.int64) - minimum, np.array(human, dtype=np.int64) - minimum
    categories = maximum - minimum + 1
    same = int((a == b).sum())
    varied = np.unique(np.concatenate([a, b])).size > 1
    kappa = float(cohen_kappa_score(a, b, labels=list(range(categories)))) if varied else None
    weighted = quadratic_kappa(a, b, categories)
    interval = kappa_interval(a, b, categories, level)
    low, high = wilson(same, n, level)
    return {
        "n": n,
        "exact": same / n,
        "exact_low": low,
        "exact_high": high,
        "kappa": kappa,
        "quadratic_kappa": weighted if np.isfinite(weighted) else None,
        "quadratic_low": interval[0] if interval else None,
        "quadratic_high": interval[1] if interval else None,
        "mean_difference": float(np.mean(a - b)),
        "level": level,
    }


def score_summary(outputs: Iterable[JsonDict], rubric: Rubric, *, level: float = LEVEL) -> dict[str, Any]:
    """Per criterion the mean with a bootstrap interval over tasks, and what is missing and why."""
    items = [item for item in outputs if item.get("status") == "judged"]
    problems: dict[str, int] = {}
    for item in items:
        for problem in item.get("problems") or []:
            problems[problem] = problems.get(problem, 0) + 1
    criteria = {}
    for criterion in rubric.criteria:
        scored = [i for i in items if (i.get("scores") or {}).get(criterion.id) is not None]
        values = [float(i["scores"][criterion.id]) for i in scored]
        tasks = [f"{i.get('run')}:{i['job'].get('split')}:{i['job'].get('task_id')}" for i in scored]
        found = estimate(values, np.array(tasks, dtype=np.str_), level=level) if values else None
        criteria[criterion.id] = {"missing": len(items) - len(scored), **(found.as_dict() if found else {"n": 0})}
    return {"judged": len(items), "criteria": criteria, "problems": dict(sorted(problems.items()))}
