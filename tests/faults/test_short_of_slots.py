"""Fewer environment slots than episodes in flight: nobody fails, concurrency shrinks to what there is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults.support import TTL_S, check_books, events, outcomes, raw_config, roll_out, undisturbed


@pytest.mark.ray
@pytest.mark.slow
def test_a_full_shop_shrinks_concurrency_and_fails_nobody(cluster: None, tmp_path: Path) -> None:
    raw = raw_config(
        tmp_path,
        "full",
        episodes=24,
        latency_ms=40,
        environment={"embedded": {"slots": 3, "queue_timeout_s": 0.3, "max_queue": 8, "lease_ttl_s": TTL_S}},
        execution={"actors": 2, "concurrency": 12},
    )
    result = roll_out(raw)
    assert result.status == "complete" and result.ledger["failed"] == 0
    check_books(result)
    assert events(result.run_dir, "lease_queue_full")
    metrics = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    targets = [point["pool/concurrency_target"] for point in metrics if "pool/concurrency_target" in point]
    assert max(targets) <= 24 and min(targets) < 24, targets
    assert result.stats["leases_open"] == 0
    raw["environment"]["embedded"]["slots"] = 64
    assert outcomes(result.run_dir) == undisturbed(raw, tmp_path)
