"""The worker: every submitted job yields one result, capacity is kept, drains are bounded."""

from __future__ import annotations

import asyncio
import pickle
import time

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from rayrl import worker as worker_module
from rayrl.config import configs_root
from rayrl.environments.config import CustomEnvironmentConfig
from rayrl.errors import Blame, EnvironmentFaultError, ModelTransportError
from rayrl.models.config import ModelConfig
from rayrl.prompts import PromptConfig, load_prompt
from rayrl.runtime import EpisodeOutcome, RuntimeConfig
from rayrl.skills.providers import NoSkills, SkillsConfig
from rayrl.worker import (
    AdaptiveConcurrency,
    Attempt,
    RolloutWorker,
    WorkerSpec,
    failed_without_record,
    finish,
)
from tests.doubles import FakeFactory, FakeModel, answer, hang, job, raising


def spec(**more):
    options = {
        "model": ModelConfig(kind="scripted"),
        "environment": CustomEnvironmentConfig(
            kind="rayrl.testing.null_environment:NullEnvironmentFactory", options={"steps": 2}
        ),
        "prompt": PromptConfig(),
        "template": load_prompt(configs_root() / "prompts" / "shop_v1.yaml"),
        "skills": NoSkills(),
        "runtime": RuntimeConfig(),
        "provenance": {"experiment": "w"},
        "concurrency": 4,
    }
    return WorkerSpec(**(options | more))


def make(monkeypatch, environments=None, model=None, **more):
    """A worker over hand-written parts."""
    if environments is not None:
        monkeypatch.setattr(worker_module, "build_environments", lambda *_, **__: environments)
    if model is not None:
        monkeypatch.setattr(worker_module, "build_model", lambda *_, **__: model)
    return RolloutWorker(spec(**more))


def attempts(*tasks):
    return [Attempt(job(task), 1) for task in tasks]


async def collect(worker, n, limit_s=5.0):
    found = []
    until = time.monotonic() + limit_s
    while len(found) < n and time.monotonic() < until:
        found += (await worker.drain(0.2)).finished
    return found


async def test_every_job_comes_back_once_and_complete():
    worker = RolloutWorker(spec())
    await worker.start()
    await worker.submit(attempts(*range(25)))
    found = await collect(worker, 25)
    await worker.stop()
    assert sorted(f.episode_id for f in found) == sorted(job(t).episode_id for t in range(25))
    assert all(f.complete and f.status == "completed" and f.reward == f.success == 1.0 for f in found)
    record = orjson.loads(found[0].record)
    assert record["schema"] == "rayrl-episode-v1" and b"\n" not in found[0].record
    assert (found[0].model_steps, found[0].prompt_tokens) == (2, record["usage"]["prompt_tokens"])


async def test_capacity_is_never_exceeded(monkeypatch):
    running, peak = 0, 0

    async def slow(*_):
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0.01)
        running -= 1

    worker = make(monkeypatch, FakeFactory(steps=1, on_reset=slow), FakeModel(), concurrency=3)
    await worker.submit(attempts(*range(12)))
    report = await worker.drain(0.0)
    assert report.queued + len(report.active) + len(report.finished) == 12
    assert len(await collect(worker, 12 - len(report.finished))) + len(report.finished) == 12
    await worker.stop()
    assert peak == 3


async def test_a_drain_returns_in_time_while_everything_hangs_and_says_where(monkeypatch):
    worker = make(monkeypatch, FakeFactory(on_reset=hang), FakeModel(), concurrency=2)
    await worker.submit(attempts(1, 2, 3))
    await asyncio.sleep(0)
    began = time.monotonic()
    report = await worker.drain(0.05)
    assert time.monotonic() - began < 2
    assert (report.finished, report.queued) == ([], 1)
    assert {(name, stage) for name, stage, *_ in report.active} == {(job(t).episode_id, "reset") for t in (1, 2)}
    again = await worker.drain(0.0)
    assert again.transitions == report.transitions  # what the watchdog looks at
    left = (await worker.stop()).finished
    assert sorted(f.status for f in left) == ["cancelled"] * 3


