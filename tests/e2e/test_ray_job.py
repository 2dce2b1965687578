"""``ray job submit --working-dir .`` on a local cluster of our own: it works, uploads little, and keeps its results."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rayrl.traces.store import RunReader
from tests.faults.support import ROOT, ProcessTree, trace_lines, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]
MAX_UPLOAD_MIB = 8.0
BIN = Path(sys.executable).parent


@dataclass
class Head:
    """A cluster started with ``ray start``, and where its jobs put their runs."""

    address: str
    temp: Path
    runs: Path

    def submit(self, *words: str, wait: bool = True) -> subprocess.CompletedProcess[str]:
        """``ray job submit --working-dir .`` from the repository, as the documentation says."""
        options = [] if wait else ["--no-wait"]
        return self.ray("job", "submit", *options, "--working-dir", ".", "--", "python", "-m", "jobs.rollout", *words)

    def ray(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command of the ``ray`` program against this cluster."""
        group, verb, *rest = words
        command = [str(BIN / "ray"), group, verb, "--address", self.address, *rest]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False, env=ENV)


ENV = {**os.environ, "RAY_AUTH_MODE": "disabled", "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}


def free_ports(n: int) -> list[int]:
    sockets = [socket.socket() for _ in range(n)]
    for item in sockets:
        item.bind(("127.0.0.1", 0))
    ports = [item.getsockname()[1] for item in sockets]
    for item in sockets:
        item.close()
    return ports


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    # not under pytest's folder: the paths of Ray's sockets may not exceed 107 bytes
    temp = Path(tempfile.mkdtemp(prefix="rj"))
    gcs, dashboard, agent, client = free_ports(4)
    command = f"""{BIN / "ray"} start --head --block --num-cpus 2 --port {gcs} --dashboard-host 127.0.0.1
        --dashboard-port {dashboard} --dashboard-agent-listen-port {agent} --ray-client-server-port {client}
        --temp-dir {temp} --object-store-memory 200000000 --disable-usage-stats""".split()
    runs = temp / "runs"
    env = {"RAY_AUTH_MODE": "disabled", "PATH": ENV["PATH"], "RAYRL_RUNS": str(runs)}
    tree = ProcessTree(command, temp / "head.log", env)
    try:
        address = f"http://127.0.0.1:{dashboard}"

        def up() -> bool:
            assert tree.process.poll() is None, tree.output
            try:
                return bool(urllib.request.urlopen(f"{address}/api/version", timeout=5).status == 200)
            except OSError:
                return False

        wait_until(up, "the dashboard answers")
        yield Head(address, temp, runs)
        tree.signal(signal.SIGTERM)
        wait_until(lambda: not tree.relatives(), lambda: f"left behind: {tree.relatives()}", 60)
    finally:
        tree.clean_up()
        shutil.rmtree(temp, ignore_errors=True)


def test_the_documented_command_runs_the_quickstart(head: Head) -> None:
    words = ("configs/quickstart.yaml", "tasks.sample_size=40", "tracking.wandb=disabled")
    done = head.submit(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = head.runs / "quickstart-naive"
    assert RunReader(run_dir).scan().complete == 40 and (run_dir / "summary.json").exists()
    # what was uploaded is the code and nothing else
    (package,) = (head.temp / "session_latest/runtime_resources/working_dir_files").glob("_ray_pkg_*/")
    files = [path for path in package.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < MAX_UPLOAD_MIB * 2**20
    top = {path.name for path in package.iterdir()}
    assert {"rayrl", "actors", "jobs", "configs"} <= top
    assert not top & {".git", ".venv", ".run", "runs", "wandb", "tests", ".mypy_cache", ".ruff_cache"}
    # the same again has nothing left to do
    again = head.submit(*words)
    assert again.returncode == 0 and trace_lines(run_dir) == 40


def test_a_run_root_that_would_be_deleted_is_refused_with_the_remedy(head: Head) -> None:
    done = head.submit("configs/quickstart.yaml", "experiment.run_root=runs")
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert "is relative, but this job runs in a temporary" in said and "experiment.run_root=~/rayrl-runs" in said


def test_a_stopped_job_can_be_resumed(head: Head) -> None:
    words = ("configs/quickstart.yaml", "experiment.name=stopped", "tasks.sample_size=60", "tracking.wandb=disabled")
    slow = (*words, "model.scripted.latency_ms=4000")
    done = head.submit(*slow, wait=False)
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = head.runs / "stopped"
    wait_until(lambda: trace_lines(run_dir) >= 3, "the job plays")
    listed = next(word for word in done.stdout.split() if word.startswith("'raysubmit_")).strip("'")
    assert head.ray("job", "stop", listed).returncode == 0
    before = RunReader(run_dir).scan()
    assert 0 < before.complete < 60 and before.cancelled > 0, "the job had time to record what it cancelled"
    finished = head.submit(*words)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    after = RunReader(run_dir).scan()
    assert after.complete == 60 and after.duplicates == 0
