"""kill -9 of a rollout actor and of the shop server, at random points of a run: the results are those of a calm run."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from jobs.rollout import RunResult
from rayrl.schemas import JsonDict
from rayrl.traces.store import RunReader
from tests.faults.support import (
    actor_pids,
    check_books,
    events,
    outcomes,
    plan,
    raw_config,
    roll_out,
    saboteur,
    shop_pids,
    trace_lines,
    undisturbed,
    wait_all_slots_free,
)

pytestmark = pytest.mark.ray
EPISODES = 40


def config(root: Path, name: str, **sections: Any) -> JsonDict:
    return raw_config(root, name, episodes=EPISODES, latency_ms=15, **sections)


def kill_actor_round(root: Path, shop_url: str, number: int) -> RunResult:
    """One run in which a random actor dies once a random number of episodes is on disk."""
    rng = random.Random(number)
    raw = config(root, f"actor-{number}", environment={"base_urls": [shop_url]})
    after = rng.randrange(0, EPISODES - 12)
    run_dir = plan(raw).run_dir
    with saboteur(
        lambda: len(actor_pids()) >= 2 and trace_lines(run_dir) >= after and (run_dir / "traces.jsonl").exists(),
        lambda: os.kill(rng.choice(actor_pids()), signal.SIGKILL),
    ):
        return roll_out(raw)


def kill_shop_round(root: Path, number: int) -> RunResult:
    """One run in which the embedded shop server dies once a random number of episodes is on disk."""
    raw = config(root, f"shop-{number}")
    after = random.Random(number).randrange(0, EPISODES - 12)
    run_dir = plan(raw).run_dir
    others = set(shop_pids())  # of fixtures; process ids wrap around, so the newest is not the highest

    def own() -> list[int]:
        return [pid for pid in shop_pids() if pid not in others]

    with saboteur(
        lambda: trace_lines(run_dir) >= after and (run_dir / "traces.jsonl").exists() and own(),
        lambda: os.kill(own()[-1], signal.SIGKILL),
    ):
        return roll_out(raw)


def check_like_calm(result: RunResult, calm: dict[str, tuple[float, tuple[str, ...]]]) -> None:
    assert result.status == "complete" and result.exit_code == 0, result.reason
    assert outcomes(result.run_dir) == calm
    check_books(result)


def check_actor_round(result: RunResult, calm: dict[str, tuple[float, tuple[str, ...]]]) -> None:
    check_like_calm(result, calm)
    assert len(events(result.run_dir, "worker_lost")) == 1
    assert len(events(result.run_dir, "worker_replaced")) == 1
    failed = [r for r in RunReader(result.run_dir).iter_records() if r["status"] == "failed"]
    died = [r for r in failed if r["error"]["code"] == "worker_died"]
    assert died and {r["error"]["class"] for r in died} == {"infrastructure"} and all(r["final"] is None for r in died)
    # on a machine so busy that heartbeats come late, leases may expire as well
    assert {r["error"]["code"] for r in failed} <= {"worker_died", "lease_expired"}


def check_shop_round(result: RunResult, calm: dict[str, tuple[float, tuple[str, ...]]]) -> None:
    check_like_calm(result, calm)
    died, back = (events(result.run_dir, f"shop_server_{what}") for what in ("died", "restarted"))
    # a kill after the last episode's last call may end with the run, before anybody had to notice
    assert len(died) == len(back) == 1 or (not died and result.ledger["failed"] == 0)
    failed = [r["error"] for r in RunReader(result.run_dir).iter_records() if r["status"] == "failed"]
    assert all(error["class"] == "environment" for error in failed), failed
    assert result.stats["leases_open"] == 0


@pytest.mark.parametrize("rounds", [range(2), pytest.param(range(2, 20), marks=pytest.mark.slow)], ids=["2", "18"])
@pytest.mark.timeout(1800)
def test_killed_actors_lose_nothing(cluster: None, shop_url: str, tmp_path: Path, rounds: range) -> None:
    calm = undisturbed(config(tmp_path, "calm", environment={"base_urls": [shop_url]}), tmp_path)
    for number in rounds:
        check_actor_round(kill_actor_round(tmp_path, shop_url, number), calm)
    wait_all_slots_free(shop_url)


@pytest.mark.parametrize("rounds", [range(2), pytest.param(range(2, 20), marks=pytest.mark.slow)], ids=["2", "18"])
@pytest.mark.timeout(1800)
def test_a_killed_shop_server_comes_back_and_loses_nothing(cluster: None, tmp_path: Path, rounds: range) -> None:
    calm = undisturbed(config(tmp_path, "calm"), tmp_path)
    for number in rounds:
        check_shop_round(kill_shop_round(tmp_path, number), calm)
