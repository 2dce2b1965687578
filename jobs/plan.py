"""``rayrl plan``: everything a run is, without calling anything outside."""

from __future__ import annotations

import argparse

from jobs.output import console, facts_table, print_json
from rayrl.errors import ConfigError, GuardError
from rayrl.experiment import Experiment, load_run_config, prepare
from rayrl.guard import check_test_access
from rayrl.schemas import JsonDict
from rayrl.traces.manifest import describe_difference, read_manifest
from rayrl.traces.store import RunReader


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``rayrl plan``."""
    parser.add_argument("config", help="config file, or the name of a shipped one")
    parser.add_argument("overrides", nargs="*", default=[], help="section.key=value")
    parser.add_argument("--resolved", action="store_true", help="also show the whole resolved config")


def describe(experiment: Experiment) -> JsonDict:
    """The plan as one JSON object."""
    semantic = experiment.semantic
    run_dir = experiment.run_dir
    existing = read_manifest(run_dir)
    directory: JsonDict = {"path": str(run_dir), "exists": existing is not None}
    if existing is not None:
        same = existing["fingerprint"] == experiment.fingerprint
        directory["same_experiment"] = same
        if same:
            done = RunReader(run_dir).scan().complete_ids
            directory["complete"] = sum(job.episode_id in done for job in experiment.jobs)
        else:
            directory["difference"] = describe_difference(existing["semantic"], semantic)
    guard = None
    try:
        guard = check_test_access(experiment)
    except GuardError as refusal:
        guard = {"refused": str(refusal)}
    return {
        "experiment": experiment.name,
        "fingerprint": experiment.fingerprint,
        "episodes": len(experiment.jobs),
        "tasks": len({job.task_id for job in experiment.jobs}),
        "repeats": experiment.config.tasks.repeats,
        "first_task_ids": list(dict.fromkeys(job.task_id for job in experiment.jobs))[:5],
        "first_seeds": [job.seed for job in experiment.jobs[:3]],
        "split": semantic["split"],
        "model": semantic["model"],
        "environment": semantic["environment"],
        "prompt": semantic["prompt"],
        "skills": semantic["skills"],
        "limits": semantic["limits"],
        "run_directory": directory,
        "test_guard": guard,
    }


def run(args: argparse.Namespace) -> int:
    """``rayrl plan``."""
    for item in args.overrides:
        if "=" not in item:
            raise ConfigError(f"override {item!r} is not of the form section.key=value")
    config, base = load_run_config(args.config, args.overrides)
    experiment = prepare(config, base)
    plan = describe(experiment)
    if args.resolved or args.json:
        plan["config"] = experiment.config.model_dump(mode="json")
    if args.json:
        print_json(plan)
        return 0
    out = console()
    model, environment, directory = plan["model"], plan["environment"], plan["run_directory"]
    where = directory["path"]
    if directory["exists"] and directory["same_experiment"]:
        where += f"  (resumes: {directory['complete']} of {plan['episodes']} complete)"
    elif directory["exists"]:
        where += f"  (REFUSED, holds another experiment)\n{directory['difference']}"
    rows = [
        ("fingerprint", plan["fingerprint"]),
        ("episodes", f"{plan['episodes']} = {plan['tasks']} tasks x {plan['repeats']}"),
        (
            "split",
            f"{plan['split']['name']} (role {plan['split']['role']}), ids {plan['split']['task_ids_sha256'][:12]}",
        ),
        ("first tasks", ", ".join(map(str, plan["first_task_ids"]))),
        ("first seeds", ", ".join(map(str, plan["first_seeds"]))),
        (
            "model",
            f"{model.get('kind')} {model.get('name', '')} checkpoint {model.get('checkpoint_id') or '(not named)'}",
        ),
        ("environment", " ".join(f"{k}={_short(v)}" for k, v in environment.items())),
        ("prompt", f"{plan['prompt']['name']} v{plan['prompt']['version']} {plan['prompt']['sha256'][:12]}"),
        ("skills", " ".join(f"{k}={_short(v)}" for k, v in plan["skills"].items())),
        ("limits", " ".join(f"{k}={v}" for k, v in plan["limits"].items())),
        ("run directory", where),
    ]
    if plan["test_guard"]:
        rows.append(("test guard", plan["test_guard"].get("refused") or f"open: {plan['test_guard']['purpose']}"))
    out.print(facts_table(f"Plan of {plan['experiment']}", rows))
    if args.resolved:
        from omegaconf import OmegaConf

        out.print("\n" + OmegaConf.to_yaml(OmegaConf.create(plan["config"])), markup=False)
    return 0


def _short(value: object) -> str:
    text = str(value)
    return text[:12] if len(text) == 64 else text
