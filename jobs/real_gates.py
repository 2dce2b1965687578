"""``python -m jobs.real_gates --out DIR``: what the simulated gate study says, confirmed by gates on real rollouts.

A bank whose chunks are known by construction (they teach a competence of the scripted shopper, the same one twice,
none, or unteach one) goes through N gates that share nothing but the shopper and the tasks: other seeds, other masks.
A larger gate beforehand measures each chunk's effect, so that recall is counted against effects, not intentions. It too
drops what does strong harm after a look or two: what a chunk is worth beside one that no bank will hold is not asked.
"""

from __future__ import annotations

import argparse
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from jobs.gate_plan import GateConfig
from jobs.output import console, print_json
from jobs.validate_skills import CONTRIBUTIONS, Gate
from rayrl.config import resolve_resource
from rayrl.experiment import load_run_config
from rayrl.schemas import JsonDict
from rayrl.skills.estimators import FloatArray
from rayrl.skills.rule import SEED_RULE, GateRule, screened
from rayrl.skills.selection import decided_effects, rank_correlation
from rayrl.traces.manifest import write_json_atomic

HELPS = 0.02
"""Reference effect from which a chunk counts as helpful."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--run", default="skills/shopper.yaml", help="rollout config")
    parser.add_argument("--bank", default="skills/study_bank.json", help="bank with chunks known by construction")
    parser.add_argument("--split", default="gate")
    parser.add_argument("--tasks", type=int, default=400)
    parser.add_argument("--gates", type=int, default=5)
    parser.add_argument("--reference", type=float, default=4.0, help="pairs per task of the reference (default 4)")


def play(args: argparse.Namespace, name: str, seed: int, rule: GateRule) -> JsonDict:
    """One gate with seeds and masks of its own; returns its contributions."""
    run, base = load_run_config(args.run, [f"experiment.seed={seed}"])
    config = GateConfig(
        name=name,
        run=args.run,
        bank=str(resolve_resource(args.bank, base)),
        split=args.split,
        tasks=args.tasks,
        mask_seed=seed,
        rule=rule,
    )
    Gate(config, run, base, args.out / name).run()
    found: JsonDict = orjson.loads((args.out / name / CONTRIBUTIONS).read_bytes())
    return found


def judge(found: JsonDict, truth: dict[str, float]) -> JsonDict:
    """Recall and false discoveries of one gate against the reference effects."""
    helpful = {name for name, effect in truth.items() if effect >= HELPS}
    chosen = set(found["selected"])
    return {
        "rollouts": found["rollouts"],
        "selected": sorted(chosen),
        "dropped": {r["skill_id"]: r["dropped_after"] for r in found["contributions"] if r["dropped_after"]},
        "recall": len(chosen & helpful) / max(1, len(helpful)),
        "false_discovery": len(chosen - helpful) / max(1, len(chosen)),
    }


def effects(found: JsonDict) -> FloatArray:
    """Effects in bank order."""
    return np.array([row["effect"] for row in found["contributions"]])


def decided(found: JsonDict) -> FloatArray:
    """The same with 0 for every undecided chunk."""
    return decided_effects(effects(found), [row["status"] for row in found["contributions"]])


def agreement(gates: list[FloatArray]) -> float | None:
    """Mean rank correlation over all pairs of gates."""
    pairs = [rank_correlation(a, b) for a, b in combinations(gates, 2)]
    return float(np.mean(pairs)) if pairs else None


def confirm(args: argparse.Namespace) -> JsonDict:
    """Reference, N gates by the default rule and N by the seed's; writes ``real_gates.json``."""
    reference = play(args, "reference", 1000, screened(args.reference))
    truth = {row["skill_id"]: row["effect"] for row in reference["contributions"]}
    result: JsonDict = {
        "tasks": args.tasks,
        "reference": {
            row["skill_id"]: {key: row[key] for key in ("effect", "interval", "status", "dropped_after")}
            for row in reference["contributions"]
        },
        "reference_rollouts": reference["rollouts"],
        "rules": {},
    }
    for label, rule in (("default", GateRule()), ("seed", SEED_RULE)):
        gates = [play(args, f"{label}-{i}", 2000 + i, rule) for i in range(args.gates)]
        judged = [judge(g, truth) for g in gates]
        result["rules"][label] = {
            "gates": judged,
            "recall": float(np.mean([j["recall"] for j in judged])),
            "false_discovery": float(np.mean([j["false_discovery"] for j in judged])),
            "rollouts": float(np.mean([j["rollouts"] for j in judged])),
            "spearman_of_refits": agreement([effects(g) for g in gates]),
            "spearman_undecided_as_ties": agreement([decided(g) for g in gates]),
            "correlation_of_pairs": float(np.mean([g["arms"][0]["correlation"] for g in gates])),
        }
    write_json_atomic(args.out / "real_gates.json", result)
    return result


def run(args: argparse.Namespace) -> int:
    """Entry point of the command."""
    found = confirm(args)
    if args.json:
        print_json(found)
        return 0
    out: Any = console()
    for name, row in found["reference"].items():
        low, high = row["interval"]
        out.print(f"{name:<16} {row['effect']:+.3f} [{low:+.3f}, {high:+.3f}]", markup=False)
    for label, rule in found["rules"].items():
        facts = {k: v for k, v in rule.items() if k != "gates"}
        out.print(f"{label}: {facts}", markup=False)
    return 0


if __name__ == "__main__":
    from jobs.command import command_main

    raise SystemExit(command_main("real_gates", add_arguments, run, None))
