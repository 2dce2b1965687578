"""``rayrl train``: supervised fine-tuning, then TRACE, from one config; resumable to the bit.

The run directory holds ``config.json``, ``fold.json``, ``metrics.jsonl``, ``checkpoints/step-NNNNNN/``, ``gate/``
(what serves) and ``result.json``. Running the same config again resumes from the newest checkpoint; another config in
the same directory is refused. Evaluation during training uses training questions only; unseen questions are looked at
once, at the end, and never to choose anything.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson
from filelock import FileLock, Timeout
from rich.table import Table

from jobs.command import command_main
from jobs.output import console, print_json
from learners.checkpoint import latest_checkpoint, restore_checkpoint, save_checkpoint
from learners.collect import Collector, LocalCollector, Weights
from learners.training import Run, TrainConfig, build_run, evaluate, run_sft, train
from rayrl.config import find_config, load_config
from rayrl.errors import RunConflictError
from rayrl.retrieval.gate import export_gate
from rayrl.retrieval.oracle import oracle_returns
from rayrl.retrieval.report import LABELS
from rayrl.retrieval.score import Score, balanced_return, detect_collapse
from rayrl.tracking import Tracker, stable_run_id

STEP = "update"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``rayrl train``."""
    parser.add_argument("config", help="config file, or a shipped name such as train/faq")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--quiet", action="store_true", help="no progress lines")
    parser.add_argument("--stop-after", type=int, default=None, metavar="N", help="stop after update N (resume later)")


def run(args: argparse.Namespace) -> int:
    """``rayrl train``."""
    path = find_config(args.config)
    config = load_config(path, TrainConfig, args.overrides)
    result = run_training(config, base=path.parent, quiet=args.quiet or args.json, stop_after=args.stop_after)
    if args.json:
        print_json(result)
        return 0
    _say(config, result)
    return 0


def run_training(
    config: TrainConfig,
    *,
    base: Path | None = None,
    quiet: bool = False,
    stop_after: int | None = None,
    group: str | None = None,
    on_report: Callable[[int, Score], None] | None = None,
) -> dict[str, Any]:
    """Train (or resume) in ``config.output``; returns the facts that ``result.json`` holds.

    ``on_report(update, score)`` gets the validation score at every evaluation; only with ``fold.validation``.

    Raises:
        RunConflictError: the directory belongs to another experiment, or another process is training in it.
    """
    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise RunConflictError(
            f"another process is training in {folder}; wait for it, or choose another output"
        ) from None
    with ExitStack() as stack:
        stack.callback(lock.release)
        _claim(folder, config)
        run_ = build_run(config, base)
        _write(folder / "fold.json", run_.fold.model_dump(mode="json"))
        tracker = Tracker(
            folder,
            config.tracking,
            run_name=config.name,
            run_id=stable_run_id(config.name, config.fingerprint()),
            group=group,
            job_type="train",
            config_dict=config.model_dump(mode="json"),
        )
        stack.callback(tracker.close)
        return _train(folder, config, run_, tracker, quiet, stop_after, on_report)


def _train(
    folder: Path,
    config: TrainConfig,
    run_: Run,
    tracker: Tracker,
    quiet: bool,
    stop_after: int | None,
    on_report: Callable[[int, Score], None] | None,
) -> dict[str, Any]:
    learner, identity = run_.learner, run_.identity()
    checkpoints = folder / "checkpoints"
    began = time.monotonic()
    last = latest_checkpoint(checkpoints)
    history: list[Weights] | None = None
    if last is not None:
        history = restore_checkpoint(last, learner, identity)
        dropped = tracker.truncate_after(learner.state.updates, step_name=STEP)
        _line(quiet, f"resumed {last.name}" + (f"; {dropped} later metric lines dropped" if dropped else ""))
    else:
        tracker.truncate_after(-1, step_name=STEP)
        metrics: dict[str, Any] = dict(run_sft(learner, config))
        metrics.update(_flat("train", evaluate(learner.policy, run_.task.target_train, config.mdp, plan_weight=0.0)))
        tracker.log(metrics, 0, step_name=STEP)
        _line(quiet, f"sft: accuracy {metrics['sft/accuracy']:.3f}, return {metrics['train/balanced']:.2f}")
        save_checkpoint(checkpoints, learner, [learner.weights()], identity)
    headroom = float(oracle_returns(run_.task.target_train, config.mdp).mean())
    stop = min(config.rl.updates, stop_after if stop_after is not None else config.rl.updates)

    def on_update(update: int, metrics: dict[str, Any], weights: list[Weights]) -> None:
        held: Score | None = None
        if update % max(config.evaluate_every, 1) == 0 or update == config.rl.updates:
            current = evaluate(learner.policy, run_.task.target_train, config.mdp)
            metrics = {**metrics, **_flat("train", current), "train/oracle": headroom}
            collapse = detect_collapse(current, entropy=metrics["rl/entropy"], kl=metrics["rl/kl"])
            metrics["train/collapsed"] = float(collapse.collapsed)
            if config.fold.validation:
                held = evaluate(learner.policy, run_.task.test, config.mdp)
                metrics.update(_flat("validation", held))
            note = f"  COLLAPSE: {'; '.join(collapse.reasons)}" if collapse.collapsed else ""
            _line(
                quiet,
                f"update {update}/{config.rl.updates}: return {current.balanced or 0:.2f}, KL {metrics['rl/kl']:.3f}, "
                f"entropy {metrics['rl/entropy']:.3f}, signal in {metrics['rl/effective_groups']:.0f} groups{note}",
            )
        tracker.log(metrics, update, step_name=STEP)
        due = config.checkpoint_every and update % config.checkpoint_every == 0
        if due or update in (config.rl.updates, stop):
            save_checkpoint(checkpoints, learner, weights, identity)
        # last: whoever listens may end the process here
        if held is not None and on_report is not None:
            on_report(update, held)

    collector = make_collector(config, run_)
    try:
        if learner.state.updates < stop:
            learner.rl = config.rl.model_copy(update={"updates": stop})
            train(learner, collector, staleness=config.collect.staleness, history=history, on_update=on_update)
            learner.rl = config.rl
    finally:
        collector.close()
    if learner.state.updates < config.rl.updates:
        return {"output": str(folder), "updates": learner.state.updates, "complete": False}
    return _finish(folder, config, run_, tracker, time.monotonic() - began)


