"""What the rollout benchmark says about its rows: same work or invalid, ratios inside a round."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import rollouts
from benchmarks.rollout_contenders import Work, bare, null_config, rayrl
from rayrl.testing.mock_endpoint import serve


def row(name: str, number: int, rate: float, **more: Any) -> dict[str, Any]:
    base = {"contender": name, "concurrency": 8, "round": number, "valid": True, "rollouts": 10, "cpu_s": 0.1}
    return {**base, "rollouts_per_s": rate, **more}


def test_ratios_are_taken_inside_a_round() -> None:
    # the machine halves its speed in round 1; the ratio of the medians would say 133 %
    rows = [row("bare", 0, 100.0), row("ray", 0, 80.0), row("bare", 1, 40.0), row("ray", 1, 32.0)]
    rows += [row("bare", 2, 50.0), row("ray", 2, 40.0), row("peer", 0, 8.0), row("peer", 1, 4.0)]
    by_name = {s["contender"]: s for s in rollouts.medians(rows, base="bare", mine="ray")}
    assert by_name["ray"]["to_bare"] == 0.8
    assert by_name["peer"]["rayrl_to_it"] == pytest.approx(9.0)
    assert by_name["bare"]["rollouts_per_s"] == 50.0


def test_a_contender_without_a_valid_row_is_said_to_be_invalid() -> None:
    rows = [row("bare", 0, 100.0), row("ray", 0, 80.0, valid=False)]
    summaries = rollouts.medians(rows, base="bare", mine="ray")
    assert [s["valid"] for s in summaries] == [True, False]
    assert "| 8 | ray | invalid |" in rollouts.table(summaries, per_rollout_s=0.25)


@pytest.mark.parametrize(
    ("stats", "calls", "valid"),
    [
        ({"requests": 50, "behaviours": {"ok": 50}}, 50, True),
        ({"requests": 49, "behaviours": {"ok": 49}}, 50, False),
        ({"requests": 50, "behaviours": {"ok": 50}}, 45, False),
        ({"requests": 50, "behaviours": {"ok": 49, "500": 1}}, 50, False),
    ],
)
def test_only_the_same_work_counts(stats: dict[str, Any], calls: int, valid: bool) -> None:
    measured = row("ray", 0, 80.0, calls=calls)
    rollouts.check_calls(measured, stats, steps=5)
    assert measured["valid"] is valid


def test_measurements_are_long_enough_and_bounded() -> None:
    args = argparse.Namespace(steps=5, latency_ms=50.0, scale=1.0)
    assert rollouts.fast_rollouts(32, args) == 768
    assert rollouts.fast_rollouts(256, args) == 3072
    assert rollouts.peer_rollouts(32) == 120


def test_contenders_send_the_same_conversation(tmp_path: Path) -> None:
    # what the model is told must not differ in length, or the loop would be measured on lighter requests
    async def last_request(play: Any) -> dict[str, Any]:
        async with serve() as mock:
            work = Work.load(Work(mock.url, 3).save(tmp_path / "work.json"))
            await play(work)
            assert mock.requests == 3
            assert mock.last_request is not None
            return mock.last_request

    def run_rayrl(work: Work) -> None:
        config = null_config(work, tmp_path, rollouts=1, concurrency=1, mode="inprocess", actors=1)
        assert rayrl(config, tmp_path)["calls"] == 3

    theirs = asyncio.run(last_request(lambda work: bare(work, 1, 1)))
    ours = asyncio.run(last_request(lambda work: asyncio.to_thread(run_rayrl, work)))
    assert [m["role"] for m in ours["messages"]] == [m["role"] for m in theirs["messages"]]
    assert [m["content"] or "" for m in ours["messages"]] == [m["content"] or "" for m in theirs["messages"]]
    assert ours["tools"] == theirs["tools"]
    assert abs(len(json.dumps(ours)) - len(json.dumps(theirs))) < 100
