"""kill -9 of the driver at random points: nothing of the run stays behind, and resumes end like a calm run."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from rayrl.schemas import JsonDict
from rayrl.traces.store import RunReader
from tests.faults.support import (
    actor_pids,
    at_full_speed,
    check_books,
    driver,
    health,
    outcomes,
    raw_config,
    roll_out,
    shop_pids,
    trace_lines,
    undisturbed,
    wait_all_slots_free,
    wait_until,
)

pytestmark = pytest.mark.ray
EPISODES = 60
GONE_WITHIN_S = 30.0


def config(root: Path, name: str, **sections: Any) -> JsonDict:
    return raw_config(root, name, episodes=EPISODES, latency_ms=40, **sections)


def kill_early(root: Path, raw: JsonDict, number: int) -> None:
    """Kill a driver while it starts: during imports, the start of Ray, of the shop or of the actors."""
    with driver(root, raw, "execution.actors=2") as running:
        time.sleep(random.Random(number).uniform(0.5, 8.0))
        running.signal(signal.SIGKILL)
        running.wait()
        wait_until(lambda: not running.relatives(), lambda: f"left behind: {running.relatives()}", GONE_WITHIN_S)


def kill_round(root: Path, raw: JsonDict, number: int) -> None:
    """Start or resume the run, kill its driver somewhere in the middle, and see everything of it go."""
    rng = random.Random(number)
    with driver(root, raw, "execution.actors=2") as running:
        running.wait_for_traces(trace_lines(running.run_dir) + rng.randrange(1, 12))
        before = running.relatives()
        assert any("raylet" in line for line in before.values()), before
        assert any("gcs_server" in line for line in before.values()), before
        assert len(actor_pids(running.process.pid)) == 2
        running.signal(signal.SIGKILL)
        running.wait()
        wait_until(lambda: not running.relatives(), lambda: f"left behind: {running.relatives()}", GONE_WITHIN_S)


def kill_until_done(root: Path, shop_url: str, name: str, rounds: range, *, embedded: bool) -> None:
    """Kill in every round; when a run is nearly done, go on with the next one."""
    environment: JsonDict = {} if embedded else {"base_urls": [shop_url]}
    calm = undisturbed(config(root, "calm", environment=environment), root)
    run = 0
    raw = config(root, f"{name}-{run}", environment=environment)
    for number in rounds:
        kill_round(root, raw, number)
        if number == rounds[-1] or trace_lines(root / "runs" / f"{name}-{run}") > EPISODES - 24:
            finish(raw, calm)
            run += 1
            raw = config(root, f"{name}-{run}", environment=environment)
    if not embedded:
        wait_all_slots_free(shop_url)


def finish(raw: JsonDict, calm: dict[str, tuple[float, tuple[str, ...]]]) -> None:
    """Resume without Ray, and compare with the calm run."""
    raw = at_full_speed(raw)
    run_dir = Path(raw["experiment"]["run_root"]) / raw["experiment"]["name"]
    before = RunReader(run_dir).scan()
    result = roll_out(raw)
    assert result.status == "complete" and result.complete == EPISODES, result.reason
    assert result.ran_now == EPISODES - before.complete, "an episode that was complete was played again"
    assert outcomes(result.run_dir) == calm
    check_books(result)
    assert (run_dir / "private.jsonl").stat().st_mode & 0o777 == 0o600


@pytest.mark.timeout(600)
def test_killed_drivers_leave_nothing_behind_and_resume(shop_url: str, tmp_path: Path) -> None:
    kill_until_done(tmp_path, shop_url, "outside", range(2), embedded=False)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("embedded", [True, False])
def test_twenty_killed_drivers(shop_url: str, tmp_path: Path, embedded: bool) -> None:
    kill_until_done(tmp_path, shop_url, f"embedded-{embedded}", range(2, 12), embedded=embedded)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_drivers_killed_while_they_start(tmp_path: Path) -> None:
    raw = config(tmp_path, "early")
    for number in range(6):
        kill_early(tmp_path, raw, number)
    result = roll_out(at_full_speed(raw))
    assert result.status == "complete" and outcomes(result.run_dir) == undisturbed(raw, tmp_path)
    check_books(result)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_embedded_shop_goes_with_its_killed_driver(tmp_path: Path) -> None:
    raw = config(tmp_path, "embedded", execution={"mode": "inprocess"})
    with driver(tmp_path, raw) as running:
        running.wait_for_traces(3)
        (pid,) = shop_pids(running.process.pid)
        assert pid in running.relatives()
        running.signal(signal.SIGKILL)
        running.wait()
        wait_until(lambda: not running.relatives(), "the shop server outlived its driver", GONE_WITHIN_S)
    finish(raw, undisturbed(config(tmp_path, "calm"), tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_second_process_on_the_same_run_is_refused(shop_url: str, tmp_path: Path) -> None:
    environment = {"base_urls": [shop_url]}
    execution = {"mode": "inprocess", "concurrency": 1}
    raw = raw_config(tmp_path, "twice", latency_ms=100, environment=environment, execution=execution)
    with driver(tmp_path, raw) as first:
        first.wait_for_traces(1)
        with driver(tmp_path, raw) as second:
            assert second.wait() == 3
            assert "in use by another process" in second.output
        assert first.process.poll() is None
        # the lock ends with its holder, however it ends
        first.signal(signal.SIGKILL)
        first.wait()
    raw = raw_config(tmp_path, "twice", environment=environment, execution={"mode": "inprocess"})
    assert roll_out(raw).status == "complete"
    assert health(shop_url)["ready"]
