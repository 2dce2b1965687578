"""What the experiment is, is in the fingerprint; how it is executed is not."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest

from rayrl.errors import RunConflictError
from rayrl.schemas import JsonDict
from tests.faults.support import ROOT, plan, raw_config, roll_out

ELSEWHERE: list[JsonDict] = [
    {"execution": {"actors": 7, "concurrency": 33, "prefetch": 0, "mode": "inprocess", "ray_address": "10.0.0.1:6379"}},
    {"environment": {"base_urls": ["http://10.1.2.3:4000", "http://10.1.2.4:4000"], "step_timeout_s": 3.0}},
    {"environment": {"embedded": {"slots": 3, "servers": 2, "lease_ttl_s": 9.0, "queue_timeout_s": 1.0}}},
    {"runtime": {"deadline_s": 1.0}},
    {"execution": {"max_attempts": 9, "max_consecutive_failures": 3, "max_tokens_total": 10, "watchdog_s": 5.0}},
    {"experiment": {"name": "another", "notes": "elsewhere"}, "tracking": {"wandb": "offline", "tags": ["x"]}},
]
"""Concurrency, addresses, time-outs, places, caps: the same experiment."""

OTHER: list[tuple[JsonDict, str]] = [
    ({"experiment": {"seed": 6}}, "jobs"),
    ({"tasks": {"sample_size": 29}}, "jobs"),
    ({"tasks": {"split": "val", "sample_size": 10}}, "split.name"),
    ({"tasks": {"repeats": 2}}, "jobs"),
    ({"environment": {"persona": True}}, "environment.persona"),
    ({"environment": {"embedded": {"page_size": 5}}}, "environment.page_size"),
    ({"environment": {"max_query_length": 40}}, "environment.max_query_length"),
    ({"model": {"scripted": {"level": "competent"}}}, "model.config.level"),
    ({"model": {"checkpoint_id": "step-9"}}, "model.checkpoint_id"),
    ({"prompt": {"history": "last_n", "last_n": 2}}, "prompt.history"),
    ({"runtime": {"max_actions": 12}}, "limits.max_actions"),
    ({"runtime": {"max_episode_tokens": 5000}}, "limits.max_episode_tokens"),
]


def test_where_and_how_fast_does_not_change_the_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*_: object, **__: object) -> None:
        raise AssertionError("planning opened a socket")

    base = plan(raw_config(tmp_path)).fingerprint
    monkeypatch.setattr(socket, "socket", no_network)
    for change in ELSEWHERE:
        assert plan(raw_config(tmp_path, **change)).fingerprint == base, change


@pytest.mark.parametrize(("change", "named"), OTHER, ids=[named + str(i) for i, (_, named) in enumerate(OTHER)])
def test_another_experiment_is_refused_in_the_same_directory(tmp_path: Path, change: JsonDict, named: str) -> None:
    first = raw_config(tmp_path, execution={"mode": "inprocess"})
    claim_only(first)
    assert f"  {named}: " in refusal(raw_config(tmp_path, **change), plan(first).fingerprint)


def test_sampling_prompt_and_skills_are_part_of_it(tmp_path: Path) -> None:
    def endpoint(**changes: object) -> JsonDict:
        return {"kind": "openai", "name": "m", "base_url": "http://127.0.0.1:9/v1", "temperature": 0.6, **changes}

    first = raw_config(tmp_path, model=endpoint())
    claim_only(first)
    prompt = tmp_path / "prompt.yaml"
    text = (ROOT / "configs/prompts/shop_v1.yaml").read_text(encoding="utf-8")
    prompt.write_text(text.replace("You are a shopping assistant.", "You shop."), encoding="utf-8")
    bank = tmp_path / "bank.json"
    write_bank(bank, "Compare prices before buying.")
    changes: list[tuple[JsonDict, str]] = [
        ({"model": endpoint(temperature=0.7)}, "model.temperature: 0.6 -> 0.7"),
        ({"model": endpoint(top_k=20)}, "model.top_k: (none) -> 20"),
        ({"model": endpoint(max_tokens=99)}, "model.max_tokens: 1024 -> 99"),
        ({"model": endpoint(tool_protocol="json_schema")}, "model.tool_protocol: native -> json_schema"),
        ({"prompt": {"file": str(prompt)}, "model": endpoint()}, "prompt.sha256: "),
        ({"skills": {"kind": "bank", "path": str(bank)}, "model": endpoint()}, "skills.kind: none -> bank"),
    ]
    for change, line in changes:
        assert line in refusal(raw_config(tmp_path, **change), plan(first).fingerprint)
    same = endpoint(base_url="http://10.0.0.9:8000/v1", api_key_env="SOME_KEY", max_concurrency=3)
    assert plan(raw_config(tmp_path, model=same)).fingerprint == plan(first).fingerprint


def test_a_skill_that_was_edited_is_another_experiment(tmp_path: Path) -> None:
    bank = tmp_path / "bank.json"
    raw = raw_config(tmp_path, skills={"kind": "bank", "path": str(bank)})
    write_bank(bank, "Compare prices before buying.")
    claim_only(raw)
    before = plan(raw).fingerprint
    write_bank(bank, "Compare prices before buying!")
    assert "  skills." in refusal(raw, before)


def refusal(raw: JsonDict, fingerprint: str) -> str:
    """What a run says that finds the directory of the experiment ``fingerprint`` taken."""
    assert plan(raw).fingerprint != fingerprint, "the change is not in the fingerprint"
    with pytest.raises(RunConflictError) as refused:
        roll_out(raw)
    assert refused.value.exit_code == 3
    return str(refused.value)


def write_bank(path: Path, content: str) -> None:
    skill = {"skill_id": "compare", "content": content}
    path.write_text(json.dumps({"schema": "rayrl-skillbank-v1", "skills": [skill]}))


def claim_only(raw: JsonDict) -> None:
    """Make the run directory belong to this experiment without playing it."""
    from rayrl.traces.manifest import claim

    experiment = plan(raw)
    shutil.rmtree(experiment.run_dir, ignore_errors=True)
    claim(experiment.run_dir, experiment.manifest())
