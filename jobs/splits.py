"""``rayrl splits build|import|check``: frozen split manifests."""

from __future__ import annotations

import argparse
from pathlib import Path

from jobs.output import console, facts_table, print_json
from rayrl.errors import DataError, RunConflictError
from rayrl.schemas import JsonDict
from rayrl.splits import (
    TaskFacts,
    build_splits,
    check_splits,
    facts_from_file,
    facts_from_products,
    import_splits,
)
from rayrl.tasks import SplitManifest, load_split_manifest
from rayrl.traces.manifest import write_json_atomic


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``rayrl splits``."""
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="split a catalogue's tasks, related tasks kept on one side")
    _source(build)
    build.add_argument("--val", type=int, required=True, help="tasks in val")
    build.add_argument("--test", type=int, required=True, help="tasks in test")
    build.add_argument("--split-seed", type=int, default=0, help="seed of the assignment (default 0)")
    build.add_argument(
        "--persona", choices=["only", "without", "any"], default="any", help="tasks with persona, without, or both"
    )
    build.add_argument("--out", type=Path, required=True, help="manifest to write")
    importing = commands.add_parser("import", help="read persona_splits.v1.json or legacy range splits")
    importing.add_argument("file", type=Path)
    importing.add_argument("--out", type=Path, required=True)
    check = commands.add_parser("check", help="verify a manifest, and its tasks against a catalogue")
    check.add_argument("manifest", type=Path)
    _source(check, required=False)


def _source(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    source = parser.add_mutually_exclusive_group(required=required)
    source.add_argument("--products", type=Path, help="catalogue in the public product format")
    source.add_argument("--generate", type=int, metavar="N", help="the generated catalogue of N products")
    source.add_argument(
        "--tasks",
        type=Path,
        help="tasks of your own environment: JSONL with task_id, and optionally "
        "product, instruction, persona, user (what is shared keeps tasks on one side)",
    )
    source.add_argument("--count", type=int, metavar="N", help="unrelated tasks 0 to N-1 of your own environment")
    parser.add_argument("--seed", type=int, default=0, help="seed of the generated catalogue (default 0)")


def run(args: argparse.Namespace) -> int:
    """``rayrl splits``."""
    if args.command == "build":
        manifest = _own_tasks(args) if args.tasks or args.count else build_manifest(_products(args), args)
        return _write(manifest, args.out, args.json)
    if args.command == "import":
        return _write(import_splits(args.file), args.out, args.json)
    manifest = load_split_manifest(args.manifest)
    problems: list[str] = []
    if args.tasks or args.count:
        facts_list = facts_from_file(args.tasks) if args.tasks else [TaskFacts(task_id=i) for i in range(args.count)]
        problems = check_splits(manifest, facts_list)
    elif args.products or args.generate:
        products = _products(args)
        problems = check_splits(manifest, facts_from_products(products))
        from rayrl.shop.catalogue import catalogue_hash

        frozen = manifest.source.get("sha256")
        if manifest.source.get("kind") == "shop_catalogue" and frozen != catalogue_hash(products):
            problems.append("the manifest was built for another catalogue")
    facts = {name: len(split.task_ids) for name, split in manifest.splits.items()}
    if args.json:
        print_json({"splits": facts, "problems": problems, "ok": not problems})
    else:
        rows = [(name, f"{n} tasks (role {manifest.splits[name].role})") for name, n in facts.items()]
        console().print(facts_table(str(args.manifest), [*rows, ("problems", "; ".join(problems) or "none")]))
    return 2 if problems else 0


def build_manifest(products: list[JsonDict], args: argparse.Namespace) -> SplitManifest:
    """The manifest for a catalogue and the command's arguments."""
    from rayrl.shop.catalogue import catalogue_hash

    facts = facts_from_products(products)
    if args.persona == "only":
        facts = [fact for fact in facts if fact.persona or fact.user]
    elif args.persona == "without":
        facts = [fact for fact in facts if not (fact.persona or fact.user)]
    if not facts:
        raise DataError("no tasks are left to split")
    source: JsonDict = {"kind": "shop_catalogue", "sha256": catalogue_hash(products)}
    if args.generate:
        source.update(generate=args.generate, seed=args.seed)
    else:
        source["file"] = args.products.name
    persona = {"only": True, "without": False, "any": None}[args.persona]
    return build_splits(facts, val=args.val, test=args.test, seed=args.split_seed, source=source, persona=persona)


def _own_tasks(args: argparse.Namespace) -> SplitManifest:
    """A manifest for the tasks of a user's own environment."""
    if args.count:
        facts = [TaskFacts(task_id=task_id) for task_id in range(args.count)]
        source: JsonDict = {"kind": "count", "count": args.count}
    else:
        facts, source = facts_from_file(args.tasks), {"kind": "tasks", "file": args.tasks.name}
    return build_splits(facts, val=args.val, test=args.test, seed=args.split_seed, source=source)


def _products(args: argparse.Namespace) -> list[JsonDict]:
    from rayrl.shop.catalogue import load_products
    from rayrl.shop.generator import generate_catalogue

    if args.products:
        return load_products(args.products)
    return generate_catalogue(args.generate, args.seed)


def _write(manifest: SplitManifest, out: Path, as_json: bool) -> int:
    if out.exists():
        raise RunConflictError(f"{out} exists; a split manifest is frozen, so write a new one under another name")
    write_json_atomic(out, manifest.model_dump(mode="json"))
    sizes = {name: len(split.task_ids) for name, split in manifest.splits.items()}
    if as_json:
        print_json({"manifest": str(out), "splits": sizes, "grouping": manifest.grouping})
    else:
        rows = [(name, f"{n} tasks") for name, n in sizes.items()]
        console().print(facts_table(f"wrote {out}", [*rows, ("grouping", manifest.grouping)]))
    return 0
