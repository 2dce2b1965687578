"""``rayrl gate "question"``: what a trained gate decides, how sure it is, and the nearest memories."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from jobs.command import command_main
from jobs.output import console, facts_table, print_json
from rayrl.errors import DataError
from rayrl.retrieval.gate import Decision, RetrievalGate

PLACES = (
    "runs/train-serve/gate",
    "runs/train-faq/gate",
    "runs/quickstart-training/gate",
    "runs/quickstart/training/gate",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``rayrl gate``."""
    parser.add_argument("question", nargs="+", help="one or more questions (quote each)")
    parser.add_argument(
        "--gate", type=Path, help="gate folder of a training run (default: the newest of the usual places)"
    )
    parser.add_argument(
        "--mode", choices=("off", "shadow", "enforce"), default="enforce", help="off, shadow or enforce"
    )


def run(args: argparse.Namespace) -> int:
    """``rayrl gate``."""
    gate = RetrievalGate(args.gate or find_gate(), mode=args.mode)
    gate.warm_up()  # the time of loading the encoder says nothing
    decisions = [(q, gate.decide(q)) for q in args.question]
    if args.json:
        print_json(
            {"decisions": [{"question": q, **asdict(d)} for q, d in decisions], "encoder": gate.encoder.identity()}
        )
        return 0
    for question, decision in decisions:
        console().print(facts_table(question, _facts(decision)))
    return 0


def find_gate() -> Path:
    """The newest gate among the usual places.

    Raises:
        DataError: none there.
    """
    found = [Path(p) for p in PLACES if (Path(p) / "gate.json").is_file()]
    if not found:
        raise DataError("no trained gate was found; make one with `rayrl train train/serve`, or give --gate FOLDER")
    return max(found, key=lambda p: (p / "gate.json").stat().st_mtime)


def _facts(decision: Decision) -> list[tuple[str, object]]:
    verdict = f"retrieve {decision.retrieve}" if decision.retrieve else "answer without retrieving"
    if not decision.act:
        verdict += " (not enforced)"
    rows: list[tuple[str, object]] = [("decision", verdict), ("P(retrieve)", f"{decision.probability:.3f}")]
    if decision.continue_probabilities:
        rows.append(("P(go on)", ", ".join(f"{p:.3f}" for p in decision.continue_probabilities)))
    used = {m.id for m in decision.memories}
    rows += [(f"{m.cosine:.3f}{' *' if m.id in used else ''}", f"[{m.category}] {m.text}") for m in decision.nearest]
    rows.append(("time", f"encoder {decision.encode_ms:.1f} ms, gate {decision.decide_ms:.2f} ms"))
    return rows


def main(argv: list[str] | None = None) -> int:
    """``python -m jobs.gate``."""
    return command_main("gate", add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
