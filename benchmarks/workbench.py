"""Figures of the workbench store and of interactive latency beside a batch.

    python -m benchmarks.workbench store      # 100,000 cases: pages, comparison, claims, eight writers
    python -m benchmarks.workbench latency    # interactive p95 with and without a running batch

Prints one JSON object. The store is built in a temporary folder; nothing is left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from rayrl.workbench.cases import Case
from rayrl.workbench.claims import Claims, owner_name
from rayrl.workbench.compare import compare
from rayrl.workbench.evidence import Outcome
from rayrl.workbench.experiments import Params
from rayrl.workbench.results import Filter, page
from rayrl.workbench.samples import sample_file, sample_profile, skill_folder
from rayrl.workbench.samples.generate import generate
from rayrl.workbench.store import Store
from rayrl.workbench.workbench import Workbench

ROUNDS = 5
ROOT = Path(__file__).resolve().parents[1]


def dataset(bench: Workbench, n: int, name: str) -> dict[str, Any]:
    """``n`` cases: the sample's, numbered on."""
    base = generate(600)
    cases = [
        Case(
            case_id=f"{i:06d}",
            query=f"{base[i % 600]['query']} {i}",
            gold_route=base[i % 600]["label"],
            domain=base[i % 600]["domain"],
            context=base[i % 600]["context"],
            source_row={"row": i},
            source_place=f"line {i + 1}",
        )
        for i in range(n)
    ]
    return bench.datasets.freeze(
        name=name, cases=cases, classes=["fast", "slow"], upload="0" * 64, options={}, profile=("bench", 1)
    )


def fill(bench: Workbench, experiment_id: str, seed: int) -> None:
    """Verdicts for every case: 80 % right, reasons and evidence of a realistic size."""
    random = Random(seed)
    with bench.store.write() as connection:
        rows = connection.exec_driver_sql(
            "SELECT gold, experiment_id, ordinal FROM evaluation_results WHERE experiment_id=?", (experiment_id,)
        ).all()
        values = []
        for gold, experiment, ordinal in rows:
            right = random.random() < 0.8
            said = gold if right else ("slow" if gold == "fast" else "fast")
            refs = [f"knowledge/地图能力.md#{random.choice(('路况', '发起导航', '复杂出行'))}"]
            detail = json.dumps({"evidence_refs": refs, "reads": [], "evidence": {"cited": []}}, ensure_ascii=False)
            evidence = random.choice(("supported", "none", "unread"))
            reason = f"规则 {random.randint(0, 50)} 适用于这个请求，因此判断为 {said}"
            values.append((said, reason, random.random(), evidence, right, detail, experiment, ordinal))
        connection.exec_driver_sql(
            "UPDATE evaluation_results SET state='completed', prediction=?, reason=?, confidence=?, evidence=?, agrees=?,"
            " detail=?, attempts=1 WHERE experiment_id=? AND ordinal=?",
            values,
        )


def timed(work: Callable[[], Any], repeats: int = 20) -> dict[str, float]:
    """Median and worst milliseconds after one run to warm up."""
    work()
    took = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        took.append((time.perf_counter() - began) * 1000)
    return {"median_ms": round(statistics.median(took), 2), "max_ms": round(max(took), 2)}


def _writer(root: Path, experiment_id: str, out: Any) -> None:
    claims = Claims(Store(root), experiment_id, owner_name())
    n = 0
    try:
        while batch := claims.take(32):
            claims.finish([(c, Outcome(state="completed", prediction="fast"), None, None) for c in batch])
            n += len(batch)
        out.put((n, None))
    except Exception as error:
        out.put((n, f"{type(error).__name__}: {error}"))


