"""The default quickstart config on a cluster with a single CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.faults.support import ProcessTree, trace_lines

SCRIPT = """
import sys
from actors.cluster import connect
assert connect(num_cpus=1)["cpus"] == 1.0
from jobs.rollout import main
sys.exit(main(["quickstart", "tasks.sample_size=24", "tracking.wandb=disabled", "--quiet"]))
"""


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_the_quickstart_config_works_with_one_cpu(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    tree = ProcessTree([sys.executable, "-c", SCRIPT], tmp_path / "log", {"RAYRL_RUNS": str(runs)})
    try:
        assert tree.wait(240) == 0, tree.output
    finally:
        tree.clean_up()
    assert trace_lines(runs / "quickstart-naive") == 24
