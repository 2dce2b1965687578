"""How long the pages of Runs take for large runs: ``python -m benchmarks.studio_runs [--out FILE]``.

Two synthetic runs of 10,000 episodes (about 160 MB of traces each) and one episode of 50 MB. Times are those of the
server, in milliseconds: the first visit, and the median of five later ones.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import orjson
from starlette.testclient import TestClient

from rayrl.studio.app import create_app
from rayrl.studio.config import StudioConfig
from rayrl.testing.traces import TraceRecipe, write_run
from rayrl.workbench.workbench import Workbench

EPISODES, STEPS, PAGE_CHARS = 10_000, 1000, 51_000
WORKING = "◐"
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


def measure(client: TestClient, url: str) -> dict[str, float]:
    """First visit, how long until everything is there, and the median of five later visits."""

    def visit() -> tuple[float, str]:
        began = time.perf_counter()
        text = client.get(url).text
        return 1000 * (time.perf_counter() - began), text

    began = time.perf_counter()
    first, text = visit()
    while WORKING in text.partition("<main")[2]:
        time.sleep(0.2)
        _, text = visit()
    ready = time.perf_counter() - began
    later = statistics.median(visit()[0] for _ in range(5))
    return {"first_ms": round(first), "ready_s": round(ready, 1), "later_ms": round(later)}


def main() -> None:
    """Measure and print, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "runs"
        for name, competence in (("a", 0.0), ("b", 0.3)):
            write_run(root / name, TraceRecipe(experiment=name, tasks=EPISODES // 2, samples=2, competence=competence))
        episode = long_episode(root / "long")
        bench = Workbench(Path(folder) / "store")
        app = create_app(bench, StudioConfig(root=str(bench.store.root), runs=str(root)))
        with TestClient(app, base_url="http://127.0.0.1", headers={"accept": "text/html"}) as client:
            client.get("/help")  # templates are compiled once
            found = {name: measure(client, url) for name, url in PAGES.items()}
            found["run of one episode of 50 MB"] = measure(client, "/runs/long")
            found["episode of 50 MB"] = measure(client, f"/runs/long/episodes/{episode}?from=600")
        bench.close()
    text = orjson.dumps(found, option=orjson.OPT_INDENT_2)
    print(text.decode())
    if args.out:
        args.out.write_bytes(text)


if __name__ == "__main__":
    main()
