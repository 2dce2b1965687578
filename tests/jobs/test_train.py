import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import orjson
import pytest
import ray
import yaml
from safetensors.torch import load_file

from jobs.train import main, run_training
from learners.checkpoint import latest_checkpoint
from learners.crossfit import CrossFitConfig
from learners.training import TrainConfig
from rayrl.config import configs_root, load_config
from rayrl.errors import RunConflictError
from rayrl.retrieval.gate import RetrievalGate
from tests.jobs.training_configs import small_config


def final_weights(output):
    newest = latest_checkpoint(Path(output) / "checkpoints")
    return newest.name, load_file(newest / "policy.safetensors")


def same(a, b):
    return a[0] == b[0] and all((a[1][k] == b[1][k]).all() for k in a[1])


@pytest.mark.parametrize("path", sorted((configs_root() / "train").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_training_configs_parse(path):
    load_config(path, CrossFitConfig if path.stem.startswith("crossfit") else TrainConfig)


def test_a_run_leaves_metrics_checkpoints_result_and_a_gate_that_answers(tmp_path):
    config = small_config(tmp_path / "run")
    result = run_training(config, quiet=True)
    assert result["complete"]
    assert result["updates"] == 6
    lines = [orjson.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_bytes().splitlines()]
    updates = [x["update"] for x in lines if "update" in x]
    assert updates == [0, 1, 2, 3, 4, 5, 6]
    assert any("train/retrieval_rate_a" in x for x in lines)
    gate = RetrievalGate(tmp_path / "run" / "gate")
    decision = gate.decide("数据血缘追溯系统依赖哪个开源组件实现？")
    assert 0 <= decision.probability <= 1
    assert len(decision.nearest) == 5
    again = run_training(config, quiet=True)  # finished: evaluates, trains nothing
    assert again["unseen"] == result["unseen"]


@pytest.mark.parametrize("staleness", [0, 1])
def test_stop_and_resume_equals_one_go(tmp_path, staleness):
    whole = small_config(tmp_path / "whole", collect={"staleness": staleness})
    half = small_config(tmp_path / "half", collect={"staleness": staleness})
    a = run_training(whole, quiet=True)
    assert not run_training(half, quiet=True, stop_after=3)["complete"]
    b = run_training(half, quiet=True)
    assert same(final_weights(whole.output), final_weights(half.output))
    assert a["unseen"] == b["unseen"]


@pytest.mark.slow
def test_kill_minus_nine_and_resume_equals_one_go(tmp_path):
    whole = small_config(tmp_path / "whole", rl={"updates": 40})
    run_training(whole, quiet=True)
    killed = small_config(tmp_path / "killed", rl={"updates": 40})
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(killed.model_dump(mode="json")))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "jobs.train", str(file), "--quiet"],
        cwd=configs_root().parent,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    checkpoints = tmp_path / "killed" / "checkpoints"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        newest = latest_checkpoint(checkpoints)
        if newest is not None and newest.name >= "step-000005":
            break
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    at = latest_checkpoint(checkpoints)
    assert "step-000005" <= at.name < "step-000040"
    with (tmp_path / "killed" / "metrics.jsonl").open("ab") as handle:
        handle.write(b'{"update": 39, "rl/loss": 1')  # a torn last line
    run_training(killed, quiet=True)
    assert same(final_weights(whole.output), final_weights(killed.output))
    lines = [orjson.loads(x) for x in (tmp_path / "killed" / "metrics.jsonl").read_bytes().splitlines()]
    updates = [x["update"] for x in lines if "update" in x]
    assert updates == sorted(set(updates))


def test_another_config_in_the_same_directory_is_refused(tmp_path):
    run_training(small_config(tmp_path / "run"), quiet=True)
    with pytest.raises(RunConflictError, match="another config"):
        run_training(small_config(tmp_path / "run", rl={"kl": 0.5}), quiet=True)


def test_another_encoder_is_refused(tmp_path):
    from rayrl.retrieval.encoders import HashEncoder

    run_training(small_config(tmp_path / "run"), quiet=True)
    with pytest.raises(RunConflictError, match="encoder"):
        RetrievalGate(tmp_path / "run" / "gate", encoder=HashEncoder(dim=32))


def test_validation_runs_never_touch_the_unseen_questions(tmp_path):
    plain = small_config(tmp_path / "a")
    validation = small_config(tmp_path / "b", fold={"validation": True})
    run_training(plain, quiet=True)
    result = run_training(validation, quiet=True)
    assert result["evaluated_on"] == "validation"
    unseen = set(orjson.loads((tmp_path / "a" / "fold.json").read_bytes())["test"])
    cut = orjson.loads((tmp_path / "b" / "fold.json").read_bytes())
    assert not unseen & (set(cut["train"]) | set(cut["test"]))


def test_bad_input_is_said_plainly(tmp_path, capsys):
    assert main(["train/faq", "rl.learning_rat=1"]) == 2
    assert "did you mean 'learning_rate'" in capsys.readouterr().err
    assert main(["train/faq", f"output={tmp_path}/x", "collect.shards=3"]) == 2
    assert "must divide" in capsys.readouterr().err
    assert main(["train/faq", f"output={tmp_path}/y", "task.pool=nowhere"]) == 2
    assert "no memory pool" in capsys.readouterr().err


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_ray_execution_gives_the_same_bits(tmp_path, staleness):
    local = small_config(tmp_path / "local", collect={"shards": 4, "staleness": staleness})
    distributed = small_config(
        tmp_path / "ray", collect={"shards": 4, "staleness": staleness, "execution": "ray", "workers": 2}
    )
    a = run_training(local, quiet=True)
    if not ray.is_initialized():
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        b = run_training(distributed, quiet=True)
    finally:
        ray.shutdown()
    assert same(final_weights(local.output), final_weights(distributed.output))
    assert a["unseen"] == b["unseen"]
