"""``rayrl evaluate-policy``: cross-fit evaluation with every baseline, statistics, JSON and one HTML page.

``--full`` runs all folds of the config (default ``train/crossfit``); without it one fold per split is fitted, enough to
see that everything works. Interrupted evaluations continue where they stopped.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from rich.table import Table

from jobs.command import command_main
from jobs.output import console, print_json
from learners.ablations import learning_curves, run_ablations
from learners.crossfit import CrossFitConfig, read_ledger, run_crossfit
from rayrl.config import find_config, load_config
from rayrl.errors import ConfigError
from rayrl.retrieval.compare import (
    BALANCED,
    Doubles,
    Results,
    adjust,
    bootstrap,
    compare,
    load_results,
    per_question,
    reliability,
    summarise,
    weighted,
    write_json,
)
from rayrl.retrieval.pools import Kind
from rayrl.retrieval.report import LABELS, partly, render
from rayrl.retrieval.task import Material, load_material

RIVALS = (
    "tuned_threshold",
    "sft",
    "sft_shifted",
    "sft_plan",
    "sft_trace",
    "logistic_cut",
    "logistic_plan",
    "sft_seed",
    "exact_gradient",
)
NEAR_DUPLICATE = 0.7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``rayrl evaluate-policy``."""
    parser.add_argument(
        "config", nargs="?", default="train/crossfit", help="a cross-fit config (default train/crossfit)"
    )
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--full", action="store_true", help="all folds; without it one fold per split")
    parser.add_argument("--part", default="0/1", metavar="I/N", help="fit every N-th fold from the I-th on, no report")
    parser.add_argument("--answers", metavar="YAML", help="instead: answer and judge with the model of this config")
    parser.add_argument("--gate", type=Path, help="with --answers: the trained gate folder")
    parser.add_argument(
        "--ablations", action="store_true", help="also the config's ablations and learning curves, on validation folds"
    )
    parser.add_argument("--report-only", action="store_true", help="rebuild tables and page from finished folds")


def run(args: argparse.Namespace) -> int:
    """``rayrl evaluate-policy``."""
    if args.answers:
        from jobs.gate import find_gate
        from jobs.gate_answers import evaluate_answers

        gate = args.gate or find_gate()
        return evaluate_answers(args.answers, gate, gate.parent / "answers", as_json=args.json)
    overrides = list(args.overrides)
    name = args.config
    if "=" in name:
        overrides.insert(0, name)
        name = "train/crossfit"
    if not args.full and not any(o.startswith("max_folds=") for o in overrides):
        overrides += ["max_folds=1"]
        if not any(o.startswith("output=") for o in overrides):
            overrides += ["output=runs/crossfit-smoke"]
    if not args.full and not any(o.startswith("purpose=") for o in overrides):
        overrides += ["purpose='a few folds, to see that it works'"]
    path = find_config(name)
    config = load_config(path, CrossFitConfig, overrides)
    say = _silent if args.json else _stderr
    if not args.report_only:
        part = _part(args.part)
        run_crossfit(config, base=path.parent, part=part, progress=say)
        if part[1] > 1:
            say("this part is done; --report-only writes the report once all parts are")
            return 0
    if args.ablations:
        write_json(Path(config.output) / "ablations.json", run_ablations(config, base=path.parent, progress=say))
        write_json(Path(config.output) / "curves.json", learning_curves(config, base=path.parent))
    report = build_report(config, base=path.parent)
    output = Path(config.output)
    write_json(output / "report.json", report)
    (output / "report.html").write_text(render(report))
    if args.json:
        print_json(report)
        return 0
    _say(report, output)
    return 0


def _silent(_: str) -> None:
    """Say nothing."""


