"""``rayrl smoke``: play 3 tasks against the configured model and environment, and say what was seen."""

from __future__ import annotations

import argparse
import time

from jobs.output import console, print_json
from jobs.rollout import run_rollout
from rayrl.errors import ConfigError
from rayrl.experiment import load_run_config, prepare
from rayrl.schemas import JsonDict
from rayrl.traces.store import RunReader


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``rayrl smoke``."""
    parser.add_argument("config", help="config file, or the name of a shipped one")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--tasks", type=int, default=3, help="tasks to play (default 3)")


def run(args: argparse.Namespace) -> int:
    """``rayrl smoke``; exit code 6 when an episode did not complete."""
    for item in args.overrides:
        if "=" not in item:
            raise ConfigError(f"override {item!r} is not of the form section.key=value")
    config, _ = load_run_config(args.config, args.overrides)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    overrides = [
        *args.overrides,
        f"experiment.name={config.experiment.name[:70]}-smoke-{stamp}",
        f"tasks.sample_size={args.tasks}",
        "tasks.repeats=1",
        "execution.mode=inprocess",
        "execution.max_attempts=1",
        "execution.max_consecutive_failures=100",
        "tracking.wandb=disabled",
    ]
    small, base = load_run_config(args.config, overrides)
    experiment = prepare(small, base)
    result = run_rollout(experiment, quiet=True)
    episodes = [_describe(record) for record in RunReader(result.run_dir).iter_records()]
    if args.json:
        print_json({"run": str(result.run_dir), "episodes": episodes, "complete": result.complete})
        return result.exit_code
    out = console()
    for episode in episodes:
        out.print(f"[bold]{episode['episode_id']}[/bold] {episode['status']}")
        for line in episode["steps"]:
            out.print(f"  {line}", markup=False)
        if episode["error"]:
            out.print(f"  failed: {episode['error']}", markup=False)
        else:
            out.print(f"  reward {episode['reward']}, ended by {episode['termination_reason']}", markup=False)
    out.print(f"\n{result.complete} of {result.episodes} episodes complete; traces in {result.run_dir}", markup=False)
    return result.exit_code


def _describe(record: JsonDict) -> JsonDict:
    lines = []
    for step in record["steps"]:
        model = step["model"]
        took = f"{model.get('latency_ms', 0):.0f} ms, {model.get('usage', {}).get('completion_tokens', '?')} tokens"
        if step.get("protocol_error"):
            what = f"protocol error {step['protocol_error']['code']}"
        elif step.get("policy_failure"):
            what = f"policy failure {step['policy_failure']['code']}"
        else:
            feedback = step.get("action_feedback") or {}
            what = f"{step.get('action')} -> {feedback.get('reason', 'answered')}"
        lines.append(f"{step['index'] + 1}. {what}  ({took})")
    final, error = record["final"] or {}, record["error"]
    return {
        "episode_id": record["episode_id"],
        "status": record["status"],
        "steps": lines,
        "reward": final.get("reward"),
        "termination_reason": final.get("termination_reason"),
        "error": f"{error['class']}/{error['code']} in {error['stage']}: {error.get('message')}" if error else None,
    }
