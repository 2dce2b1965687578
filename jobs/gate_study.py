"""``rayrl skills study``: how good is the gate itself? Hundreds of simulated gates in worlds with known effects.

The rule is read first; the worlds that are reported are then drawn from a seed that is the hash of the rule, so nobody
can have tuned the rule on them. Writes ``study.json``, ``study.md`` (tables) and ``study.svg`` (figure).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from jobs.output import console, facts_table, print_json
from rayrl.config import load_config, resolve_resource
from rayrl.errors import DataError
from rayrl.schemas import JsonDict
from rayrl.skills.plot import Line, line_chart
from rayrl.skills.rule import PLAIN_RULE, SEED_RULE, GateRule, single
from rayrl.skills.simulator import (
    STANDARD_EFFECTS,
    STRONG_EFFECTS,
    Outcomes,
    World,
    hidden_world,
    make_world,
    random_world,
    world_facts,
)
from rayrl.skills.study import Score, score_rule
from rayrl.traces.manifest import write_json_atomic

REPEATS = (1, 2, 4, 8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where study.json, .md and .svg go")
    parser.add_argument("--rule", default="skills/gate_rule.yaml", help="gate rule to judge")
    parser.add_argument("--outcomes", default="skills/outcomes_scripted.json", help="fitted outcomes of a policy")
    parser.add_argument("--gates", type=int, default=200, help="simulated gates per setting (default 200)")
    parser.add_argument("--tasks", type=int, default=400, help="tasks per gate (default 400)")
    parser.add_argument("--repeats", type=int, nargs="+", default=list(REPEATS), help="repeats of the plain rules")


def load_outcomes(path: Path) -> Outcomes:
    """Fitted outcomes from a file.

    Raises:
        DataError: it cannot be read.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return Outcomes(
            **{**raw, "failures": tuple(raw["failures"]), "successes": tuple(raw.get("successes") or (1.0,))}
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path}: no fitted outcomes: {error}") from None


def reported_seed(rule: GateRule, kind: str) -> list[int]:
    """Seed of the reported worlds: a function of the frozen rule."""
    return [int(rule.sha256()[:12], 16), sum(kind.encode())]


def draw_worlds(outcomes: Outcomes, rule: GateRule, kind: str, count: int) -> list[World]:
    """Worlds of a kind with difficulty drawn around the measured one.

    ``standard``: the 16 chunks of the table; ``strong``: two of them do strong harm; ``hidden``: these two hide
    what the others are worth; ``random``: everything is drawn.
    """
    rng = np.random.default_rng([*reported_seed(rule, kind), 7])
    if kind == "random":
        return [random_world(outcomes, rng) for _ in range(count)]
    worlds: list[World] = []
    while len(worlds) < count:
        moved = Outcomes(
            mu=outcomes.mu + float(rng.normal(0, 0.2)),
            tau=float(outcomes.tau * np.exp(rng.normal(0, 0.2))),
            rho=float(np.clip(outcomes.rho + rng.normal(0, 0.05), 0, 0.98)),
            failures=outcomes.failures,
            successes=outcomes.successes,
        )
        try:
            worlds.append(_world(moved, kind))
        except ValueError:  # a policy that fails so often has not that much to lose: draw another
            continue
    return worlds


def _world(outcomes: Outcomes, kind: str) -> World:
    if kind == "hidden":
        return hidden_world(outcomes)
    return make_world(outcomes, STRONG_EFFECTS if kind == "strong" else STANDARD_EFFECTS)


def settings(rule: GateRule, repeats: list[int]) -> list[tuple[str, float, bool, GateRule]]:
    """``(name, repeats, common random numbers, rule)`` of every row of the table."""
    rows: list[tuple[str, float, bool, GateRule]] = []
    for common in (True, False):
        for r in repeats:
            rows.append(("seed rule", r, common, single(r, rule=SEED_RULE)))
            rows.append(("lower bound, bare pairs", r, common, single(r, rule=PLAIN_RULE)))
        rows.append(("default rule", sum(rule.stages), common, rule))
    rows.append(("default, nothing dropped", sum(rule.stages), True, keeping(rule)))
    rows.append(("default, open chunks only", sum(rule.stages), True, rule.model_copy(update={"narrow": True})))
    rows += [("lower bound, complement pairs", r, True, single(r, rule=rule)) for r in repeats if r <= 4]
    return rows


def keeping(rule: GateRule) -> GateRule:
    """The same rule with harmful chunks kept in to the end."""
    return rule.model_copy(update={"drop_harmful": False})