async def test_drain_hands_out_at_most_max_items_and_loses_none():
    worker = RolloutWorker(spec(concurrency=16))
    await worker.submit(attempts(*range(10)))
    while worker._tasks or worker._queue:
        await asyncio.sleep(0.01)
    sizes = []
    for _ in range(4):
        sizes.append(len((await worker.drain(0.0, max_items=4)).finished))
    await worker.stop()
    assert sizes == [4, 4, 2, 0]


async def test_cancelling_some_leaves_the_others(monkeypatch):
    environments = FakeFactory(on_reset=hang)
    worker = make(monkeypatch, environments, FakeModel(), concurrency=2)
    await worker.submit(attempts(1, 2, 3, 4))
    await asyncio.sleep(0.01)
    environments.on_reset = None
    await worker.cancel([job(1).episode_id, job(4).episode_id])
    await asyncio.sleep(0.05)
    await worker.cancel([job(2).episode_id])
    found = {f.episode_id: f for f in await collect(worker, 4)}
    await worker.stop()
    assert {name: f.status for name, f in found.items()} == {
        job(1).episode_id: "cancelled",
        job(2).episode_id: "cancelled",
        job(3).episode_id: "completed",
        job(4).episode_id: "cancelled",
    }
    assert found[job(4).episode_id].message == "cancelled before it started"


async def test_a_cancellation_that_overtakes_the_first_step_still_gives_a_result(monkeypatch):
    worker = make(monkeypatch, FakeFactory(), FakeModel(), concurrency=2)
    await worker.submit(attempts(1, 2, 3))
    await worker.cancel()  # no step of the loop in between: two tasks exist, their bodies never ran
    found = await collect(worker, 3, limit_s=1.0)
    await worker.stop()
    assert sorted(f.episode_id for f in found) == [job(t).episode_id for t in (1, 2, 3)]
    assert {f.status for f in found} == {"cancelled"}
    assert worker._tasks == {} and worker._progress == {}


async def test_a_failing_sibling_does_not_touch_the_others(monkeypatch):
    def sick(env, made):
        if len(environments.opened) % 2:
            raise EnvironmentFaultError("no", code="http_500", stage="step")

    environments = FakeFactory(steps=1, on_step=sick)
    worker = make(monkeypatch, environments, FakeModel(), concurrency=1)
    await worker.submit(attempts(*range(6)))
    found = await collect(worker, 6)
    await worker.stop()
    assert sorted(f.status for f in found) == ["completed"] * 3 + ["failed"] * 3
    failed = next(f for f in found if f.status == "failed")
    assert (failed.blame, failed.code, failed.complete) == ("environment", "http_500", False)


async def test_what_cannot_be_written_down_is_a_failed_attempt_not_a_lost_one(monkeypatch):
    odd = answer(done=True, reward=1.0, reward_detail={"of": object()})
    worker = make(monkeypatch, FakeFactory(on_step=lambda *_: odd), FakeModel())
    await worker.submit(attempts(1))
    (found,) = await collect(worker, 1)
    await worker.stop()
    assert (found.status, found.code, found.blame) == ("failed", "runtime_fault", Blame.INFRASTRUCTURE)
    assert orjson.loads(found.record)["episode_id"] == job(1).episode_id


@pytest.mark.parametrize("detail", [{"r_success": None}, {"r_success": "yes"}, {}])
async def test_an_odd_reward_detail_does_not_cost_the_episode(monkeypatch, detail):
    done = answer(done=True, reward=0.5, reward_detail=detail)
    worker = make(monkeypatch, FakeFactory(on_step=lambda *_: done), FakeModel())
    await worker.submit(attempts(1))
    (found,) = await collect(worker, 1)
    await worker.stop()
    assert (found.status, found.reward, found.success) == ("completed", 0.5, 0.0)


