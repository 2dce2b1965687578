"""``rayrl skills triage RUN --bank BANK --out DIR``: retry all-wrong groups with every skill, and sort them.

Reads a finished run, plays one more sample of each all-wrong group with the whole bank, and writes ``triage.jsonl``:
which tasks the policy could do with the text but not without (internalisation deficit) and which the failure analyst
should look at. Resumable: the retry is an ordinary run.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from jobs.output import console, facts_table, print_json
from jobs.skill_runs import SkillRuns
from rayrl.errors import DataError
from rayrl.experiment import load_run_config
from rayrl.schemas import JsonDict
from rayrl.skills.bank import load_snapshot
from rayrl.skills.curriculum import group_outcomes, retry_jobs, triage
from rayrl.skills.stages import write_lines_atomic
from rayrl.traces.store import RunReader


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("run", type=Path, metavar="RUN", help="finished run directory")
    parser.add_argument("--bank", type=Path, required=True, help="bank whose skills the retry gets")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--quiet", action="store_true", help="no progress display")


def triage_run(run_dir: Path, bank: Path, out: Path, *, quiet: bool = True) -> JsonDict:
    """Retry and sort; returns counts.

    Raises:
        DataError: the run holds no results, or no config to play the retry with.
    """
    groups = group_outcomes(RunReader(run_dir).results())
    if not groups:
        raise DataError(f"{run_dir}: holds no results to sort")
    if not (run_dir / "config.yaml").exists():
        raise DataError(f"{run_dir}: no config.yaml, so the retry cannot be played under the same conditions")
    config, base = load_run_config(run_dir / "config.yaml")
    load_snapshot(bank)
    jobs = retry_jobs(groups, experiment_seed=config.experiment.seed)
    retries: list[JsonDict] = []
    if jobs:
        skills = {"kind": "bank", "path": str(bank.resolve()), "options": {}}
        with SkillRuns(config, base, out, quiet=quiet) as runs:
            folder = runs.run(runs.experiment("retry", {"skills": skills}, jobs))
        retries = list(RunReader(folder).results())
    rows = triage(groups, group_outcomes(retries))
    write_lines_atomic(out / "triage.jsonl", rows)
    return {
        "groups": len(rows),
        "retried": len(jobs),
        "classes": dict(sorted(Counter(r["class"] for r in rows).items())),
        "file": str(out / "triage.jsonl"),
    }


def run(args: argparse.Namespace) -> int:
    """Entry point of the command."""
    facts = triage_run(args.run, args.bank, args.out, quiet=args.quiet or args.json)
    if args.json:
        print_json(facts)
        return 0
    console().print(facts_table("Triage", list(facts.items())))
    return 0


if __name__ == "__main__":
    from jobs.command import command_main

    raise SystemExit(command_main("skills triage", add_arguments, run, None))
