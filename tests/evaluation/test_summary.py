"""Summaries: coverage first, one result per episode, the same numbers whatever the order of rows."""

import random

import numpy as np
import pyarrow as pa
import pytest

from rayrl.errors import DataError
from rayrl.evaluation.rows import episode_row, episode_rows, to_table
from rayrl.evaluation.summary import as_table, results, summarize
from rayrl.evaluation.tables import summary_tables
from rayrl.testing.traces import TraceRecipe, make_record, make_records


def attempt(task, sample, *, fail, number, position, reward=None):
    record = make_record(TraceRecipe(failure_rate=0.0), task, sample, attempt=number, fail=fail)
    if reward is not None:
        record["final"]["reward"] = reward
    return episode_row(record, position=position)


def test_first_complete_record_wins_and_failures_never_hide_it():
    rows = [
        attempt(1, 0, fail=True, number=1, position=0),
        attempt(1, 0, fail=False, number=2, position=1, reward=0.25),
        attempt(1, 0, fail=False, number=3, position=2, reward=0.75),  # late duplicate
        attempt(1, 0, fail=True, number=4, position=3),
        attempt(2, 0, fail=True, number=1, position=4),
        attempt(2, 0, fail=True, number=2, position=5),
        attempt(3, 0, fail=False, number=1, position=6, reward=0.5),
    ]
    chosen, retried, counts = results(as_table(rows))
    by_task = {row["task_id"]: row for row in chosen.to_pylist()}
    assert by_task[1]["reward"] == 0.25
    assert by_task[2]["attempt"] == 2
    assert counts == {"attempts": 7, "duplicates": 1, "failed_attempts": 4}
    assert retried.tolist() == [True, True, False]
    summary = summarize(rows, expected_jobs=5)
    coverage = summary["coverage"]
    assert (coverage["completed"], coverage["failed"], coverage["missing"], coverage["rate"]) == (2, 1, 2, 0.4)
    assert summary["metrics"]["reward"]["mean"] == pytest.approx(0.375)
    assert summary["metrics_without_retried"]["reward"]["mean"] == 0.5
    assert sum(summary["failures"]["by_class"].values()) == 1


def test_order_of_rows_does_not_matter():
    rows = [
        {**row, "position": n} for n, row in enumerate(episode_rows(make_records(TraceRecipe(tasks=40, samples=3))))
    ]
    shuffled = rows[:]
    random.Random(3).shuffle(shuffled)
    assert summarize(rows) == summarize(shuffled)
    parts = [to_table(shuffled[i::5]) for i in range(5)]
    assert summarize(pa.concat_tables(parts)) == summarize(rows)


def test_numbers_equal_plain_numpy():
    recipe = TraceRecipe(tasks=50, samples=2, failure_rate=0.0)
    records = list(make_records(recipe))
    summary = summarize(episode_rows(records), expected_jobs=100)
    rewards = [r["final"]["reward"] for r in records]
    assert summary["metrics"]["reward"]["mean"] == pytest.approx(np.mean(rewards))
    assert summary["counts"]["model_steps"]["total"] == sum(len(r["steps"]) for r in records)
    assert summary["costs"]["prompt_tokens"]["total"] == sum(r["usage"]["prompt_tokens"] for r in records)
    ends = [r["final"]["termination_reason"] for r in records]
    assert summary["termination_reasons"] == {e: ends.count(e) for e in summary["termination_reasons"]}
    by_task = {}
    for r in records:
        by_task.setdefault(r["job"]["task_id"], []).append(r["final"]["reward_detail"]["r_success"])
    assert summary["pass_at_k"]["2"]["mean"] == pytest.approx(np.mean([max(v) for v in by_task.values()]))
    assert summary["flake_rate"]["mean"] == pytest.approx(np.mean([v[0] != v[1] for v in by_task.values()]))
    assert set(summary["metrics"]) >= {"reward", "r_loose", "r_success", "r_type", "r_att", "r_option", "r_price"}


def test_proportions_get_wilson_and_never_zero_width():
    rows = [attempt(t, 0, fail=False, number=1, position=t, reward=0.0) for t in range(12)]
    item = summarize(rows)["metrics"]["reward"]
    assert item["method"] == "wilson"
    assert item["high"] > 0.1


def test_nothing_completed_is_a_summary_too():
    rows = [attempt(t, 0, fail=True, number=1, position=t) for t in range(3)]
    summary = summarize(rows, expected_jobs=4)
    assert summary["metrics"] == {}
    assert summary["coverage"]["rate"] == 0
    assert summarize([])["coverage"]["recorded"] == 0
    assert summary_tables(summary)


def test_rows_without_identity_are_refused():
    row = attempt(0, 0, fail=False, number=1, position=0)
    with pytest.raises(DataError, match="no episode_id"):
        summarize([{**row, "episode_id": None}])
