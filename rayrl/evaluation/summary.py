"""From episode rows to a summary: coverage and failures first, then scores with their uncertainty.

Invariants:

* rows are brought into a canonical order before anything is added up, so one pass over a file, many chunks, a local
  process and a cluster give identical numbers;
* partial results are row tables themselves: merging is concatenation, and memory is that of the flat rows
  (a few hundred bytes an episode), never of the traces;
* an episode counts once: its first complete record, else its newest failed one; later complete records are reported
  as duplicates;
* only complete episodes are scored; coverage says how many are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from rayrl.errors import DataError
from rayrl.evaluation.rows import COMPONENTS, EpisodeRow, to_table
from rayrl.evaluation.statistics import (
    LEVEL,
    Clustered,
    Estimate,
    cluster_bootstrap,
    flake_rate,
    group,
    is_proportion,
    mean_estimate,
    pass_at_k,
    proportion_estimate,
)

SUMMARY_SCHEMA = "rayrl-summary-v1"
COUNTS = ("model_steps", "protocol_errors", "total_actions", "invalid_actions")
COSTS = ("prompt_tokens", "completion_tokens", "model_calls", "duration_s", "model_latency_ms")

Rows: TypeAlias = "Iterable[EpisodeRow] | pa.Table"


def as_table(rows: Rows) -> pa.Table:
    """Rows as an Arrow table in canonical order (run, split, task, sample, position)."""
    table = rows if isinstance(rows, pa.Table) else to_table(rows)
    keys = [(name, "ascending") for name in ("run", "split", "task_id", "sample_id", "position")]
    return table.sort_by(keys)


def results(table: pa.Table) -> tuple[pa.Table, npt.NDArray[np.bool_], dict[str, int]]:
    """One row per episode out of all attempts (canonical order).

    Returns the rows, a mask telling which of them were retried (the result is not the first attempt), and counts:
    ``attempts`` seen, ``duplicates`` (complete records after the first complete one), ``failed_attempts``.
    """
    n = table.num_rows
    if n == 0:
        return table, np.zeros(0, dtype=np.bool_), {"attempts": 0, "duplicates": 0, "failed_attempts": 0}
    # rows are sorted, so the attempts of an episode are neighbours
    first = np.ones(n, dtype=np.bool_)
    first[1:] = _changes(table["run"]) | _changes(table["episode_id"])
    starts = np.flatnonzero(first)
    sizes = np.diff(np.append(starts, n))
    index = np.arange(n)
    complete = np.asarray(table["complete"].to_numpy(zero_copy_only=False), dtype=np.bool_)
    first_complete = np.minimum.reduceat(np.where(complete, index, n), starts)
    last = starts + sizes - 1
    has = first_complete < n
    picked = np.where(has, first_complete, last)
    attempt = np.asarray(pc.fill_null(table["attempt"], 1).to_numpy(zero_copy_only=False), dtype=np.int64)
    # a result is a retry when it says so, or when an earlier attempt of the episode is in the file
    retried = (attempt[picked] > 1) | (picked > starts)
    completes = np.add.reduceat(complete.astype(np.int64), starts)
    counts = {
        "attempts": n,
        "duplicates": int((completes[has] - 1).sum()),
        "failed_attempts": int((~complete).sum()),
    }
    return table.take(pa.array(picked, type=pa.int64())), retried, counts


def _changes(column: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    """Whether each value differs from the one before it; one shorter than the column."""
    values = pc.fill_null(column, "").combine_chunks()
    return np.asarray(pc.not_equal(values[1:], values[:-1]).to_numpy(zero_copy_only=False), dtype=np.bool_)


def _floats(table: pa.Table, name: str) -> npt.NDArray[np.float64]:
    return np.asarray(table[name].cast(pa.float64()).to_numpy(zero_copy_only=False), dtype=np.float64)


def score_columns(table: pa.Table) -> dict[str, npt.NDArray[np.float64]]:
    """``reward`` and every ``r_*`` that occurs, aligned with the rows, NaN where missing."""
    columns = {name: _floats(table, name) for name in ("reward", *COMPONENTS)}
    others: dict[str, npt.NDArray[np.float64]] = {}
    for index, text in enumerate(table["components_json"].to_pylist()):
        if text:
            for key, value in orjson.loads(text).items():
                others.setdefault(key, np.full(table.num_rows, np.nan))[index] = value
    columns |= {name: others[name] for name in sorted(others)}
    return {name: values for name, values in columns.items() if np.isfinite(values).any()}


def task_keys(table: pa.Table) -> npt.NDArray[np.int64]:
    """An integer per row that is equal for equal (split, task): the cluster of every interval."""
    splits = pc.fill_null(table["split"], "").to_pylist()
    tasks = pc.fill_null(table["task_id"], -1).to_pylist()
    index = {key: n for n, key in enumerate(sorted(set(zip(splits, tasks, strict=True))))}
    return np.array([index[key] for key in zip(splits, tasks, strict=True)], dtype=np.int64)


def estimates(
    columns: dict[str, npt.NDArray[np.float64]], clusters: npt.NDArray[np.int64], level: float = LEVEL
) -> dict[str, Estimate]:
    """Estimate of every column (NaN = missing): Wilson for 0/1 columns, cluster bootstrap for the others."""
    out: dict[str, Estimate] = {}
    shared: list[tuple[str, Clustered]] = []
    for name, values in columns.items():
        present = np.isfinite(values)
        x, keys = values[present], clusters[present]
        if x.size and is_proportion(x):
            out[name] = proportion_estimate(x, keys, level=level)
        elif present.all() and x.size:
            shared.append((name, group(x, keys)))
        else:
            out[name] = mean_estimate(x, keys, level=level)
    found = cluster_bootstrap([column for _, column in shared], level=level)
    out |= {name: value for (name, _), value in zip(shared, found, strict=True)}
    return {name: out[name] for name in columns}


def _pass_at_k(success: npt.NDArray[np.float64], clusters: npt.NDArray[np.int64], level: float) -> dict[str, Any]:
    """pass@k for every power of two up to the most samples any task has, and the flake rate; empty with one sample."""
    present = np.isfinite(success)
    n = np.bincount(clusters[present])
    c = np.bincount(clusters[present], weights=success[present]).round().astype(int)
    held = n > 0
    n, c = n[held], c[held]
    if n.size == 0 or n.max() < 2:
        return {}
    out: dict[str, Any] = {"pass_at_k": {}}
    k = 1
    while k <= n.max():
        enough = n >= k
        values = [pass_at_k(int(a), int(b), k) for a, b in zip(n[enough], c[enough], strict=True)]
        out["pass_at_k"][str(k)] = mean_estimate(values, np.arange(len(values)), level=level).as_dict()
        k *= 2
    out["flake_rate"] = flake_rate(c.tolist(), n.tolist(), level=level).as_dict()
    return out


def _counter(values: Iterable[Any]) -> dict[str, int]:
    found = Counter(str(value) for value in values if value is not None)
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def _distribution(values: npt.NDArray[np.float64]) -> dict[str, Any]:
    x = np.sort(values[np.isfinite(values)])
    if x.size == 0:
        return {"n": 0, "total": None, "mean": None, "p50": None, "p95": None, "max": None}
    p50, p95 = np.quantile(x, [0.5, 0.95])
    return {
        "n": int(x.size),
        "total": float(x.sum()),
        "mean": float(x.mean()),
        "p50": float(p50),
        "p95": float(p95),
        "max": float(x[-1]),
    }


def _provenance(table: pa.Table) -> dict[str, Any]:
    names = ("run", "experiment", "fingerprint", "model", "checkpoint_id", "environment_version", "schema", "split")
    found: dict[str, Any] = {n: sorted(v for v in pc.unique(table[n]).to_pylist() if v) for n in names}
    found["scripted"] = bool(pc.any(table["scripted"]).as_py())
    found["with_skills"] = int(pc.sum(pc.greater(table["n_skills"], 0)).as_py() or 0)
    return found


def _failures(failed: pa.Table) -> dict[str, Any]:
    return {
        "by_class": _counter(value or "unknown" for value in failed["error_class"].to_pylist()),
        "by_code": _counter(failed["error_code"].to_pylist()),
        "by_stage": _counter(failed["error_stage"].to_pylist()),
        "examples": [
            {"episode_id": row["episode_id"], "class": row["error_class"], "message": row["error_message"]}
            for row in failed.select(["episode_id", "error_class", "error_message"]).slice(0, 5).to_pylist()
        ],
    }


def summarize(rows: Rows, *, expected_jobs: int | None = None, level: float = LEVEL) -> dict[str, Any]:
    """The summary of one evaluation; see the module docstring and docs/evaluation.md for the fields.

    Args:
        rows: episode rows of one or several runs: all attempts (then retries and duplicates are counted) or results.
        expected_jobs: how many episodes the manifest froze; ``None`` when unknown.
        level: confidence level of every interval.

    Raises:
        DataError: a row lacks the identity of its episode.
    """
    table = as_table(rows)
    if table["episode_id"].null_count or table["task_id"].null_count:
        raise DataError("an episode row has no episode_id or task_id; the traces are damaged")
    chosen, retried, attempts = results(table)
    del table  # a copy of all rows: not needed beyond here
    done = np.asarray(chosen["complete"].to_numpy(zero_copy_only=False), dtype=bool)
    scored = chosen.filter(pa.array(done))
    failed = chosen.filter(pa.array(~done))
    clusters = task_keys(scored)
    columns = score_columns(scored)
    metrics = estimates(columns, clusters, level)
    first_try = ~retried[done]
    expected = expected_jobs if expected_jobs is not None else chosen.num_rows
    summary: dict[str, Any] = {
        "schema": SUMMARY_SCHEMA,
        "level": level,
        "provenance": _provenance(chosen),
        "coverage": {
            "expected": expected_jobs,
            "recorded": chosen.num_rows,
            "completed": scored.num_rows,
            "failed": failed.num_rows,
            "missing": max(0, expected - chosen.num_rows),
            "rate": scored.num_rows / expected if expected else None,
            "retried": int(retried.sum()),
            "tasks": int(np.unique(clusters).size),
            **attempts,
        },
        "failures": _failures(failed),
        "metrics": {name: value.as_dict() for name, value in metrics.items()},
    }
    success = columns.get("r_success")
    if success is not None:
        summary |= _pass_at_k(success, clusters, level)
    if not first_try.all():
        without = estimates({n: v[first_try] for n, v in columns.items()}, clusters[first_try], level)
        summary["metrics_without_retried"] = {name: value.as_dict() for name, value in without.items()}
    counts = {name: _distribution(_floats(scored, name)) for name in COUNTS}
    actions, invalid = counts["total_actions"]["total"] or 0, counts["invalid_actions"]["total"] or 0
    steps, broken = counts["model_steps"]["total"] or 0, counts["protocol_errors"]["total"] or 0
    summary["counts"] = counts
    summary["rates"] = {
        "invalid_actions_per_action": invalid / actions if actions else None,
        "protocol_errors_per_model_step": broken / steps if steps else None,
    }
    summary["policy_failures"] = _counter(scored["policy_failure"].to_pylist())
    summary["termination_reasons"] = _counter(scored["termination_reason"].to_pylist())
    summary["costs"] = {name: _distribution(_floats(scored, name)) for name in COSTS}
    return summary
