"""A key that reaches the endpoint reaches nothing else, whatever the endpoint does with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.support import KEY, KEY_ENV, ThreadedMock, http_model, null_config, roll_out
from tests.faults.test_model_endpoint import FAST, split_file

BEHAVIOURS = ["ok", "echo_key", "echo_key_500", "echo_key_200", "429", "never", "truncated_json", "reset"]


def leaks(folder: Path) -> list[str]:
    """Files under ``folder`` that hold the key, or its second half."""
    needles = (KEY.encode(), KEY[-12:].encode())
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return [str(path) for path in files if any(needle in path.read_bytes() for needle in needles)]


@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.slow
def test_the_key_is_in_no_file_log_or_message(cluster: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import ray

    with ThreadedMock() as mock:
        raw = null_config(tmp_path, "secrets", "Obedient")
        raw["tasks"] = {"manifest": str(split_file(tmp_path, 24)), "split": "train"}
        raw["environment"] = {
            "kind": "tests.faults.environments:MarkedEnvironmentFactory",
            "options": {"behaviours": BEHAVIOURS},
        }
        timeouts = {"connect_s": 5.0, "read_s": 0.5, "attempt_s": 0.5, "total_s": 30.0}
        raw["model"] = http_model(mock.url, api_key_env=KEY_ENV, retries=FAST, timeouts=timeouts)
        raw["execution"] |= {"max_attempts": 2, "max_consecutive_failures": 1000, "concurrency": 12}
        raw["tracking"] = {"wandb": "offline"}
        result = roll_out(raw)
        assert mock.last_authorization == f"Bearer {KEY}", "the key did reach the endpoint"
    assert 0 < result.complete < 24
    said = capfd.readouterr()
    assert KEY not in said.out + said.err and KEY[-12:] not in said.out + said.err
    names = {path.name for path in result.run_dir.rglob("*")}
    assert {"traces.jsonl", "manifest.json", "events.jsonl", "metrics.jsonl", "config.yaml", "summary.json"} <= names
    assert any(name.endswith(".wandb") for name in names), "the offline mirror was written"
    assert leaks(result.run_dir) == []
    ray_logs = Path(ray._private.worker.global_worker.node.get_logs_dir_path())
    assert any(ray_logs.iterdir()) and leaks(ray_logs) == []
