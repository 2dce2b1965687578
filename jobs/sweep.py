"""``rayrl sweep``: hyperparameters of a training run on Ray Tune.

* any config key can be swept, by a list of values (grid) or a range (random samples from the sweep's seed);
* a trial's id is the hash of its training config: a finished trial is skipped on resume, an interrupted one continues
  from its own checkpoint;
* all trials share seed, fold and rollout randomness (common random numbers) unless ``seed`` itself is swept;
* trials are scored on the validation part of the training questions; unseen questions are never looked at;
* placement is computed from the config and checked against the machine first, so no trial waits for ever;
* ASHA stops the weak ones early; one W&B run per trial, all in one group.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from rich.table import Table

from jobs.command import command_main
from jobs.output import console, print_json
from learners.training import TrainConfig
from rayrl.config import Section, find_config, load_config, load_raw, operational, parse_config
from rayrl.errors import ConfigError, did_you_mean
from rayrl.evaluation.html import page, section
from rayrl.evaluation.html import table as html_table
from rayrl.retrieval.report import line_plot

_CLOSED = threading.Event()
"""Set in a trial's process when its run directory and its W&B run are closed."""


class Range(Section):
    """A continuous range to sample from."""

    low: float
    """Smallest value."""
    high: float
    """Largest value."""
    log: bool = False
    """Sample the logarithm evenly."""


class AshaConfig(Section):
    """Early stopping."""

    enabled: bool = True
    """Off runs every trial to its end."""
    grace: int = 1
    """Evaluations before a trial may be stopped."""
    reduction: int = 3
    """One in so many goes on at each rung."""


class SweepConfig(Section):
    """A sweep."""

    name: str = "sweep"
    """Name; also the W&B group."""
    output: str = operational("runs/sweep")
    """Directory of the sweep."""
    train: str = "train/faq"
    """Training config the trials start from."""
    overrides: list[str] = []
    """Overrides common to all trials."""
    parameters: dict[str, list[Any] | Range] = {}
    """Config key -> values (grid) or range (random)."""
    samples: int = 1
    """Random draws of the ranges; multiplied with the grid."""
    seed: int = 0
    """Of the random draws."""
    asha: AshaConfig = AshaConfig()
    """Early stopping."""
    cpus_per_trial: int = operational(1)
    """CPUs of a trial; with ``collect.execution=ray`` its workers come on top."""
    max_concurrent: int = operational(0)
    """Trials at a time; 0 = as many as fit."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``rayrl sweep``."""
    parser.add_argument("config", help="sweep config, for example sweep/faq")
    parser.add_argument("overrides", nargs="*", help="section.key=value of the sweep config")
    parser.add_argument("--plan", action="store_true", help="list the trials and stop")


def run(args: argparse.Namespace) -> int:
    """``rayrl sweep``."""
    config = load_config(find_config(args.config), SweepConfig, args.overrides)
    trials = make_trials(config)
    if args.plan:
        plan = [{"trial": t.id, **t.values, "done": finished(config, t) is not None} for t in trials]
        if args.json:
            print_json({"trials": plan})
        else:
            console().print_json(orjson.dumps(plan).decode())
        return 0
    result = run_sweep(config, trials)
    if args.json:
        print_json(result)
        return 0
    columns = list(config.parameters)
    table = Table("trial", *columns, "validation", "updates", "state", title=config.name)
    for row in result["trials"]:
        value = "-" if row["balanced"] is None else f"{row['balanced']:.3f}"
        table.add_row(row["trial"], *(str(row["values"][c]) for c in columns), value, str(row["updates"]), row["state"])
    console().print(table)
    console().print(f"ran {result['ran_now']} trials, skipped {result['skipped']} finished ones: {config.output}")
    return 0


class Trial:
    """One point of the sweep."""

    def __init__(self, sweep: SweepConfig, values: dict[str, Any]) -> None:
        self.values = values
        overrides = [*sweep.overrides, *(f"{k}={orjson.dumps(v).decode()}" for k, v in values.items())]
        path = find_config(sweep.train)
        base = parse_config(load_raw(path, [*overrides, "fold.validation=true"]), TrainConfig, source=str(path))
        self.id = base.fingerprint()[:12]
        folder = Path(sweep.output).resolve() / "trials" / self.id
        self.base = path.parent
        self.config = base.model_copy(update={"output": str(folder), "name": f"{sweep.name}-{self.id}"})

    @property
    def folder(self) -> Path:
        """Run directory of the trial."""
        return Path(self.config.output)