def _stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _part(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise ConfigError(f"--part {text!r} must be I/N with I < N, for example 0/2")
    return int(index), int(count)


def build_report(config: CrossFitConfig, *, base: Path | None = None) -> dict[str, Any]:
    """All figures from the finished folds."""
    material, pool, far = load_material(config.train.task, base)
    categories = [q.category for q in material.questions]
    output = Path(config.output)
    manifest = orjson.loads((output / "manifest.json").read_bytes())
    splits = {}
    for split in config.splits:
        if any((output / "fits").glob(f"{split}-d*.npz")):
            splits[split] = split_facts(load_results(output, split), categories, material)
    played = len(list((output / "fits").glob("*.npz")))
    near = sum(q.domain in material.domains for q in material.questions)
    return {
        "name": config.name,
        "mode": config.train.mdp.mode,
        "actions": config.train.mdp.actions,
        "encoder": config.train.task.encoder,
        "pool": pool.name,
        "distractors": len(material.distractors),
        "distractor_source": ", ".join(config.train.task.distractors),
        "draws": config.draws,
        "folds": {"played": played, "planned": len(config.splits) * config.draws * 2 * config.folds},
        "questions": {"near": near, "far": len(material.questions) - near},
        "splits": splits,
        "ledger": [x for x in read_ledger(Path(config.ledger)) if x["manifest_sha256"] == manifest["manifest_sha256"]],
        "curves": _read(output / "curves.json", {}),
        "ablations": _read(output / "ablations.json", []),
        "facts": {
            "pool": pool.manifest().model_dump(),
            "far pool": far.manifest().model_dump(),
            "fold manifest": manifest["manifest_sha256"],
            "config": manifest["config_sha256"],
            "features": config.train.task.groups,
            "encoders": [e.identity() for e in (material.encoder, material.check_encoder) if e is not None],
            "hyperparameters": config.train.semantic(),
        },
    }


def split_facts(results: Results, categories: list[str], material: Material) -> dict[str, Any]:
    """Methods, comparisons, reliability and error classes of one split."""
    methods = summarise(results, categories)
    for name, facts in methods.items():
        fields = results.fields.get(name)
        values = fields["returns"] if fields is not None else results.oracle
        units = per_question(results, values, categories)
        for column, key in enumerate(("a", "near_b", "far_b")):
            only = np.zeros(3)
            only[column] = 1.0
            facts[f"return_{key}_interval"] = bootstrap(units, by="question", weights=only, resamples=2_000)
    oracle = methods["oracle"]["balanced"]
    ours = next((m for m in ("trace_plan", "sft_trace") if m in results.fields), "sft")
    rivals = [b for b in (*RIVALS, "best_plan") if b in results.fields and b != ours]
    comparisons = [compare(results, categories, ours, b) for b in rivals]
    adjust(comparisons)
    threshold = methods.get("tuned_threshold")
    share = None
    if threshold is not None and oracle > threshold["balanced"]:
        share = (methods[ours]["balanced"] - threshold["balanced"]) / (oracle - threshold["balanced"])
    duplicates = near_duplicates(material)
    return {
        "policy": ours,
        "methods": methods,
        "comparisons": comparisons,
        "headroom_share": share,
        "reliability": {
            "logistic": reliability(results.logistic_probability, results.kind == int(Kind.A), _row_weight(results)),
            "gate": reliability(results.gate_probability, results.kind == int(Kind.A), _row_weight(results)),
        },
        "errors": error_classes(results, ours, categories),
        "near_duplicates": {"questions": len(duplicates), **without(results, duplicates, categories, ours)},
        "near_duplicates_note": _duplicates_note(results, duplicates, categories, ours),
    }


def _row_weight(results: Results) -> Doubles:
    counts = np.bincount(results.kind, minlength=3)
    return np.asarray((BALANCED / np.maximum(counts, 1))[results.kind], dtype=np.float64)


def error_classes(results: Results, method: str, categories: list[str]) -> list[dict[str, Any]]:
    """Where the return is lost against the oracle, in parts that add up to the whole gap."""
    f = results.fields[method]
    lost = np.nan_to_num(results.oracle - f["returns"])
    known = np.isfinite(f["returns"])
    a, reachable = results.kind == int(Kind.A), results.oracle > 0
    retrieved, hit = f["retrievals"] > 0, f["hit"] >= 1
    classes = {
        "A, in the queue, but nothing was retrieved": a & reachable & ~retrieved,
        "A, in the queue, retrieved, stopped too early or dropped it": a & reachable & retrieved & ~hit,
        "A, answered, but too many retrievals or a distractor kept": a & reachable & hit,
        "A, not in the queue, retrieved in vain": a & ~reachable,
        "near B, something held": (results.kind == int(Kind.NEAR_B)) & (f["held"] > 0),
        "near B, nothing held, but looked": (results.kind == int(Kind.NEAR_B)) & (f["held"] == 0) & retrieved,
        "far B, any retrieval": (results.kind == int(Kind.FAR_B)) & retrieved,
    }
    out = []
    for what, members in classes.items():
        units = per_question(results, np.where(known, np.where(members, lost, 0.0), np.nan), categories)
        out.append(
            {"what": what, "lost": weighted(units.values), "share": float((members & known).sum() / known.sum())}
        )
    missing = per_question(results, np.where(a, np.where(reachable, 0.0, 1.0), np.nan), categories).values[:, 0]
    out.append(
        {"what": "(A questions whose answer is outside the top k)", "lost": 0.0, "share": float(np.nanmean(missing))}
    )
    return out


def near_duplicates(material: Material) -> set[int]:
    """Questions with another question of another category at cosine >= .7: as near B they may be answerable."""
    v = material.question_vectors
    category = np.array([q.category for q in material.questions])
    near = np.array([q.domain in material.domains for q in material.questions])
    similar = (v @ v.T >= NEAR_DUPLICATE) & (category[:, None] != category[None]) & near[:, None] & near[None]
    return set(np.flatnonzero(similar.any(1)).tolist())


def without(results: Results, drop: set[int], categories: list[str], ours: str) -> dict[str, float]:
    """Balanced returns without those near-B questions."""
    keep = ~((results.kind == int(Kind.NEAR_B)) & np.isin(results.question, list(drop)))
    out = {}
    for method in (ours, "tuned_threshold", "sft", "logistic_plan"):
        if method in results.fields:
            values = np.where(keep, results.fields[method]["returns"], np.nan)
            out[method] = weighted(per_question(results, values, categories).values)
    return out


def _duplicates_note(results: Results, drop: set[int], categories: list[str], ours: str) -> str:
    figures = without(results, drop, categories, ours)
    shown = ", ".join(f"{LABELS.get(k, k)} {v:.2f}" for k, v in figures.items())
    return (
        f"{len(drop)} questions have a near duplicate in another category (cosine of .7 or more), so as near B their "
        f"answer may in fact be in memory. Balanced return without them as near B: {shown}."
    )


def _read(path: Path, default: Any) -> Any:
    return orjson.loads(path.read_bytes()) if path.exists() else default


def _say(report: dict[str, Any], output: Path) -> None:
    out = console()
    for split, facts in report["splits"].items():
        table = Table("policy", "balanced", "95 %", "A", "near B", "far B", title=split)
        for name in LABELS:
            if name in facts["methods"]:
                f = facts["methods"][name]
                interval = f.get("balanced_interval")
                table.add_row(
                    LABELS[name],
                    f"{f['balanced']:.2f}",
                    f"{interval[0]:.2f} .. {interval[1]:.2f}" if interval else "",
                    *(f"{f[k]:.2f}" for k in ("return_a", "return_near_b", "return_far_b")),
                )
        out.print(table)
        for c in facts["comparisons"]:
            low, high = c["interval_questions"]
            out.print(
                f"{LABELS.get(c['a'], c['a'])} - {LABELS.get(c['b'], c['b'])}: {c['difference']:+.3f} "
                f"({low:+.2f} .. {high:+.2f}), McNemar {c['mcnemar']['only_a']}:{c['mcnemar']['only_b']} "
                f"p={c['mcnemar']['p']:.2g}",
                markup=False,
            )
        if facts["headroom_share"] is not None:
            out.print(f"share of the threshold-to-oracle headroom: {100 * facts['headroom_share']:.0f} %")
    if note := partly(report):
        out.print(note, markup=False)
    out.print(f"report: {output / 'report.html'}", markup=False)


def main(argv: list[str] | None = None) -> int:
    """``python -m jobs.evaluate_policy``."""
    return command_main("evaluate-policy", add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