def store(n: int) -> dict[str, Any]:
    """Figures of a store with ``n`` cases."""
    found: dict[str, Any] = {"cases": n}
    with tempfile.TemporaryDirectory() as folder:
        bench = Workbench(folder)
        snapshot = bench.snapshots.add_folder(skill_folder(1))["id"]
        began = time.perf_counter()
        big = dataset(bench, n, "big")
        found["freeze_s"] = round(time.perf_counter() - began, 2)

        def experiment(data: dict[str, Any]) -> str:
            made = bench.experiments.create(name="e", dataset_id=data["id"], snapshot_id=snapshot, model="reader")
            return str(made["id"])

        first = experiment(big)
        fill(bench, first, 1)
        with bench.store.write() as connection:
            connection.exec_driver_sql("ANALYZE")
        middle = f"{n // 2}.0"
        pages = {
            "all, in the middle": (Filter(), middle),
            "disagreements": (Filter(disagreements=True), None),
            "agrees=false, in the middle": (Filter(agrees=False), middle),
            "domain": (Filter(domain="通讯"), None),
            "evidence and prediction": (Filter(evidence="none", prediction="fast"), middle),
            "low confidence first": (Filter(sort="confidence"), None),
            "search": (Filter(search="周末"), None),
            "search without a hit": (Filter(search="这句话没有"), None),
            "search for letters, without a hit": (Filter(search="no such words"), None),
            "reviewed, none there": (Filter(review="any"), None),
            "not reviewed, in the middle": (Filter(review="none"), middle),
        }
        found["pages"] = {}
        for name, (filters, cursor) in pages.items():
            found["pages"][name] = timed(partial(page, bench, first, filters, limit=50, cursor=cursor))
        quarter = dataset(bench, n // 4, "quarter")
        a, b = experiment(quarter), experiment(quarter)
        fill(bench, a, 2)
        fill(bench, b, 3)
        found["compare_s"] = round(timed(lambda: compare(bench, a, b, examples=200), 3)["median_ms"] / 1000, 3)
        for size in (1, 16, 64):
            claims = Claims(bench.store, experiment(quarter), owner_name())
            began, taken = time.perf_counter(), 0
            while time.perf_counter() - began < 3 and (batch := claims.take(size)):
                taken += len(batch)
            found[f"claims_per_s_in_{size}s"] = round(taken / (time.perf_counter() - began))
        found["eight_writers"] = _eight(bench, experiment(quarter), n // 4)
        bench.close()
    return found


def _eight(bench: Workbench, experiment_id: str, n: int) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    workers = [context.Process(target=_writer, args=(bench.store.root, experiment_id, out)) for _ in range(8)]
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    reports = [out.get() for _ in workers]
    for worker in workers:
        worker.join()
    errors = [error for _, error in reports if error]
    done = sum(count for count, _ in reports)
    return {"done": done, "of": n, "errors": errors, "seconds": round(time.perf_counter() - began, 2)}


async def _turns(client: Any, url: str, n: int, users: int) -> list[float]:
    took: list[float] = []

    async def user() -> None:
        for _ in range(n // users):
            # a session of its own each: what was read before makes the next turn of a session shorter
            made = await client.post(f"{url}/api/sessions", json={"skill": "fast-slow-routing", "model": "loopback"})
            session = made.json()["id"]
            began = time.perf_counter()
            answer = await client.post(f"{url}/api/sessions/{session}/messages", json={"text": "到公司电量够不够"})
            took.append(time.perf_counter() - began)
            if answer.json()["state"] != "answered":
                raise SystemExit(f"a turn failed: {answer.text}")
            await client.delete(f"{url}/api/sessions/{session}")

    async with asyncio.TaskGroup() as group:
        for _ in range(users):
            group.create_task(user())
    return took


def _endpoint(latency_ms: float) -> tuple[Any, dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.workbench", "endpoint", "--latency-ms", str(latency_ms)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    port = int(process.stdout.readline()) if process.stdout else 0
    return process, {"kind": "openai", "name": "loopback", "base_url": f"http://127.0.0.1:{port}/v1"}


def latency(turns: int, latency_ms: float, concurrency: int, apart: bool) -> dict[str, Any]:
    """Interactive turns of four users against a model with fixed latency: alone and beside a batch, in turns.

    The batch asks the same model server, or with ``apart`` one of its own.
    """
    import httpx

    with tempfile.TemporaryDirectory() as folder:
        bench = Workbench(folder)
        endpoint, profile = _endpoint(latency_ms)
        other, batch = _endpoint(latency_ms) if apart else (None, profile)
        bench.models.save("loopback", profile)
        bench.models.save("batch", batch)
        upload = bench.uploads.add(*sample_file("jsonl"))
        bench.datasets.save_profile("p", sample_profile("jsonl"), [])
        from rayrl.workbench.readers.rows import Options

        data = bench.datasets.create(name="d", upload=upload["sha256"], options=Options(), profile_name="p")
        snapshot = bench.snapshots.add_folder(skill_folder(1))["id"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "jobs.cli", "studio", "--root", folder, "--port", "0", "--json"]
        server = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            text = ""
            while "}" not in text:
                text += server.stdout.readline() if server.stdout else "}"
            url = json.loads(text)["url"]

            async def measure() -> dict[str, Any]:
                async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
                    await _turns(client, url, 4, 2)
                    made = bench.experiments.create(
                        name="batch",
                        dataset_id=data["id"],
                        snapshot_id=snapshot,
                        model="batch",
                        params=Params(repeats=4),
                        concurrency=concurrency,
                    )
                    alone: list[float] = []
                    beside: list[float] = []
                    for index in range(ROUNDS):  # in turns, so that a machine that drifts hurts both alike
                        alone += await _turns(client, url, turns // ROUNDS, 4)
                        word = "resume" if index else "start"
                        (await client.post(f"{url}/api/evaluations/{made['id']}/{word}")).raise_for_status()
                        done = bench.experiments.get(made["id"])["counts"]["completed"]
                        while bench.experiments.get(made["id"])["counts"]["completed"] < done + 5:
                            await asyncio.sleep(0.05)
                        beside += await _turns(client, url, turns // ROUNDS, 4)
                        (await client.post(f"{url}/api/evaluations/{made['id']}/pause")).raise_for_status()
                        while bench.experiments.get(made["id"])["counts"]["running"]:
                            await asyncio.sleep(0.05)
                    state = bench.experiments.get(made["id"])
                    listed = (await client.get(f"{url}/api/sessions")).json()
                    p95 = [round(statistics.quantiles(t, n=20)[-1] * 1000, 1) for t in (alone, beside)]
                    return {
                        "turns": turns,
                        "model_latency_ms": latency_ms,
                        "batch_concurrency": concurrency,
                        "batch_has_its_own_model_server": apart,
                        "median_alone_ms": round(statistics.median(alone) * 1000, 1),
                        "median_beside_batch_ms": round(statistics.median(beside) * 1000, 1),
                        "p95_alone_ms": p95[0],
                        "p95_beside_batch_ms": p95[1],
                        "ratio": round(p95[1] / p95[0], 3),
                        "batch_outlasted_the_turns": state["state"] == "paused",
                        "batch_done_meanwhile": state["counts"]["completed"],
                        "sessions_listed": len(listed),
                    }

            return asyncio.run(measure())
        finally:
            server.terminate()
            server.wait(60)
            for process in (endpoint, other):
                if process is not None:
                    process.terminate()
                    process.wait(10)
            bench.close()


def endpoint(latency_ms: float) -> None:
    """An OpenAI-compatible server on loopback: the scripted reader behind a fixed latency. Prints its port."""
    from aiohttp import web

    from rayrl.workbench.reader import ScriptedReader

    reader = ScriptedReader()

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        await asyncio.sleep(latency_ms / 1000)
        output = await reader.generate(body["messages"], body["tools"], seed=int(body.get("seed", 0)))
        calls = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
            for c in output.tool_calls
        ]
        message = {"role": "assistant", "content": None, "tool_calls": calls}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return web.json_response({"id": "x", "object": "chat.completion", "choices": [choice], "usage": usage})

    async def serve() -> None:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.Event().wait()

    asyncio.run(serve())


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("store", "latency", "endpoint"))
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--turns", type=int, default=80)
    parser.add_argument("--latency-ms", type=float, default=200.0)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--apart", action="store_true", help="latency: the batch has a model server of its own")
    args = parser.parse_args()
    if args.what == "endpoint":
        endpoint(args.latency_ms)
        return
    if args.what == "store":
        found = store(args.cases)
    else:
        found = latency(args.turns, args.latency_ms, args.concurrency, args.apart)
    print(json.dumps(found, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
