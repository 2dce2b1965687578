"""The same seeds give the same traces, whatever executes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayrl.schemas import JsonDict
from rayrl.traces.store import RunReader
from tests.faults.support import check_books, raw_config, roll_out, without_times

EXECUTIONS: dict[str, dict[str, Any]] = {
    "one": {"actors": 1, "concurrency": 1, "prefetch": 0},
    "four": {"actors": 4, "concurrency": 8},
    "inprocess": {"mode": "inprocess", "concurrency": 16},
}


def play(root: Path, how: str, **sections: Any) -> dict[str, JsonDict]:
    raw = raw_config(root, how, episodes=30, repeats=2, execution=EXECUTIONS[how], **sections)
    raw["experiment"]["name"] = "same"
    raw["experiment"]["run_root"] = str(root / how)
    result = roll_out(raw)
    assert result.status == "complete" and result.complete == 60
    check_books(result)
    records = {record["episode_id"]: without_times(record) for record in RunReader(result.run_dir).iter_records()}
    assert len(records) == 60
    return records


@pytest.mark.ray
def test_one_actor_four_actors_and_none_write_the_same_traces(cluster: None, shop_url: str, tmp_path: Path) -> None:
    environment = {"base_urls": [shop_url], "persona": True}
    model = {"scripted": {"level": "naive", "noise": 0.3, "protocol_noise": 0.1}}
    runs = {how: play(tmp_path, how, environment=environment, model=model) for how in EXECUTIONS}
    assert runs["one"] == runs["four"]
    assert runs["one"] == runs["inprocess"]
    # the comparison means something: samples of one task differ, and noise was at work
    some = next(iter(runs["one"].values()))["job"]["task_id"]
    first, second = (runs["one"][f"task-{some:06d}__sample-{n:03d}"] for n in (0, 1))
    assert first["job"]["seed"] != second["job"]["seed"]
    assert any(step.get("protocol_error") for record in runs["one"].values() for step in record["steps"])


def test_seeds_of_jobs_and_steps_never_meet(tmp_path: Path) -> None:
    from rayrl.schemas import step_seed
    from tests.faults.support import plan

    jobs = plan(raw_config(tmp_path, episodes=40, repeats=5)).jobs
    seeds = [step_seed(job.seed, index) for job in jobs for index in range(30)]
    assert len(jobs) == 200 and len({job.seed for job in jobs}) == 200
    assert len(set(seeds)) == len(seeds)