def make_trials(config: SweepConfig) -> list[Trial]:
    """Grid times random samples; a pure function of the config. Duplicates fall together by their id.

    Raises:
        ConfigError: an unknown key (with a near one), or nothing to sweep.
    """
    if not config.parameters:
        raise ConfigError(
            "parameters is empty; name at least one config key to sweep, e.g. rl.learning_rate: [1e-3, 3e-4]"
        )
    for key in config.parameters:
        _check_key(key)
    grids = {k: v for k, v in config.parameters.items() if isinstance(v, list)}
    ranges = {k: v for k, v in config.parameters.items() if isinstance(v, Range)}
    rng = np.random.default_rng(config.seed)
    draws = [{k: _draw(r, rng) for k, r in ranges.items()} for _ in range(config.samples if ranges else 1)]
    trials: dict[str, Trial] = {}
    for combination in itertools.product(*grids.values()):
        for draw in draws:
            values = {**dict(zip(grids, combination, strict=True)), **draw}
            trial = Trial(config, {k: values[k] for k in config.parameters})
            trials.setdefault(trial.id, trial)
    return list(trials.values())


def finished(config: SweepConfig, trial: Trial) -> dict[str, Any] | None:
    """Result of a trial that needs no more work, or None."""
    for name in ("result.json", "stopped.json"):
        path = trial.folder / name
        if path.exists():
            value: dict[str, Any] = orjson.loads(path.read_bytes())
            if name == "stopped.json":
                return {"balanced": value["balanced"], "updates": value["updates"], "state": "stopped early"}
            return {
                "balanced": value["unseen"]["trained"]["balanced"],
                "updates": value["updates"],
                "state": "finished",
            }
    return None


def mark_stopped(config: SweepConfig, trial: Trial, metrics: dict[str, Any]) -> None:
    """Record that a trial ended before its last update; one with a result, or that reported nothing, is left alone."""
    if finished(config, trial) is None and metrics.get("balanced") is not None:
        facts = {"balanced": metrics["balanced"], "updates": metrics.get("update", 0)}
        temporary = trial.folder / "stopped.json.tmp"
        temporary.write_bytes(orjson.dumps(facts))
        temporary.replace(trial.folder / "stopped.json")


def run_sweep(config: SweepConfig, trials: list[Trial]) -> dict[str, Any]:
    """Run what is not finished; write ``results.json`` and ``results.html``.

    Raises:
        ConfigError: a trial needs more CPUs than there are.
    """
    output = Path(config.output).resolve()
    output.mkdir(parents=True, exist_ok=True)
    todo = [t for t in trials if finished(config, t) is None]
    began = time.monotonic()
    if todo:
        _run_tune(config, todo, output)
    rows = []
    for trial in trials:
        facts = finished(config, trial) or {"balanced": None, "updates": 0, "state": "failed"}
        rows.append({"trial": trial.id, "values": trial.values, **facts})
    rows.sort(key=_rank, reverse=True)
    result = {
        "sweep": config.name,
        "trials": rows,
        "ran_now": len(todo),
        "skipped": len(trials) - len(todo),
        "failed": sum(r["state"] == "failed" for r in rows),
        "seconds": round(time.monotonic() - began, 1),
    }
    (output / "results.json").write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2))
    (output / "results.html").write_text(_page(config, rows, trials))
    return result


