"""slime's custom rollout plays the same episodes as `rayrl run`: same model and seeds, same traces."""

import asyncio
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from jobs import cli
from rayrl.errors import ConfigError
from rayrl.export import slime_rollout
from rayrl.export.slime import record_from_sample, request_from_job
from rayrl.schemas import EpisodeJob
from rayrl.traces.schema import expand
from rayrl.traces.store import RunReader


class Status(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Sample:
    """What slime hands in: an object with these attributes (and more)."""

    group_index: int
    index: int
    metadata: dict
    status: Status = Status.PENDING
    prompt: Any = ""
    reward: Any = None
    response: str = ""
    remove_sample: bool = False
    extra: dict = field(default_factory=dict)


def timeless(record):
    """The record without what no two runs share: clock readings and random ids."""
    out = expand(record)
    for key in ("started_at", "ended_at", "duration_s"):
        out.pop(key, None)
    out["provenance"] = {k: v for k, v in out["provenance"].items() if k != "experiment"}
    for step in out["steps"]:
        step["model"].pop("latency_ms", None)
    return out


async def rollout(args, requests, sampling):
    samples = [Sample(r["group_index"], r["index"], r["metadata"]) for r in requests]
    out = await asyncio.gather(*(slime_rollout.generate(args, sample, sampling) for sample in samples))
    for task in slime_rollout._built.values():
        await task.result().aclose()
    slime_rollout._built.clear()
    return out


@pytest.fixture
def args(shop_run):
    config = shop_run(tasks__sample_size=6, model__scripted__level="naive")
    return SimpleNamespace(rayrl_config=str(config), rayrl_overrides="")


def test_same_traces_as_rayrl_run(args, capsys):
    assert cli.main(["run", args.rayrl_config, "--json"]) == 0
    run_dir = orjson.loads(capsys.readouterr().out)["run_dir"]
    ours = {r["episode_id"]: r for r in RunReader(run_dir).results()}
    requests = [request_from_job(EpisodeJob(**r["job"]), index=i) for i, r in enumerate(ours.values())]
    # everything kept, so that whole records can be compared
    keep = slime_rollout.ConversationOptions(reasoning=True, persona=True, protocol_errors=True)
    original = slime_rollout.SlimeRollout.build

    async def build(path, overrides):
        return await original(path, overrides, options=keep)

    slime_rollout.SlimeRollout.build = build
    try:
        samples = asyncio.run(rollout(args, requests, {"temperature": 0.0, "top_p": 1.0, "max_new_tokens": 1024}))
    finally:
        slime_rollout.SlimeRollout.build = original
    assert len(samples) == len(ours) == 6
    for sample in samples:
        record = record_from_sample({"metadata": sample.metadata})
        assert sample.status is Status.COMPLETED
        assert sample.reward == record["final"]["reward"]
        assert timeless(record) == timeless(ours[record["episode_id"]])


def test_contradicting_sampling_is_refused(args):
    job = EpisodeJob(task_id=0, sample_id=0, seed=1, split="train")
    with pytest.raises(ConfigError, match=r"slime samples with temperature=0\.8, .* model\.temperature=0\.0"):
        asyncio.run(rollout(args, [request_from_job(job, index=0)], {"temperature": 0.8}))
    slime_rollout._built.clear()


def test_settings_come_from_arguments_or_the_environment(monkeypatch):
    with pytest.raises(ConfigError, match="RAYRL_CONFIG"):
        slime_rollout._settings(SimpleNamespace())
    monkeypatch.setenv("RAYRL_CONFIG", "c.yaml")
    monkeypatch.setenv("RAYRL_OVERRIDES", "a.b=1 c.d=2")
    args = SimpleNamespace(sglang_router_ip="127.0.0.1", sglang_router_port=3000)
    assert slime_rollout._settings(args) == ("c.yaml", ("a.b=1", "c.d=2", "model.base_url=http://127.0.0.1:3000/v1"))
