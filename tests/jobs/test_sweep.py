import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import orjson
import pytest
import yaml

from jobs.sweep import SweepConfig, cpus_needed, finished, main, make_trials, mark_stopped
from rayrl.config import configs_root, load_config
from rayrl.errors import ConfigError
from tests.jobs.training_configs import small_config


def sweep(tmp_path, **changes):
    train = tmp_path / "train.yaml"
    base = small_config(tmp_path / "unused", rl={"updates": 4}).model_dump(mode="json")
    base["tracking"]["wandb"] = "offline"
    train.write_text(yaml.safe_dump(base))
    values = {
        "name": "s",
        "output": str(tmp_path / "sweep"),
        "train": str(train),
        "parameters": {"rl.learning_rate": [0.001, 0.003], "rl.kl": [0.01, 0.1]},
        "asha": {"enabled": False},
    }
    return SweepConfig.model_validate({**values, **changes})


@pytest.mark.parametrize("path", sorted((configs_root() / "sweep").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_sweeps_parse_and_plan(path):
    config = load_config(path, SweepConfig)
    trials = make_trials(config)
    assert len({t.id for t in trials}) == len(trials) >= 12
    assert all(t.config.fold.validation for t in trials)


def test_ids_are_config_hashes_and_duplicates_fall_together(tmp_path):
    config = sweep(tmp_path, parameters={"rl.kl": [0.05, 0.05, 0.2]})
    trials = make_trials(config)
    assert len(trials) == 2
    assert [t.id for t in trials] == [t.id for t in make_trials(config)]
    ranged = sweep(tmp_path, parameters={"rl.kl": {"low": 0.001, "high": 1.0, "log": True}}, samples=5)
    values = [t.values["rl.kl"] for t in make_trials(ranged)]
    assert len(values) == 5
    assert values == [t.values["rl.kl"] for t in make_trials(ranged)]


def test_unknown_key_and_too_many_cpus_are_said(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'learning_rate'"):
        make_trials(sweep(tmp_path, parameters={"rl.learning_rat": [1]}))
    with pytest.raises(ConfigError, match="name at least one"):
        make_trials(sweep(tmp_path, parameters={}))
    config = sweep(tmp_path, overrides=["collect.execution=ray", "collect.workers=3"])
    assert cpus_needed(config, make_trials(config)) == 4
    assert main(["sweep/nothing"]) == 2


@pytest.mark.ray
@pytest.mark.slow
def test_sweep_killed_half_way_repeats_no_finished_trial(tmp_path):
    config = sweep(tmp_path)
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "jobs.sweep", str(file), "max_concurrent=1"]
    process = subprocess.Popen(command, cwd=configs_root().parent, env=environment, start_new_session=True)
    trials = make_trials(config)
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and not any(finished(config, t) for t in trials):
        assert process.poll() is None, "the sweep ended before it could be killed"
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    done = [t for t in trials if finished(config, t)]
    assert 0 < len(done) < len(trials)
    stamps = {t.id: (t.folder / "result.json").stat().st_mtime_ns for t in done}
    subprocess.run(command, cwd=configs_root().parent, env=environment, check=True, timeout=240)
    result = orjson.loads((Path(config.output) / "results.json").read_bytes())
    assert result["skipped"] == len(done)
    assert result["failed"] == 0
    assert {t.id: (t.folder / "result.json").stat().st_mtime_ns for t in done} == stamps
    groups = [p for t in trials for p in Path(t.folder).glob("wandb/offline-run-*")]
    assert len({p.parent.parent for p in groups}) == len(trials)
    assert result["trials"][0]["balanced"] is not None


def test_an_early_stop_is_on_record_as_it_happens_and_never_hides_a_result(tmp_path):
    config = sweep(tmp_path)
    stopped, done, silent = make_trials(config)[:3]
    for trial in (stopped, done, silent):
        trial.folder.mkdir(parents=True)
    result = {"unseen": {"trained": {"balanced": 7.0}}, "updates": 4}
    (done.folder / "result.json").write_bytes(orjson.dumps(result))
    mark_stopped(config, stopped, {"balanced": 5.5, "update": 2})
    mark_stopped(config, done, {"balanced": 6.0, "update": 3})
    mark_stopped(config, silent, {})
    assert finished(config, stopped) == {"balanced": 5.5, "updates": 2, "state": "stopped early"}
    assert finished(config, done) == {"balanced": 7.0, "updates": 4, "state": "finished"}
    assert finished(config, silent) is None
