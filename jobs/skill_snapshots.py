"""``rayrl skills snapshot|lint|diff|verify``: folders of Skills, frozen and compared."""

from __future__ import annotations

import argparse
from pathlib import Path

from jobs.output import console, facts_table, print_json
from rayrl.skills.diff import diff_skills
from rayrl.skills.snapshot import Taken, load, take_folder, take_git, verify, write_snapshot

SNAPSHOT_COMMANDS = ("snapshot", "lint", "verify")


def add_snapshot_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The subcommands of ``rayrl skills`` that take a Skill folder."""
    snapshot = commands.add_parser("snapshot", help="freeze a Skill: a folder, or REPOSITORY@REF:PATH")
    snapshot.add_argument("skill")
    snapshot.add_argument("--out", type=Path, required=True, help="folder of snapshots")
    lint = commands.add_parser("lint", help="what is odd about a Skill folder; exit code 0 also with warnings")
    lint.add_argument("skill")
    check = commands.add_parser("verify", help="compare a Skill's snapshot with the hashes taken when it was frozen")
    check.add_argument("snapshot", type=Path)


def diff(args: argparse.Namespace) -> int:
    """``rayrl skills diff`` of two Skills: folders, git, or snapshots."""
    changes = diff_skills(take(args.old), take(args.new))
    if args.json:
        print_json({"changes": [change.model_dump() for change in changes]})
        return 0
    for change in changes:
        where = f" ({', '.join(change.sections)})" if change.sections else ""
        console().print(f"{change.change} {change.path}{where}", markup=False)
        console().print(change.diff, markup=False)
    return 0


def take(text: str) -> Taken:
    """A Skill by folder, snapshot folder, or ``REPOSITORY@REF:PATH``."""
    path = Path(text).expanduser()
    if (path / "snapshot.json").is_file() and (path / "tree").is_dir():
        return load(path)
    repository, at, rest = text.rpartition("@")
    if at and ":" in rest and not path.is_dir():
        ref, _, inside = rest.partition(":")
        return take_git(Path(repository), ref, inside)
    return take_folder(path)


def run(args: argparse.Namespace) -> int:
    """``rayrl skills snapshot|lint|verify``."""
    if args.command == "verify":
        manifest = verify(args.snapshot)
        if args.json:
            print_json({"intact": True, "content_sha256": manifest.content_sha256, "files": len(manifest.files)})
        else:
            console().print(
                f"intact: {manifest.name} {manifest.content_sha256}, {len(manifest.files)} files", markup=False
            )
        return 0
    taken = take(args.skill)
    manifest = taken.manifest
    if args.command == "lint":
        if args.json:
            print_json({"name": manifest.name, "findings": [finding.model_dump() for finding in manifest.findings]})
        else:
            for finding in manifest.findings:
                console().print(f"{finding.level} {finding.code} {finding.path}: {finding.message}", markup=False)
            console().print(f"{manifest.name}: {len(manifest.findings)} findings", markup=False)
        return 0
    folder = write_snapshot(taken, args.out)
    if args.json:
        print_json({"folder": str(folder), **manifest.model_dump()})
        return 0
    facts = [
        ("folder", folder),
        ("content hash", manifest.content_sha256),
        ("status", manifest.status + (" (uncommitted)" if manifest.dirty else "")),
        ("commit", manifest.git_commit or "-"),
        ("tag", manifest.git_tag or "-"),
        ("files", len(manifest.files)),
        ("findings", len(manifest.findings)),
    ]
    console().print(facts_table(manifest.name, facts))
    return 0
