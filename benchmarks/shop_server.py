"""Environment steps per second of the embedded shop server, beside the recorded figures of the public one.

    python benchmarks/shop_server.py [--seconds 5] [--clients 1 8 32] [--products 300 20000]

Each client is a process of its own with one keep-alive connection and plays whole episodes over HTTP: reset, search,
product, options, buy, release. Every query is new, so the server's query cache never helps. A step is one ``interact``
call; resets and releases are work that is not counted. Server and clients share the machine's cores. The public
server's figures were recorded on two cores with 300 products (docs/shop.md).
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import multiprocessing.connection
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import orjson

from rayrl.shop.config import ShopServerConfig
from rayrl.shop.generator import generate_catalogue
from rayrl.shop.process import ShopProcess, shop_processes

PUBLIC_STEPS_PER_S = {1: 29.0, 8: 32.0, 32: 36.0}
PUBLIC_SEARCH_P50_MS = {1: 33.0, 8: 262.0, 32: 641.0}


def main() -> None:
    """Run all combinations and print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--products", type=int, nargs="+", default=[300, 20_000])
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    load = os.getloadavg()[0]
    print(f"load average before: {load:.2f} on {os.cpu_count()} cores" + (" (not quiet)" if load > 0.5 else ""))
    print(
        f"{'products':>9} {'clients':>8} {'steps/s':>9} {'x public':>9} {'p50 ms':>8} {'p95 ms':>8} "
        f"{'search p50':>11} {'p95':>7} {'reset p50':>10} {'server CPU':>11}"
    )
    for products in args.products:
        tasks = [t["task_id"] for p in generate_catalogue(products, 0) for t in p["instructions"]]
        config = ShopServerConfig(generate=products, slots=max(args.clients) + 8)
        with shop_processes(config) as (servers, _):
            for clients in args.clients:
                row = measure(servers[0], clients, args.seconds, tasks)
                row = {"products": products, "clients": clients, **row}
                rows.append(row)
                public = PUBLIC_STEPS_PER_S.get(clients)
                ratio = f"{row['steps_per_s'] / public:8.0f}x" if public and products == 300 else f"{'-':>9}"
                print(
                    f"{products:>9} {clients:>8} {row['steps_per_s']:>9.0f} {ratio} {row['p50_ms']:>8.2f} "
                    f"{row['p95_ms']:>8.2f} {row['search_p50_ms']:>11.2f} {row['search_p95_ms']:>7.2f} "
                    f"{row['reset_p50_ms']:>10.2f} {row['server_cpu']:>10.0%}",
                    flush=True,
                )
    print(f"public server, 300 products: steps/s {PUBLIC_STEPS_PER_S}, search p50 ms {PUBLIC_SEARCH_P50_MS}")
    print(json.dumps({"benchmark": "shop_server", "cores": os.cpu_count(), "load_before": load, "rows": rows}))


def measure(server: ShopProcess, clients: int, seconds: float, tasks: list[int]) -> dict[str, float]:
    """One measurement: figures over all clients together."""
    context = multiprocessing.get_context("fork")
    start = time.monotonic() + 0.5 + 0.02 * clients
    pipes: list[multiprocessing.connection.Connection] = []
    processes = []
    for number in range(clients):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=client, args=(server.ready["port"], number, start, seconds, tasks, theirs))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    time.sleep(max(0.0, start - time.monotonic()))
    cpu = cpu_seconds(server.pid)
    results = [pipe.recv() for pipe in pipes]
    cpu = cpu_seconds(server.pid) - cpu
    for process in processes:
        process.join()
    failed = [r for r in results if isinstance(r, str)]
    if failed:
        raise SystemExit(f"a client failed: {failed[0]}")
    latency: dict[str, list[float]] = {}
    for result in results:
        for name, values in result.items():
            latency.setdefault(name, []).extend(values)
    steps = sorted(v for name in ("search", "product", "option", "buy") for v in latency[name])
    return {
        "steps_per_s": len(steps) / seconds,
        "p50_ms": 1000 * quantile(steps, 0.5),
        "p95_ms": 1000 * quantile(steps, 0.95),
        "search_p50_ms": 1000 * quantile(sorted(latency["search"]), 0.5),
        "search_p95_ms": 1000 * quantile(sorted(latency["search"]), 0.95),
        "reset_p50_ms": 1000 * quantile(sorted(latency["reset"]), 0.5),
        "episodes": len(latency["buy"]),
        "server_cpu": cpu / seconds,
    }


def client(
    port: int, number: int, start: float, seconds: float, tasks: list[int], out: multiprocessing.connection.Connection
) -> None:
    """Body of one client process: play until the time is over, then send latencies in seconds by kind of call."""
    try:
        out.send(play(port, number, start, seconds, tasks))
    except Exception as error:
        out.send(f"{type(error).__name__}: {error}")
    # leave without the parent's exit handlers: its servers are not this process's to stop
    os._exit(0)


def play(port: int, number: int, start: float, seconds: float, tasks: list[int]) -> dict[str, list[float]]:
    """Episodes of one client."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.connect()
    rng = random.Random(number)
    latency: dict[str, list[float]] = {k: [] for k in ("reset", "search", "product", "option", "buy", "release")}

    def call(kind: str, body: dict[str, Any]) -> dict[str, Any]:
        began = time.perf_counter()
        connection.request("POST", "/api/shop_agent", orjson.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        result: dict[str, Any] = orjson.loads(response.read())["result"]
        if response.status != 200:
            raise RuntimeError(f"{response.status} {result}")
        if time.monotonic() <= start + seconds:
            latency[kind].append(time.perf_counter() - began)
        return result

    time.sleep(max(0.0, start - time.monotonic()))
    episode = 0
    while time.monotonic() < start + seconds:
        episode += 1
        begun = call("reset", {"action": "reset", "idx": rng.choice(tasks)})
        lease = {"action": "interact", "env_idx": begun["env_idx"], "lease_id": begun["lease_id"]}
        query = f"{begun['task_instruction']} c{number}e{episode}"
        state = call("search", {**lease, "response": f"search[{query}]"})["observation_state"]
        asin = rng.choice(state["products"][:5])["asin"]
        state = call("product", {**lease, "response": f"click[{asin}]"})["observation_state"]
        for axis, values in state["available_options"].items():
            call("option", {**lease, "response": f"click[{axis}={rng.choice(values)}]"})
        if not call("buy", {**lease, "response": "click[buy now]"})["done"]:
            raise RuntimeError("buying did not end the episode")
        call("release", {**lease, "action": "release_one"})
    return latency


def quantile(ordered: list[float], q: float) -> float:
    """Nearest-rank quantile of a sorted list."""
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("nan")


def cpu_seconds(pid: int) -> float:
    """CPU time a process has used."""
    import psutil

    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    main()