def study(rule: GateRule, outcomes: Outcomes, *, gates: int, tasks: int, repeats: list[int]) -> JsonDict:
    """All settings on the standard worlds, and the main ones on the others."""
    began = time.monotonic()
    worlds = draw_worlds(outcomes, rule, "standard", max(1, gates // 2))
    table = [
        _row(name, r, common, score_rule(worlds, a, gates=gates, seed=[11], tasks=tasks, common=common))
        for name, r, common, a in settings(rule, repeats)
    ]
    main = [
        ("seed rule", 4, single(4, rule=SEED_RULE)),
        ("lower bound, bare pairs", 4, single(4, rule=PLAIN_RULE)),
        ("default rule", sum(rule.stages), rule),
        ("default, nothing dropped", sum(rule.stages), keeping(rule)),
    ]
    others: JsonDict = {}
    for kind in ("strong", "hidden", "random"):
        drawn = draw_worlds(outcomes, rule, kind, max(1, gates // 2))
        scores = [_row(n, r, True, score_rule(drawn, a, gates=gates, seed=[13], tasks=tasks)) for n, r, a in main]
        others[kind] = {"worlds": len(drawn), "rows": scores, "examples": [world_facts(w) for w in drawn[:3]]}
    return {
        "schema": "rayrl-gate-study-v1",
        "rule": rule.model_dump(mode="json"),
        "rule_sha256": rule.sha256(),
        "outcomes": {"mu": outcomes.mu, "tau": outcomes.tau, "rho": outcomes.rho, "measured": outcomes.measured},
        "tasks": tasks,
        "standard": {"effects": STANDARD_EFFECTS.tolist(), "worlds": len(worlds), "rows": table},
        **others,
        "seconds": round(time.monotonic() - began, 1),
    }


def _row(name: str, repeats: float, common: bool, score: Score) -> JsonDict:
    return {"rule": name, "repeats": repeats, "common_random_numbers": common, **score.as_dict()}


def markdown(found: JsonDict) -> str:
    """The tables as Markdown."""
    lines: list[str] = []
    for kind, title in (
        ("standard", "16 chunks: 4 of +.08, 2 of +.05, 8 of 0, 2 of -.06"),
        ("strong", "the same, but the harmful two are of -.38 and -.16"),
        ("hidden", "two chunks of about -.30 and -.16, without which the others have these effects"),
        ("random", "random worlds"),
    ):
        lines += [
            f"**{title}** ({found[kind]['rows'][0]['gates']} gates per row, {found['tasks']} tasks)",
            "",
            "| rule | pairs per task | common random numbers | rollouts | precision | recall"
            " | false discovery (95 % up to) | Spearman of refits | undecided as ties | standard error |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for r in found[kind]["rows"]:
            lines.append(
                f"| {r['rule']} | {r['repeats']:g} | {'yes' if r['common_random_numbers'] else 'no'} | "
                f"{r['rollouts']:.0f} | {r['precision']:.2f} | {r['recall']:.2f} | {r['false_discovery']:.3f} "
                f"({r['false_discovery_high']:.3f}) | {r['spearman']:.2f} | {r['spearman_decided']:.2f} | "
                f"{r['se']:.4f} |"
            )
        lines.append("")
    return "\n".join(lines)


def figure(found: JsonDict) -> str:
    """Recall against rollouts, one line per rule and kind of seeds."""
    series: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for r in found["standard"]["rows"]:
        if not r["rule"].startswith("default, "):
            series.setdefault((r["rule"], r["common_random_numbers"]), []).append(
                (round(r["rollouts"], -1), r["recall"])
            )
    lines = [Line(f"{n}{'' if c else ', own seeds'}", points, dashed=not c) for (n, c), points in series.items()]
    precision = [
        (round(r["rollouts"], -1), r["precision"])
        for r in found["standard"]["rows"]
        if r["rule"] == "seed rule" and r["common_random_numbers"]
    ]
    lines = [line for line in lines if not line.name.startswith("seed rule")]
    lines.append(Line("seed rule: precision", precision))
    return line_chart(
        lines,
        title="Recall of helpful chunks against the cost of a gate",
        x_label="rollouts per gate",
        y_label="recall",
    )


def write_study(found: JsonDict, out: Path) -> None:
    """study.json, study.md, study.svg."""
    write_json_atomic(out / "study.json", found)
    (out / "study.md").write_text(markdown(found), encoding="utf-8")
    (out / "study.svg").write_text(figure(found), encoding="utf-8")


def run(args: argparse.Namespace) -> int:
    """Entry point of the command."""
    rule = load_config(resolve_resource(args.rule, None), GateRule)
    outcomes = load_outcomes(resolve_resource(args.outcomes, None))
    found = study(rule, outcomes, gates=args.gates, tasks=args.tasks, repeats=args.repeats)
    write_study(found, args.out)
    if args.json:
        print_json(found)
        return 0
    out = console()
    out.print(markdown(found), markup=False)
    facts: list[tuple[str, Any]] = [
        ("rule", rule.sha256()[:16]),
        ("seconds", found["seconds"]),
        ("written to", args.out),
    ]
    out.print(facts_table("Gate study", facts))
    return 0


if __name__ == "__main__":
    from jobs.command import command_main

    raise SystemExit(command_main("skills study", add_arguments, run, None))
