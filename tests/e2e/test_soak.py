"""Ten thousand episodes: nothing grows, leaks or goes missing. The figures come from ``benchmarks/soak.py``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.faults.support import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import soak


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(3600)
def test_ten_thousand_episodes(cluster: None, tmp_path: Path) -> None:
    figures = soak.soak(tmp_path, episodes=10_000)
    assert figures["episodes"] >= 10_000 and figures["samples"] > 40
    assert soak.broken_limits(figures) == [], figures


def test_the_limits_can_be_broken() -> None:
    good = {
        "episodes": 4,
        "complete": 4,
        "failed_attempts": 0,
        "ledger_closed": True,
        "records": 4,
        "duplicates": 0,
        "leases_open": 0,
        "slots_taken_at_server": 0,
        "rss_growth": 0.01,
        "object_store_peak_mib": 1.0,
        "bytes_per_step": 2000.0,
    }
    assert soak.broken_limits(good) == []
    for change in (
        {"complete": 3, "records": 3},
        {"ledger_closed": False},
        {"records": 5},
        {"duplicates": 1},
        {"slots_taken_at_server": 1},
        {"rss_growth": 0.11},
        {"object_store_peak_mib": 65.0},
        {"bytes_per_step": 4097.0},
    ):
        assert len(soak.broken_limits({**good, **change})) == 1, change