def _run_tune(config: SweepConfig, todo: list[Trial], output: Path) -> None:
    import ray
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler
    from ray.tune.trainable.function_trainable import wrap_function

    owned = not ray.is_initialized()
    if owned:
        os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
        ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        needed = cpus_needed(config, todo)
        there = int(ray.cluster_resources().get("CPU", 0))
        if needed > there:
            raise ConfigError(
                f"a trial needs {needed} CPUs and the cluster has {there}; lower cpus_per_trial or collect.workers, "
                "or the trials would wait for ever"
            )
        by_id = {t.id: t for t in todo}
        scheduler = None
        if config.asha.enabled:
            scheduler = ASHAScheduler(
                time_attr="evaluation",
                max_t=1_000_000,
                grace_period=config.asha.grace,
                reduction_factor=config.asha.reduction,
            )
        group = config.name

        def trainable(space: dict[str, Any]) -> None:
            _trial(by_id[space["trial"]], group)

        class WhenStopped(tune.Callback):  # type: ignore[misc,unused-ignore]
            """Writes down an early stop when it happens: a sweep that dies later must not take the trial up again."""

            def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **_info: Any) -> None:
                mark_stopped(config, by_id[trial.config["trial"]], trial.last_result or {})

        class ClosesFirst(wrap_function(trainable)):  # type: ignore[misc,unused-ignore]
            """A stopped trial leaves by an exception out of its next report; its actor waits for the files to close."""

            def cleanup(self) -> None:
                super().cleanup()
                _wait_until_closed()

        tuner = tune.Tuner(
            tune.with_resources(ClosesFirst, tune.PlacementGroupFactory([{"CPU": float(needed)}])),
            param_space={"trial": tune.grid_search(list(by_id))},
            tune_config=tune.TuneConfig(
                metric="balanced",
                mode="max",
                scheduler=scheduler,
                max_concurrent_trials=config.max_concurrent or max(1, there // needed),
                trial_dirname_creator=lambda trial: str(trial.config["trial"]),
            ),
            run_config=tune.RunConfig(
                name=f"tune-{int(time.time())}",
                storage_path=str(output / "tune"),
                verbose=0,
                callbacks=[WhenStopped()],
            ),
        )
        for item in tuner.fit():
            if item.error is not None:
                print(f"trial {(item.config or {})['trial']} failed: {item.error}", file=sys.stderr)
    finally:
        if owned:
            ray.shutdown()


def _trial(trial: Trial, group: str) -> None:
    """Runs inside a Tune worker."""
    import torch
    from ray import tune

    from jobs.train import run_training

    torch.set_num_threads(trial.config.collect.threads)
    _CLOSED.clear()
    every = max(trial.config.evaluate_every, 1)

    def evaluation(update: int) -> int:
        # from the update, so that a trial that was interrupted meets the others on the same rung
        return -(-update // every)

    def report(update: int, score: Any) -> None:
        tune.report({"balanced": score.balanced, "update": update, "evaluation": evaluation(update)})

    try:
        result = run_training(trial.config, base=trial.base, quiet=True, group=group, on_report=report)
    finally:
        _CLOSED.set()
    final, updates = result["unseen"]["trained"]["balanced"], result["updates"]
    tune.report({"balanced": final, "update": updates, "evaluation": evaluation(updates) + 1})


def _wait_until_closed() -> None:
    # a function of the module: Tune ships classes by value, and an event cannot travel
    _CLOSED.wait(20.0)


def _rank(row: dict[str, Any]) -> tuple[bool, float]:
    # a trial stopped early scored after fewer updates, where curves are often higher: it does not compare
    return row["state"] == "finished", -math.inf if row["balanced"] is None else row["balanced"]


def cpus_needed(config: SweepConfig, trials: list[Trial]) -> int:
    """CPUs the largest trial occupies."""
    extra = max(t.config.collect.workers if t.config.collect.execution == "ray" else 0 for t in trials)
    return max(1, config.cpus_per_trial) + extra


def _draw(r: Range, rng: np.random.Generator) -> float:
    if r.log:
        return float(np.exp(rng.uniform(math.log(r.low), math.log(r.high))))
    return float(rng.uniform(r.low, r.high))


def _check_key(key: str) -> None:
    model: type[Any] = TrainConfig
    parts = key.split(".")
    for i, part in enumerate(parts):
        fields = getattr(model, "model_fields", {})
        if part not in fields:
            where = ".".join(parts[:i]) or "the training config"
            raise ConfigError(f"parameters.{key}: {where} has no key {part!r}{did_you_mean(part, list(fields))}")
        model = fields[part].annotation


def _page(config: SweepConfig, rows: list[dict[str, Any]], trials: list[Trial]) -> str:
    columns = list(config.parameters)
    body = html_table(
        ["trial", *columns, "validation", "updates", "state"],
        [
            [
                r["trial"],
                *(str(r["values"][c]) for c in columns),
                "" if r["balanced"] is None else f"{r['balanced']:.3f}",
                r["updates"],
                r["state"],
            ]
            for r in rows
        ],
        numeric_from=1,
    )
    curves = {t.id: _curve(t.folder / "metrics.jsonl") for t in trials}
    plot = line_plot({k: v for k, v in curves.items() if len(v) > 1}, x="update", y="validation return")
    return page(config.name, [f"<h1>{config.name}</h1>", section("Trials", body), section("Curves", plot)])


def _curve(path: Path) -> list[tuple[float, float]]:
    points = []
    if path.exists():
        for line in path.read_bytes().splitlines():
            try:
                value = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
            if value.get("validation/balanced") is not None:
                points.append((float(value["update"]), float(value["validation/balanced"])))
    return points


def main(argv: list[str] | None = None) -> int:
    """``python -m jobs.sweep CONFIG``."""
    return command_main("sweep", add_arguments, run, argv)


if __name__ == "__main__":
    # by its own name: what Tune sends to its workers must be found there, and __main__ is another module there
    from jobs import sweep

    sys.exit(sweep.main())