def make_collector(config: TrainConfig, run_: Run) -> Collector:
    """Local or Ray, by config."""
    if config.collect.execution == "ray":
        from actors.retrieval import RayCollector

        return RayCollector(run_.player, config)
    return LocalCollector(run_.player, config.collect.staleness)


def _finish(folder: Path, config: TrainConfig, run_: Run, tracker: Tracker, seconds: float) -> dict[str, Any]:
    learner = run_.learner
    unseen = evaluate(learner.policy, run_.task.test, config.mdp)
    reference = evaluate(learner.verified_reference(), run_.task.test, config.mdp, plan_weight=0.0)
    oracle = oracle_returns(run_.task.test, config.mdp)
    result: dict[str, Any] = {
        "output": str(folder),
        "complete": True,
        "updates": learner.state.updates,
        "env_steps": learner.state.env_steps,
        "mode": config.mdp.mode,
        "actions": config.mdp.actions,
        "estimator": config.rl.estimator,
        "plan_weight": config.policy.plan_weight,
        "reference_checksum": learner.reference_checksum,
        "unseen": {
            "sft": reference.model_dump(),
            "trained": unseen.model_dump(),
            "oracle": float(oracle.mean()),
            "oracle_balanced": balanced_return(oracle, run_.task.test.kind),
        },
        "evaluated_on": "validation" if config.fold.validation else "unseen",
        "seconds": round(seconds, 2),
    }
    if config.queue == "ranked":
        result["gate"] = str(
            export_gate(folder / "gate", run_.material, config.task, config.mdp, run_.task.view, learner.policy)
        )
    _write(folder / "result.json", result)
    columns = ["policy", *Score.model_fields]
    rows = [[n, *s.model_dump().values()] for n, s in (("sft", reference), ("trained", unseen))]
    tracker.table("unseen", columns, rows)
    tracker.summary({"unseen_balanced": unseen.balanced, "sft_balanced": reference.balanced})
    newest = latest_checkpoint(folder / "checkpoints")
    if newest is not None:
        tracker.artifact(newest, f"{config.name}-checkpoint", "model")
    return result


def _claim(folder: Path, config: TrainConfig) -> None:
    """Write the config, or refuse a directory that belongs to another experiment."""
    path = folder / "config.json"
    fingerprint = config.fingerprint()
    if path.exists():
        stored = orjson.loads(path.read_bytes())
        if stored.get("fingerprint") != fingerprint:
            raise RunConflictError(
                f"{folder} holds a run of another config ({str(stored.get('fingerprint'))[:12]} there, "
                f"{fingerprint[:12]} here); give output=... another directory"
            )
        return
    _write(path, {"fingerprint": fingerprint, "config": config.model_dump(mode="json")})


def _write(path: Path, value: Any) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY))
    temporary.replace(path)


def _flat(prefix: str, result: Score) -> dict[str, Any]:
    return {f"{prefix}/{k}": v for k, v in result.model_dump().items()}


def _line(quiet: bool, text: str) -> None:
    if not quiet:
        print(text, file=sys.stderr, flush=True)


def _say(config: TrainConfig, result: dict[str, Any]) -> None:
    out = console()
    if not result["complete"]:
        out.print(f"stopped after update {result['updates']}; run the same command again to go on")
        return
    table = Table(
        "policy", "balanced", "A", "near B", "far B", "hit rate", title=f"unseen questions, {config.mdp.mode}"
    )
    decided = LABELS["trace_plan" if result["plan_weight"] else "sft_trace"]
    for name, label in (("sft", LABELS["sft"]), ("trained", decided)):
        s = result["unseen"][name]
        keys = ("balanced", "return_a", "return_near_b", "return_far_b", "hit_rate")
        table.add_row(label, *("-" if s[k] is None else f"{s[k]:.2f}" for k in keys))
    out.print(table)
    out.print(f"run: {result['output']}" + (f"   gate: {result['gate']}" if "gate" in result else ""), markup=False)


def main(argv: list[str] | None = None) -> int:
    """``python -m jobs.train CONFIG [overrides]``."""
    return command_main("train", add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
