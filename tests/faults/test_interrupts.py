"""Ctrl-C, SIGTERM and spending caps end a run cleanly: recorded, with the documented exit code, and resumable."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from rayrl.schemas import JsonDict
from rayrl.traces.store import RunReader
from tests.faults.support import (
    Driver,
    at_full_speed,
    check_books,
    driver,
    null_config,
    outcomes,
    raw_config,
    roll_out,
    undisturbed,
    wait_all_slots_free,
    wait_until,
)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
EPISODES = 40


def config(root: Path, name: str, shop_url: str, latency_ms: float) -> JsonDict:
    environment = {"base_urls": [shop_url]}
    return raw_config(root, name, episodes=EPISODES, latency_ms=latency_ms, environment=environment)


def check_interrupted(running: Driver, raw: JsonDict, root: Path, shop_url: str) -> None:
    """The driver ended as documented; what ran is recorded as cancelled; a resume ends like a calm run."""
    assert running.wait() == 6, running.output
    assert "interrupted; the same command goes on where it stopped" in running.output
    assert "Traceback" not in running.output
    wait_until(lambda: not running.relatives(), lambda: f"left behind: {running.relatives()}", 30)
    scan = RunReader(running.run_dir).scan()
    assert 0 < scan.complete < EPISODES and 0 < scan.cancelled <= 12 and scan.failed == 0
    # the leases were given back by the workers themselves, before any TTL
    wait_all_slots_free(shop_url, 1.0)
    raw = at_full_speed(raw)
    result = roll_out(raw)
    assert result.status == "complete" and result.ran_now == EPISODES - scan.complete
    assert outcomes(result.run_dir) == undisturbed(raw, root)
    check_books(result)


@pytest.mark.slow
def test_ctrl_c_reaches_the_whole_process_group_and_loses_nothing(shop_url: str, tmp_path: Path) -> None:
    """A terminal sends SIGINT to every process of the group, Ray's included: only the driver may act on it."""
    raw = config(tmp_path, "ctrl-c", shop_url, 150)
    with driver(tmp_path, raw) as running:
        running.wait_for_traces(3)
        os.killpg(running.process.pid, signal.SIGINT)
        check_interrupted(running, raw, tmp_path, shop_url)


@pytest.mark.slow
def test_sigterm_is_an_interrupt_too(cluster: None, shop_url: str, tmp_path: Path) -> None:
    """What `ray job stop` sends. Ray's own handler would end the driver without a word."""
    import ray

    raw = config(tmp_path, "sigterm", shop_url, 150)
    raw["execution"]["ray_address"] = ray.get_runtime_context().gcs_address
    with driver(tmp_path, raw) as running:
        running.wait_for_traces(3)
        running.signal(signal.SIGTERM)
        check_interrupted(running, raw, tmp_path, shop_url)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    raw = null_config(tmp_path, "twice", "IgnoresCancellation", execution={"mode": "inprocess"})
    with driver(tmp_path, raw) as running:
        wait_until(lambda: (running.run_dir / "traces.jsonl").exists(), "the run starts")
        time.sleep(1.5)
        running.signal(signal.SIGINT)
        wait_until(lambda: "once more to stop at once" in running.output, "it says what a second one does")
        assert running.process.poll() is None
        running.signal(signal.SIGINT)
        began = time.monotonic()
        assert running.wait() == 130
        assert time.monotonic() - began < 15
    assert RunReader(running.run_dir).scan().complete == 0


def test_a_spending_cap_ends_a_run_cleanly_and_counts_across_resumes(tmp_path: Path) -> None:
    """3 calls of 100 tokens an episode: 40 episodes cost 12,000."""
    raw = null_config(tmp_path, "cap", "Obedient", episodes=EPISODES)
    raw["model"]["options"] = {"tokens": 100, "delay_s": 0.02}
    raw["execution"] |= {"mode": "inprocess", "max_tokens_total": 3000}
    first = roll_out(raw)
    assert first.status == "incomplete" and first.exit_code == 6 and "spending cap reached" in first.reason
    # no new episodes beyond the cap; those in flight (at most 6) finished
    assert 10 <= first.complete <= 16 and first.ledger["cancelled"] == 0 and first.ledger["failed"] == 0
    check_books(first)
    again = roll_out(raw)
    assert again.ran_now == 0 and again.complete == first.complete and "spending cap reached" in again.reason
    raw["execution"]["max_tokens_total"] = 12_000
    assert roll_out(raw).status == "complete"


def test_a_cap_in_money(tmp_path: Path) -> None:
    raw = null_config(tmp_path, "cost", "Obedient", episodes=EPISODES)
    raw["model"] |= {"options": {"tokens": 100, "delay_s": 0.02}, "prices": {"prompt": 10.0}}
    raw["execution"] |= {"mode": "inprocess", "max_cost": 0.03}
    result = roll_out(raw)
    assert result.exit_code == 6 and "cost 0.03" in result.reason and 10 <= result.complete <= 16
    check_books(result)
