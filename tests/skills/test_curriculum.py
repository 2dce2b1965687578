from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrl.errors import ConfigError
from rayrl.export.records import dynamic_sampling, group_records
from rayrl.schemas import EpisodeJob, PublicContext
from rayrl.skills.bank import BankEntry, GateResult, SkillRecord, make_bank, save_bank
from rayrl.skills.curriculum import (
    CurriculumSkills,
    group_outcomes,
    inclusion_probability,
    retry_jobs,
    triage,
)


def bank_file(folder: Path) -> str:
    effects = {"strong": 0.1, "weak": 0.02, "harmful": -0.05}
    records = {
        name: SkillRecord(gate=GateResult(gate="g", effect=e, low=0, high=0, rank=1, status="selected"))
        for name, e in effects.items()
    }
    path = folder / "bank.json"
    save_bank(make_bank([BankEntry(skill_id=n, content=n) for n in [*effects, "unmeasured"]], records), path)
    return str(path)


def job(task: int, sample: int) -> EpisodeJob:
    return EpisodeJob(task_id=task, sample_id=sample, seed=task * 100 + sample, split="train")


@given(st.floats(-1, 1), st.floats(0, 0.5), st.floats(0.5, 1), st.floats(0.01, 1))
def test_inclusion_stays_within_its_limits_and_grows_with_the_effect(effect, low, high, scale):
    p = inclusion_probability(effect, rho_min=low, rho_max=high, scale=scale)
    assert low <= p <= high
    assert inclusion_probability(effect + 0.1, rho_min=low, rho_max=high, scale=scale) >= p


def test_siblings_share_their_skills_and_a_share_of_groups_has_none(tmp_path):
    provider = CurriculumSkills(bank_file(tmp_path), seed=1, skill_free=0.25)
    free, seen = 0, dict.fromkeys(provider.probabilities, 0)
    for task in range(2000):
        sets = [[e.skill_id for e in provider.assigned(job(task, s))] for s in range(3)]
        assert sets[0] == sets[1] == sets[2]
        free += not sets[0]
        for name in sets[0]:
            seen[name] += 1
    assert free / 2000 == pytest.approx(0.25 + 0.75 * 0.1 * 0.74 * 0.9 * 0.9, abs=0.03)
    for name, count in seen.items():
        assert count / 2000 == pytest.approx(0.75 * provider.probabilities[name], abs=0.03)
    assert provider.probabilities == pytest.approx({"strong": 0.9, "weak": 0.26, "harmful": 0.1, "unmeasured": 0.1})
    context = PublicContext(job=job(3, 0), instruction="", persona={}, observation_state={})
    chosen = asyncio.run(provider.select(context))
    assert [s.skill_id for s in chosen] == [e.skill_id for e in provider.assigned(job(3, 0))]
    other = CurriculumSkills(bank_file(tmp_path), seed=2, skill_free=0.25)
    assert other.identity() != provider.identity()
    assert any(other.assigned(job(t, 0)) != provider.assigned(job(t, 0)) for t in range(20))


def test_impossible_curricula_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="rho_min"):
        CurriculumSkills(bank_file(tmp_path), rho_min=0.9, rho_max=0.1)


def record(task: int, sample: int, success: int | None) -> dict:
    complete = success is not None
    return {
        "schema": "rayrl-episode-v1",
        "episode_id": f"task-{task:06d}__sample-{sample:03d}",
        "status": "completed" if complete else "failed",
        "job": {"task_id": task, "sample_id": sample, "seed": 1, "split": "train"},
        "final": {"done": True, "reward": float(success), "reward_detail": {"r_success": success}}
        if complete
        else None,
        "conversation": [],
        "steps": [],
    }


def test_all_wrong_groups_are_retried_once_and_sorted():
    records = [
        *(record(1, s, 0) for s in range(3)),
        *(record(2, s, 0) for s in range(2)),
        record(3, 0, 1),
        record(3, 1, 0),
        record(4, 0, 1),
        record(5, 0, None),
        record(6, 0, 0),
    ]
    groups = group_outcomes(records)
    jobs = retry_jobs(groups, experiment_seed=7)
    assert [(j.task_id, j.sample_id) for j in jobs] == [(1, 3), (2, 2), (6, 1)]
    retries = group_outcomes([record(1, 3, 1), record(2, 2, 0), record(6, 1, None)])
    assert {r["task_id"]: r["class"] for r in triage(groups, retries)} == {
        1: "internalisation_deficit",
        2: "analyst",
        3: "mixed",
        4: "all_right",
        5: "incomplete",
        6: "retry_missing",
    }


def test_exported_groups_are_those_with_a_signal():
    records = [record(1, 0, 0), record(1, 1, 0), record(3, 0, 1), record(3, 1, 0)]
    kept, report = dynamic_sampling(group_records(records))
    assert [g.key for g in kept] == [("train", 3)] and report.zero_spread_all_wrong == 1
