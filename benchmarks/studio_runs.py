"""How long the pages of Runs take for large runs: ``python -m benchmarks.studio_runs [--out FILE]``.

Two synthetic runs of 10,000 episodes (about 160 MB of traces each) and one episode of 50 MB. Each page is visited twice
over by studios that have just started (see :mod:`benchmarks.studio_visits`): over a store that has never seen these
runs, and over one that has their index on disk. Pages of single episodes have an address only once there is an index.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import orjson

from benchmarks.studio_visits import Studio, chromium, table, visit, working
from rayrl.testing.traces import TraceRecipe, write_run

EPISODES, STEPS, PAGE_CHARS = 10_000, 1000, 51_000
PAGES = {
    "list of runs": "/runs",
    "run": "/runs/a",
    "episodes": "/runs/a/episodes",
    "episodes, by tokens": "/runs/a/episodes?sort=-tokens",
    "episodes, failed with a label": "/runs/a/episodes?outcome=failed&label=loop",
    "episodes, filter language": "/runs/a/episodes?filter=reward < 1 and steps > 6",
    "episode": "/runs/a/episodes/task-000004__sample-000",
    "comparison": "/runs/-/compare?a=a&b=b",
}


def long_episode(folder: Path) -> str:
    """A run with one episode of about 50 MB; returns its id."""
    write_run(folder, TraceRecipe(experiment="long", tasks=1, failure_rate=0.0))
    record = orjson.loads((folder / "traces.jsonl").read_bytes().splitlines()[0])
    first = record["steps"][0]
    texts = [f"page {i} ".ljust(PAGE_CHARS, "x") for i in range(STEPS)]
    record["interned"] = {"texts": texts, "states": [{}], "toolsets": [[]]}
    record["steps"] = []
    for i in range(STEPS):
        seen = {"text": i, "state": 0, "version": "1"}
        after = {"observation": seen, "done": False, "reward": 0.0}
        record["steps"].append({**first, "index": i, "observation": seen, "tools": 0, "environment": after})
    record["reset"]["observation"], record["conversation"] = {"text": 0, "state": 0, "version": "1"}, []
    (folder / "traces.jsonl").write_bytes(orjson.dumps(record) + b"\n")
    return str(record["episode_id"])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, chromium() as browser:
        root, store = Path(scratch) / "runs", Path(scratch) / "store"
        for name, competence in (("a", 0.0), ("b", 0.3)):
            write_run(root / name, TraceRecipe(experiment=name, tasks=EPISODES // 2, samples=2, competence=competence))
        episode = long_episode(root / "long")
        pages = PAGES | {
            "run of one episode of 50 MB": "/runs/long",
            "episode of 50 MB": f"/runs/long/episodes/{episode}?from=600",
        }

        def anew() -> Studio:
            shutil.rmtree(store, ignore_errors=True)
            return Studio(store, root)

        def known() -> Studio:
            return Studio(store, root)

        unseen = {name: visit(anew, browser, url) for name, url in pages.items() if "/episodes/" not in url}
        with anew() as studio:
            for url in ("/runs/a", "/runs/b", "/runs/long"):
                while working(studio.ask(url)[1]):
                    time.sleep(0.2)
        seen = {name: visit(known, browser, url) for name, url in pages.items()}
    print(f"runs never seen before\n{table(unseen)}\n\nindex on disk\n{table(seen)}")
    if args.out:
        made = {name: {k: asdict(v) for k, v in part.items()} for name, part in (("unseen", unseen), ("seen", seen))}
        args.out.write_bytes(orjson.dumps(made, option=orjson.OPT_INDENT_2))


if __name__ == "__main__":
    main()
