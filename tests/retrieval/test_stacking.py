"""Group R: opinions of regressions that were not fitted on the row they judge."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rayrl.retrieval.baselines import PlannedLogistic
from rayrl.retrieval.folds import Fold
from rayrl.retrieval.pools import CLASS_WEIGHTS, Kind
from rayrl.retrieval.stacking import FITS, PREFIX, Regressions, fit_regressions, fit_stacked, without_opinions
from rayrl.retrieval.task import TaskConfig, build_task
from rayrl.retrieval.world import class_weight_per_row
from tests.retrieval.test_serving import material
from tests.retrieval.worlds import tiny_world


def world(rows=120, k=3, seed=0):
    """Half class A; the first static feature knows the class, the cosine the place."""
    rng = np.random.default_rng(seed)
    places = rng.integers(0, k, rows)
    is_a = np.arange(rows) % 2 == 0
    patterns = [[bool(a) and j == p for j in range(k)] for a, p in zip(is_a, places, strict=True)]
    kinds = [Kind.A if a else (Kind.NEAR_B, Kind.FAR_B)[i % 4 // 2] for i, a in enumerate(is_a)]
    static = torch.from_numpy(rng.normal(size=(rows, 4)).astype(np.float32))
    static[:, 0] += 2.0 * torch.from_numpy(is_a.astype(np.float32))
    made = tiny_world(patterns, kinds, static=static, seed=seed)
    candidate = made.candidate + 2.0 * made.right[:, :, None]
    return replace(made, candidate=candidate, part=torch.from_numpy(rng.integers(0, 840, rows)))


def test_opinions_are_those_of_the_planned_logistic():
    train, unseen = world(), world(seed=1)
    logistic = PlannedLogistic().fit(train, class_weight_per_row(train, CLASS_WEIGHTS))
    extended = fit_regressions(train).extend(unseen)
    columns = {name: i for i, name in enumerate(extended.static_names)}
    gate = torch.sigmoid(extended.static[:, columns[f"{PREFIX}gate"]])
    np.testing.assert_allclose(gate, logistic.gate(unseen), atol=1e-4)
    slots = torch.sigmoid(extended.static[:, [columns[f"{PREFIX}slot{i + 1}"] for i in range(unseen.k)]])
    np.testing.assert_allclose(slots, logistic.slots(unseen), atol=2e-4)
    hazard = torch.sigmoid(extended.candidate[:, 0, -1])
    np.testing.assert_allclose(hazard, logistic.slots(unseen)[:, 0], atol=2e-4)


def test_no_training_row_is_judged_by_a_fit_that_saw_its_part():
    train = world()
    mine = train.part % FITS == 2
    # the labels of one part are turned around: its own opinions must not notice, the others' must
    turned = replace(
        train,
        right=torch.where(mine[:, None], ~train.right & (torch.arange(train.k) == 0), train.right),
        kind=torch.where(mine, torch.where(train.is_a, int(Kind.FAR_B), int(Kind.A)), train.kind),
    )
    before, after = fit_stacked(train)[0], fit_stacked(turned)[0]
    assert torch.equal(before.static[mine], after.static[mine])
    assert torch.equal(before.candidate[mine], after.candidate[mine])
    assert not torch.equal(before.static[~mine], after.static[~mine])


def test_unseen_rows_get_the_fit_on_all_and_the_columns_come_off_again():
    train = world()
    stacked, regressions = fit_stacked(train)
    assert stacked.static_names[-1] == f"{PREFIX}slot3"
    bare = without_opinions(stacked)
    assert torch.equal(bare.static, train.static)
    assert bare.candidate_names == train.candidate_names
    again = Regressions.from_arrays(regressions.arrays())
    assert again is not None
    unseen = world(seed=2)
    assert torch.equal(again.extend(unseen).static, fit_regressions(train).extend(unseen).static)
    assert Regressions.from_arrays({}) is None


@pytest.mark.parametrize("kind", [Kind.A, Kind.NEAR_B])
def test_with_one_class_the_opinion_is_a_constant(kind):
    patterns = [[kind == Kind.A, False]] * 6
    extended, _ = fit_stacked(tiny_world(patterns, [kind] * 6))
    gate = extended.static[:, extended.static_names.index(f"{PREFIX}gate")]
    assert bool((gate == gate[0]).all())
    assert (float(gate[0]) > 0) == (kind == Kind.A)
    assert bool(torch.isfinite(extended.candidate).all())


def test_a_task_with_group_r_has_the_columns_everywhere_and_its_view_adds_them():
    stuff = material(40)
    inside = ("roof", "tax")
    fold = Fold(
        split="known",
        draw=0,
        half=0,
        fold=0,
        inside=inside,
        train=tuple(f"q{i}" for i in range(24)) + tuple(f"x{i}" for i in range(7)),
        test=(*tuple(f"q{i}" for i in range(24, 30)), "x8", "x9"),
    )
    plain = build_task(stuff, TaskConfig(groups="SLC", far="", distractors=(), random_memories=2), fold, seed=0)
    task = build_task(stuff, TaskConfig(groups="SLCR", far="", distractors=(), random_memories=2), fold, seed=0)
    assert task.view.regressions is not None
    for with_r, without in (
        (task.train, plain.train),
        (task.target_train, plain.target_train),
        (task.test, plain.test),
    ):
        assert torch.equal(without_opinions(with_r).static, without.static)
        assert with_r.static.shape[1] == without.static.shape[1] + 1 + with_r.k
    assert torch.equal(task.view.regressions.extend(plain.test).static, task.test.static)
    assert torch.equal(task.target_train.static, task.train.static[: task.target_train.rows])