async def test_a_shortage_shrinks_capacity_and_health_grows_it_back(monkeypatch):
    short = EnvironmentFaultError("full", code="no_free_slot", stage="reset")
    environments = FakeFactory(steps=1, on_reset=raising(short))
    worker = make(monkeypatch, environments, FakeModel(), concurrency=8)
    await worker.submit(attempts(*range(8)))
    await collect(worker, 8)
    assert (await worker.drain(0.0)).target == 4
    environments.on_reset = None
    await worker.submit(attempts(*range(8, 60)))
    await collect(worker, 52)
    assert (await worker.drain(0.0)).target == 8
    await worker.stop()


async def test_events_and_gauges_reach_the_report(monkeypatch):
    worker = make(monkeypatch, FakeFactory(steps=1), FakeModel())
    worker._event({"event": "retry"})
    await worker.submit(attempts(1, 2))
    await collect(worker, 2)
    worker._event({"event": "again"})
    report = await worker.drain(0.0)
    assert [event["event"] for event in report.events] == ["again"] and report.events[0]["time"] > 0
    assert report.gauges["leases_open"] == 0 and report.gauges["model_steps"] == 2
    assert report.gauges["prompt_tokens"] == 20
    await worker.stop()


async def test_events_are_bounded(monkeypatch):
    worker = make(monkeypatch, FakeFactory(), FakeModel())
    for number in range(5000):
        worker._event({"event": "x", "n": number})
    events = (await worker.drain(0.0)).events
    assert len(events) == worker_module.MAX_EVENTS and events[-1]["n"] == 4999
    await worker.stop()


def test_the_spec_is_picklable_and_says_nothing_of_the_token():
    made = spec(admin_token=SecretStr("hush"))
    again = pickle.loads(pickle.dumps(made))  # noqa: S301 - it travels to Ray actors this way
    assert again.template == made.template and again.admin_token.get_secret_value() == "hush"
    assert "hush" not in repr(made)


async def test_a_provider_given_as_config_is_built_in_place():
    worker = RolloutWorker(spec(skills=SkillsConfig(kind="none")))
    await worker.submit(attempts(1))
    (found,) = await collect(worker, 1)
    await worker.stop()
    assert found.complete


# --- pure parts


def test_a_record_made_without_the_worker_reads_like_any_other():
    made = failed_without_record(
        Attempt(job(4), 2), {"experiment": "w"}, blame=Blame.INFRASTRUCTURE, code="worker_died", message="gone"
    )
    record = orjson.loads(made.record)
    assert (record["attempt"], record["status"], record["error"]["code"]) == (2, "failed", "worker_died")
    assert record["steps"] == [] and record["final"] is None and not made.complete


async def test_an_http_status_keeps_its_code():
    from tests.test_runtime import build

    refused = ModelTransportError("401", code="http_status", stage="model", detail={"status": 401})
    outcome: EpisodeOutcome = await build(FakeModel(refused)).run(job())
    made = finish(Attempt(job(), 1), outcome)
    assert made.code == orjson.loads(made.record)["error"]["code"] == "http_status"


CODES = st.lists(st.sampled_from([None, "no_free_slot", "queue_timeout", "http_500"]), max_size=200)


@given(maximum=st.integers(1, 64), codes=CODES, gap=st.floats(0, 5))
def test_capacity_stays_between_one_and_the_maximum(maximum, codes, gap):
    capacity = AdaptiveConcurrency(maximum)
    for n, code in enumerate(codes):
        before = capacity.target
        capacity.finished(code, n * gap)
        assert 1 <= capacity.target <= maximum
        assert capacity.target >= before // 2


def test_one_incident_halves_once():
    capacity = AdaptiveConcurrency(16, window_s=2.0)
    for _ in range(16):
        capacity.finished("no_free_slot", 10.0)
    assert capacity.target == 8
    capacity.finished("no_free_slot", 12.5)
    assert capacity.target == 4


def test_other_failures_and_a_fixed_capacity_change_nothing():
    capacity = AdaptiveConcurrency(16)
    capacity.finished("http_500", 1.0)
    assert capacity.target == 16
    fixed = AdaptiveConcurrency(16, enabled=False)
    fixed.finished("no_free_slot", 1.0)
    assert fixed.target == 16
