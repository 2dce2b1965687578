"""Comparison: finds a known difference, finds none in identical runs, counts what cannot be paired."""

from dataclasses import replace
from html.parser import HTMLParser

import pytest

from rayrl.errors import DataError, UserError
from rayrl.evaluation.comparable import check_comparable, manifest_differences
from rayrl.evaluation.compare import compare_rows
from rayrl.evaluation.compare_report import html, markdown, tables
from rayrl.evaluation.rows import episode_row, episode_rows
from rayrl.testing.traces import TraceRecipe, make_record, make_records, plan_episode

BASE = TraceRecipe(tasks=120, failure_rate=0.0)


@pytest.fixture(scope="module")
def rows():
    return episode_rows(make_records(BASE))


@pytest.fixture(scope="module")
def better_rows():
    return episode_rows(make_records(replace(BASE, competence=1.2)))


def test_a_known_difference_is_found_and_transitions_are_right(rows, better_rows):
    found = compare_rows(rows, better_rows, name_a="old", name_b="new")
    assert found["sentence"].startswith("new is better than old on reward")
    assert found["metrics"]["reward"]["difference"]["low"] > 0
    plans = [
        (plan_episode(BASE, t, 0).success, plan_episode(replace(BASE, competence=1.2), t, 0).success)
        for t in BASE.task_ids()
    ]
    counts = {k: v["n"] for k, v in found["transitions"].items()}
    assert counts == {
        "won": plans.count((False, True)),
        "lost": plans.count((True, False)),
        "both": plans.count((True, True)),
        "neither": plans.count((False, False)),
    }
    assert compare_rows(better_rows, rows)["sentence"].startswith("B is worse than A")


def test_identical_runs_show_no_difference(rows):
    found = compare_rows(rows, rows)
    assert found["sentence"].startswith("No difference between A and B")
    assert all(m["p"] == 1.0 and m["difference"]["mean"] == 0 for m in found["metrics"].values())


def test_runs_that_differ_by_luck_alone_show_no_clear_difference():
    a = episode_rows(make_records(replace(BASE, seed=1)))
    b = episode_rows(make_records(replace(BASE, seed=2)))
    assert "No clear difference" in compare_rows(a, b)["sentence"]


def test_honest_denominators():
    recipe = TraceRecipe(failure_rate=0.0)

    def row(task, *, fail=False):
        return episode_row(make_record(recipe, task, 0, fail=fail))

    a = [row(1), row(2), row(3), row(4, fail=True), row(5), row(6, fail=True)]
    b = [row(2), row(3), row(4), row(5, fail=True), row(6, fail=True), row(7)]
    pairing = compare_rows(a, b)["pairing"]
    assert pairing == {
        "pairs": 2,
        "tasks": 2,
        "only_in_a": 1,
        "only_in_b": 1,
        "failed_only_in_a": 1,
        "failed_only_in_b": 1,
        "failed_in_both": 1,
        "duplicates_in_a": 0,
        "duplicates_in_b": 0,
    }


def test_lower_is_better_for_costs(rows, better_rows):
    found = compare_rows(rows, better_rows, metric="prompt_tokens")
    item = found["metrics"]["prompt_tokens"]["difference"]
    if item["high"] < 0:
        assert "better" in found["sentence"]


def test_no_common_pair_says_so(rows):
    found = compare_rows(rows[:3], rows[3:6])
    assert found["sentence"].startswith("Nothing can be said")
    assert markdown([{**found, "manifest_differences": []}])
    assert html([{**found, "manifest_differences": []}])


def test_bad_questions_are_refused_by_name(rows):
    with pytest.raises(DataError, match="metric 'rewrad' is not in both runs"):
        compare_rows(rows, rows, metric="rewrad")
    with pytest.raises(DataError, match="not a column"):
        compare_rows(rows, rows, by="colour")
    with pytest.raises(DataError, match="several runs"):
        compare_rows([{**rows[0], "run": "x"}, {**rows[1], "run": "y"}], rows)


def test_several_samples_are_paired_by_sample_and_clustered_by_task():
    recipe = TraceRecipe(tasks=40, samples=3, failure_rate=0.0)
    a, b = episode_rows(make_records(recipe)), episode_rows(make_records(replace(recipe, competence=1.0)))
    found = compare_rows(a, b)
    assert (found["pairing"]["pairs"], found["pairing"]["tasks"]) == (120, 40)
    assert found["metrics"]["reward"]["difference"]["clusters"] == 40


class Strict(HTMLParser):
    """Counts outside references and unclosed tags."""

    def __init__(self):
        super().__init__()
        self.outside, self.open = [], []

    def handle_starttag(self, tag, attrs):
        self.outside += [v for k, v in attrs if k in ("src", "href") and v]
        if tag not in ("meta", "br", "link") and tag != "img":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, (tag, self.open[-3:])
        self.open.pop()


def test_reports_are_self_contained_and_escaped(rows, better_rows):
    found = compare_rows(rows, better_rows, name_a="<script>alert(1)</script>", name_b="b & c")
    found["manifest_differences"] = [["model.checkpoint_id", "1", "2"]]
    text = html([found])
    parser = Strict()
    parser.feed(text)
    assert parser.outside == [] and parser.open == []
    assert "<script" not in text
    assert text.count("<svg") >= 2
    assert "model.checkpoint_id" in markdown([found])
    assert len(tables(found)) == 2


def manifest(**semantic):
    return {"semantic": {"model": {"name": "m", "temperature": 0.0}, "limits": {"max_actions": 30}, **semantic}}


def test_incomparable_runs_are_refused_by_name():
    a, b = manifest(), manifest(model={"name": "m", "temperature": 0.7}, limits={"max_actions": 15})
    with pytest.raises(UserError) as caught:
        check_comparable(a, b, may_differ=["model"], name_a="old", name_b="new")
    assert "limits.max_actions: 30 in old, 15 in new" in str(caught.value)
    assert "model.temperature" not in str(caught.value)
    assert "--may-differ limits" in str(caught.value)
    declared = check_comparable(a, b, may_differ=["model.temp*", "limits"])
    assert [key for key, _, _ in declared] == ["limits.max_actions", "model.temperature"]


def test_missing_manifests_count_as_a_difference():
    assert manifest_differences(None, manifest())[0][0] == "manifest"
    assert manifest_differences(None, None) == []
    with pytest.raises(UserError, match="--may-differ manifest"):
        check_comparable(None, manifest(), may_differ=[])


def test_a_few_equal_pairs_are_no_equality(rows):
    few = rows.slice(0, 2) if hasattr(rows, "slice") else rows[:2]
    assert "cannot be told apart on reward: too few pairs" in compare_rows(few, few)["sentence"]
