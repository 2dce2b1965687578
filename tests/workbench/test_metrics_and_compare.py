"""Figures agree with scikit-learn and statsmodels; comparisons state their denominators."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import proportion_confint

from rayrl.errors import DataError
from rayrl.workbench.compare import compare, needed_discordant, similarity, verdict
from rayrl.workbench.experiments import Params
from rayrl.workbench.metrics import NONE, OTHER, Judged, experiment_metrics, score
from rayrl.workbench.results import Filter, counts, page
from rayrl.workbench.reviews import StaleReviewError, add_review, list_reviews, repair
from tests.workbench.conftest import drive, sample_dataset, sample_experiment

CLASSES = ["fast", "slow", "mid"]
pair = st.tuples(st.sampled_from(CLASSES), st.sampled_from([*CLASSES, "weird", None]))


@settings(max_examples=60, deadline=None)
@given(st.lists(pair, min_size=1, max_size=60))
def test_figures_equal_those_of_scikit_learn_and_statsmodels(pairs):
    found = score([Judged(str(n), "", gold, said) for n, (gold, said) in enumerate(pairs)], CLASSES)
    gold = [g for g, _ in pairs]
    said = [NONE if s is None else OTHER if s == "weird" else s for _, s in pairs]
    labels = [*CLASSES, NONE, OTHER]
    assert found["confusion"]["matrix"] == sk.confusion_matrix(gold, said, labels=labels).tolist()
    assert found["accuracy"]["value"] == pytest.approx(sk.accuracy_score(gold, said))
    low, high = proportion_confint(found["accuracy"]["successes"], len(pairs), method="wilson")
    assert (found["accuracy"]["low"], found["accuracy"]["high"]) == (pytest.approx(low, abs=1e-12), pytest.approx(high))
    with np.errstate(all="ignore"):
        kappa = sk.cohen_kappa_score(gold, said, labels=labels)
    assert (
        found["kappa"] == pytest.approx(kappa)
        if found["kappa"] is not None
        else np.isnan(kappa) or len(set(gold + said)) == 1
    )
    p, r, f, n = sk.precision_recall_fscore_support(gold, said, labels=CLASSES, zero_division=np.nan)
    for index, name in enumerate(CLASSES):
        mine = found["classes"][name]
        assert mine["support"] == n[index]
        for key, theirs in (("precision", p[index]), ("recall", r[index])):
            value = mine[key]["value"]
            assert np.isnan(theirs) if value is None else value == pytest.approx(theirs)
        assert mine["f1"] is None if np.isnan(f[index]) else mine["f1"] == pytest.approx(f[index])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.integers(0, 40))
def test_verdict_is_the_exact_mcnemar_test(fixed, regressed):
    found = verdict(fixed, regressed, 100)
    theirs = mcnemar([[10, regressed], [fixed, 10]], exact=True).pvalue
    assert found["p_value"] == pytest.approx(min(theirs, 1.0))
    expected = "not_distinguishable" if theirs >= 0.05 else "better" if fixed > regressed else "worse"
    assert found["verdict"] == expected
    if found["needed_discordant"] is not None:
        share = min(fixed, regressed) / (fixed + regressed) if fixed + regressed else 0
        n = found["needed_discordant"]
        assert mcnemar([[0, round(n * share)], [n - round(n * share), 0]], exact=True).pvalue < 0.05


def test_needed_discordant_of_a_one_sided_split_is_six():
    assert needed_discordant(2, 0) == 6 and needed_discordant(3, 3) is None


def test_similarity():
    assert similarity("abc", "abc") == 1 and similarity("abcd", "xyz") == 0 and 0 < similarity("abcd", "abce") < 1


def rig(bench, experiment_id, verdicts):
    """Write verdicts straight into the store: ordinal -> (prediction, reason, evidence)."""
    with bench.store.write() as connection:
        for ordinal, (prediction, reason, evidence) in verdicts.items():
            connection.exec_driver_sql(
                "UPDATE evaluation_results SET state='completed', prediction=?, reason=?, evidence=?, agrees=(gold=?)"
                " WHERE experiment_id=? AND ordinal=?",
                (prediction, reason, evidence, prediction, experiment_id, ordinal),
            )


def test_groups_and_denominators_of_two_experiments(bench):
    small, large = sample_dataset(bench, 20, name="small"), sample_dataset(bench, 24, name="large")
    a = sample_experiment(bench, dataset=small, start=False)["id"]
    b = sample_experiment(bench, dataset=large, start=False)["id"]
    gold = [case.gold_route for case in bench.datasets.cases(small["id"])]
    other = {"fast": "slow", "slow": "fast"}
    same = "rule one says so"
    left = {n: (gold[n], same, "supported") for n in range(20)}
    right = {n: (gold[n], same, "supported") for n in range(20)}
    left[0] = (other[gold[0]], same, "none")
    right[1] = (other[gold[1]], same, "none")
    right[2] = (gold[2], "完全不同的理由", "supported")
    right[3] = (gold[3], "rule one says so.", "supported")
    del right[4]
    rig(bench, a, left)
    rig(bench, b, right)
    with bench.store.write() as connection:
        connection.exec_driver_sql(
            "UPDATE evaluation_cases SET input_sha256='x' WHERE dataset_id=? AND ordinal=5", (large["id"],)
        )
        connection.exec_driver_sql("UPDATE evaluation_results SET gold=NULL WHERE experiment_id=? AND ordinal=6", (b,))
    found = compare(bench, a, b)
    ids = [case.case_id for case in bench.datasets.cases(small["id"])]
    groups = found["groups"]
    assert (groups["fixed"], groups["regressed"], groups["reason_changed"]) == ([ids[0]], [ids[1]], [ids[2]])
    assert (groups["evidence_gained"], groups["evidence_lost"]) == ([ids[0]], [ids[1]])
    assert (groups["not_ended"], groups["input_changed"], groups["label_changed"]) == ([ids[4]], [ids[5]], [ids[6]])
    assert len(groups["only_b"]) == 4 and groups["only_a"] == []
    assert (
        found["denominators"]["a"] == 20 and found["denominators"]["b"] == 24 and found["denominators"]["common"] == 17
    )
    assert found["overall"]["n"] == 17 and found["overall"]["verdict"] == "not_distinguishable"
    assert found["overall"]["delta"]["accuracy"] == 0 and not found["same_dataset"]
    p = [d["p_value"] for d in found["by_domain"].values()]
    holm = multipletests(p, method="holm")[1]
    assert [d["p_holm"] for d in found["by_domain"].values()] == pytest.approx(list(holm))


def test_reason_threshold_follows_what_repeats_do(bench):
    dataset = sample_dataset(bench, 20)
    a = sample_experiment(bench, dataset=dataset, start=False, params=Params(repeats=2))["id"]
    b = sample_experiment(bench, dataset=dataset, start=False)["id"]
    for experiment in (a, b):
        rig(bench, experiment, dict.fromkeys(range(20), ("fast", "aaaa bbbb cccc", "none")))
    with bench.store.write() as connection:
        connection.exec_driver_sql(
            "UPDATE evaluation_results SET reason='aaaa zzzz yyyy' WHERE experiment_id=? AND repeat=1", (a,)
        )
        connection.exec_driver_sql("UPDATE evaluation_results SET reason='aaaa xxxx wwww' WHERE experiment_id=?", (b,))
    found = compare(bench, a, b)
    assert found["reason_threshold"] == pytest.approx(similarity("aaaa bbbb cccc", "aaaa zzzz yyyy"))
    assert found["groups"]["reason_changed"] == []


def test_same_experiment_twice_is_the_same(bench):
    a = sample_experiment(bench, 20)["id"]
    drive(bench, a)
    found = compare(bench, a, a)
    assert found["overall"]["fixed"] == found["overall"]["regressed"] == 0 and found["overall"]["p_value"] == 1.0


def test_skill_diff_is_joined_to_the_flips_that_rest_on_it(bench):
    a, b = sample_experiment(bench, 250)["id"], sample_experiment(bench, 250, version=2)["id"]
    drive(bench, a)
    drive(bench, b)
    found = compare(bench, a, b)
    (change,) = found["skill_diff"]
    assert change["sections"] == ["knowledge/地图能力.md#到达电量预估"]
    assert change["fixed"] == sorted(found["groups"]["fixed"]) != []
    assert change["regressed"] == sorted(found["groups"]["regressed"]) != []


# --- reviews


def test_reviews_are_versioned_and_guarded_and_repair_the_labels(bench):
    experiment = sample_experiment(bench, 30)
    drive(bench, experiment["id"])
    wrong = [row["ordinal"] for row in page(bench, experiment["id"], Filter(agrees=False))["items"]]
    first, second = wrong[:2]
    with pytest.raises(DataError, match="no review changes a label"):
        repair(bench, experiment["id"])
    assert add_review(bench, experiment["id"], first, verdict="undecided", expected_version=0)["version"] == 1
    with pytest.raises(StaleReviewError, match="at review version 1, not 0"):
        add_review(bench, experiment["id"], first, verdict="model_right", expected_version=0)
    add_review(bench, experiment["id"], first, verdict="model_right", note="see", expected_version=1)
    add_review(bench, experiment["id"], second, verdict="ambiguous")
    assert [r["verdict"] for r in list_reviews(bench, experiment["id"])] == ["model_right", "ambiguous"]
    assert len(list_reviews(bench, experiment["id"], history=True)) == 3

    views = {
        view: experiment_metrics(bench.store, experiment, ["fast", "slow"], view=view)["overall"]["accuracy"]
        for view in ("original", "reviewed", "ambiguous_removed")
    }
    right = views["original"]["successes"]
    assert (views["reviewed"]["successes"], views["reviewed"]["n"]) == (right + 1, 30)
    assert (views["ambiguous_removed"]["successes"], views["ambiguous_removed"]["n"]) == (right + 1, 29)

    repaired = repair(bench, experiment["id"], drop_ambiguous=True)
    assert len(repaired["changed"]) == 1 and len(repaired["dropped"]) == 1
    new = repaired["dataset"]
    old = bench.datasets.get(experiment["dataset_id"])
    assert (new["version"], new["parent_id"], new["n_cases"]) == (old["version"] + 1, old["id"], 29)
    assert experiment_metrics(bench.store, experiment, ["fast", "slow"])["overall"]["accuracy"] == views["original"]
    assert [row["ordinal"] for row in page(bench, experiment["id"], Filter(review="ambiguous"))["items"]] == [second]
    assert len(page(bench, experiment["id"], Filter(review="none"), limit=100)["items"]) == 28
    wanted = {
        "wrong": Filter(agrees=False),
        "to look at": Filter(disagreements=True, review="none"),
        "low": Filter(disagreements=True, max_confidence=0.6),
        "reviewed": Filter(review="any", repeat=0),
        "found": Filter(search="1", state="completed"),
        "every": Filter(),
    }
    listed = {name: len(page(bench, experiment["id"], f, limit=100)["items"]) for name, f in wanted.items()}
    assert counts(bench, experiment["id"], wanted) == listed and listed["reviewed"] == 2


def test_failed_cases_count_as_wrong_and_infrastructure_is_left_out(bench):
    experiment = sample_experiment(bench, 10, start=False)
    gold = [case.gold_route for case in bench.datasets.cases(experiment["dataset_id"])]
    rig(bench, experiment["id"], {n: (gold[n], "r", "none") for n in range(10)})
    with bench.store.write() as connection:
        for ordinal, failure in ((0, "infrastructure"), (1, "agent"), (2, "unparseable")):
            connection.exec_driver_sql(
                "UPDATE evaluation_results SET state='failed', prediction=NULL, agrees=NULL, failure=? WHERE ordinal=?",
                (failure, ordinal),
            )
    found = experiment_metrics(bench.store, experiment, ["fast", "slow"])
    assert found["overall"]["accuracy"]["n"] == 9 and found["overall"]["accuracy"]["successes"] == 7
    assert found["denominators"]["infrastructure_failures"] == 1 and found["failures"]["agent"] == 1


def test_evidence_and_failures_count_first_repeats_like_their_denominator(bench):
    made = sample_experiment(bench, dataset=sample_dataset(bench, 10), start=False, params=Params(repeats=3))
    rig(bench, made["id"], dict.fromkeys(range(10), ("fast", "because", "none")))  # every repeat of every case
    found = experiment_metrics(bench.store, bench.experiments.get(made["id"]), ["fast", "slow"])
    assert found["evidence"] == {"none": 10} and sum(found["predictions"].values()) == 10
