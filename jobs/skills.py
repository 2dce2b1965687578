"""``rayrl skills``: banks of skills (build, gate, study, triage, show, diff, review, convert, check), and folders of
one Skill (snapshot, lint, verify, diff)."""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table

from jobs import build_skills, curriculum, gate_study, skill_snapshots, validate_skills
from jobs.output import console, facts_table, print_json
from rayrl.errors import UserError
from rayrl.skills.bank import SkillBank, diff_banks, load_snapshot, review_skill, save_bank, to_public
from rayrl.skills.firewall import Protected, inspect, leaks
from rayrl.traces.manifest import write_json_atomic


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``rayrl skills``."""
    commands = parser.add_subparsers(dest="command", required=True)
    build_skills.add_arguments(commands.add_parser("build", help="traces to a bank of candidates"))
    validate_skills.add_arguments(commands.add_parser("gate", help="does each skill help this checkpoint?"))
    gate_study.add_arguments(commands.add_parser("study", help="how good is the gate itself?"))
    curriculum.add_arguments(commands.add_parser("triage", help="retry all-wrong groups with every skill, and sort"))
    show = commands.add_parser("show", help="what a bank holds, and why")
    show.add_argument("bank", type=Path)
    show.add_argument("--skill", metavar="ID", help="one skill with text and evidence")
    diff = commands.add_parser("diff", help="what changed between two banks (files) or two Skills (folders, git)")
    diff.add_argument("old")
    diff.add_argument("new")
    review = commands.add_parser("review", help="accept, edit or reject a skill; writes a new snapshot")
    review.add_argument("bank", type=Path)
    review.add_argument("skill")
    review.add_argument("status", choices=("accepted", "edited", "rejected"))
    review.add_argument("--by", required=True, help="who says so")
    review.add_argument("--note", default="")
    review.add_argument("--text", type=Path, metavar="FILE", help="edited: file with the new text")
    review.add_argument("--out", type=Path, required=True, help="new snapshot")
    convert = commands.add_parser("convert", help="to rayrl-skillbank-v1, or with --public to shopsimrl-skillbank-v1")
    convert.add_argument("bank", type=Path)
    convert.add_argument("--public", action="store_true")
    convert.add_argument("--out", type=Path, required=True)
    check = commands.add_parser("check", help="shapes that no skill needs: ids, digit runs, task numbers")
    check.add_argument("bank", type=Path)
    skill_snapshots.add_snapshot_commands(commands)


def run(args: argparse.Namespace) -> int:
    """``rayrl skills``."""
    command: str = args.command
    if command == "build":
        return build_skills.run(args)
    if command == "gate":
        return validate_skills.run(args)
    if command == "study":
        return gate_study.run(args)
    if command == "triage":
        return curriculum.run(args)
    if command in skill_snapshots.SNAPSHOT_COMMANDS:
        return skill_snapshots.run(args)
    return {"show": _show, "diff": _diff, "review": _review, "convert": _convert, "check": _check}[command](args)


def _show(args: argparse.Namespace) -> int:
    bank = load_snapshot(args.bank)
    if args.skill:
        entry, record = bank.entry(args.skill), bank.record(args.skill)
        found = {**entry.model_dump(mode="json"), "record": record.model_dump(mode="json")}
        if args.json:
            print_json(found)
            return 0
        out = console()
        out.print(entry.content + "\n", markup=False)
        facts: list[tuple[str, Any]] = [
            (k, v) for k, v in record.model_dump(mode="json", exclude_defaults=True).items()
        ]
        out.print(facts_table(f"{entry.skill_id} version {entry.version}", facts))
        return 0
    if args.json:
        print_json({"sha256": bank.sha256, **bank.model_dump(mode="json")})
        return 0
    console().print(_table(bank))
    return 0


def _table(bank: SkillBank) -> Table:
    active = {s.skill_id for s in bank.active()}
    table = Table(
        "skill", "version", "for", "against", "effect", "review", "leak check", "active", title=bank.sha256[:16]
    )
    for skill in bank.skills:
        record = bank.record(skill.skill_id)
        gate, leak = record.gate, record.leak_check
        table.add_row(
            skill.skill_id,
            skill.version,
            str(len(record.evidence_for)),
            str(len(record.evidence_against)),
            f"{gate.effect:+.3f} [{gate.low:+.3f}, {gate.high:+.3f}]" if gate else "not measured",
            record.review.status,
            ("passed" if leak.passed else "failed") if leak.checked else "not checked",
            "yes" if skill.skill_id in active else "no",
        )
    return table


def _diff(args: argparse.Namespace) -> int:
    if not (Path(args.old).is_file() or Path(args.new).is_file()):
        return skill_snapshots.diff(args)  # a bank is one file; a Skill is a folder, a snapshot or REPOSITORY@REF:PATH
    found = diff_banks(load_snapshot(Path(args.old)), load_snapshot(Path(args.new)))
    if args.json:
        print_json(found)
        return 0
    out = console()
    facts = [(k, ", ".join(v) if isinstance(v, list) else v) for k, v in found.items() if k != "changed"]
    out.print(facts_table("Two banks", facts))
    for name, fields in found["changed"].items():
        out.print(f"\n{name}", style="bold", markup=False)
        for field, (before, after) in fields.items():
            out.print(f"  {field}:\n    - {before}\n    + {after}", markup=False)
    return 0


def _review(args: argparse.Namespace) -> int:
    bank = load_snapshot(args.bank)
    text = args.text.read_text(encoding="utf-8").strip() if args.text else None
    if text is not None:
        found = inspect(text, Protected())
        if not found.passed:
            raise UserError(f"{args.text}: {'; '.join(found.reasons)}; a skill must not name single products or tasks")
    now = datetime.now(UTC).isoformat(timespec="seconds")
    changed = review_skill(bank, args.skill, args.status, by=args.by, at=now, note=args.note, content=text)
    digest = save_bank(changed, args.out)
    if args.json:
        print_json({"sha256": digest, "parent": changed.parent, "file": str(args.out)})
    else:
        console().print(f"{args.skill}: {args.status}; snapshot {digest[:16]} in {args.out}", markup=False)
    return 0


def _convert(args: argparse.Namespace) -> int:
    bank = load_snapshot(args.bank)
    if args.public:
        write_json_atomic(args.out, to_public(bank))
    else:
        save_bank(bank, args.out)
    facts = {"skills": len(bank.skills), "active": len(bank.active()), "file": str(args.out)}
    print_json(facts) if args.json else console().print(facts_table("Converted", list(facts.items())))
    return 0


def _check(args: argparse.Namespace) -> int:
    bank = load_snapshot(args.bank)
    found = leaks({s.skill_id: s.content for s in bank.skills})
    if args.json:
        print_json({"skills": len(bank.skills), "problems": found})
    else:
        for name, reasons in found.items():
            console().print(f"{name}: {'; '.join(reasons)}", markup=False)
        console().print(f"{len(bank.skills)} skills, {len(found)} with problems")
    return 2 if found else 0


if __name__ == "__main__":
    from jobs.command import command_main

    sys.exit(command_main("skills", add_arguments, run, None))
