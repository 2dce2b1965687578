"""The default quickstart config on a cluster with a single CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rayrl.experiment import load_run_config
from tests.faults.support import ProcessTree, trace_lines

SCRIPT = """
import sys
from actors.cluster import connect
assert connect(num_cpus=1)["cpus"] == 1.0
from jobs.rollout import main
sys.exit(main(["quickstart", "tasks.sample_size=24", "tracking.wandb=disabled", "--quiet"]))
"""


@pytest.mark.parametrize("name", ["quickstart", "local_llm", "teacher_sample", "qwen35_4b_val"])
def test_the_first_configs_people_try_fit_one_cpu(name: str) -> None:
    config, _ = load_run_config(name)
    assert config.execution.actors * config.execution.cpus_per_actor <= 1.0


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_the_quickstart_config_works_with_one_cpu(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    tree = ProcessTree([sys.executable, "-c", SCRIPT], tmp_path / "log", {"RAYRL_RUNS": str(runs)})
    try:
        assert tree.wait(500) == 0, tree.output
    finally:
        tree.clean_up()
    assert trace_lines(runs / "quickstart-naive") == 24
