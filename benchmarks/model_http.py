"""Rollouts per second of the HTTP adapter beside a bare httpx-aiohttp loop on the same mock endpoint.

A rollout is a fixed number of sequential completions; ``--concurrency`` of them run at the same time. The bare loop
sends the same fields and only parses the reply. Runs alternate, and the medians are compared.

    python -m benchmarks.model_http --concurrency 128 --latency-ms 50 --calls 5 --rollouts 1280
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

from rayrl.models.config import ModelConfig
from rayrl.models.openai_http import OpenAIChatModel

OBSERVATION = "页面：搜索结果\n" + "".join(
    f"{i}. 商品标题 {i} desk lamp\n   ASIN：7000000{i:05d}\n   价格：{i}.5\n   关键属性：可折叠；触控\n"
    for i in range(1, 21)
)
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "You are a shopping assistant. " * 20},
    {"role": "user", "content": f"Task: buy a lamp\nObservation:\n{OBSERVATION}"},
]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "click",
            "parameters": {
                "type": "object",
                "properties": {"value": {"type": "string", "enum": [f"7000000{i:05d}" for i in range(20)]}},
                "required": ["value"],
                "additionalProperties": False,
            },
        },
    }
]


async def timed(call: Callable[[int], Awaitable[object]], *, rollouts: int, calls: int, concurrency: int) -> float:
    """Rollouts per second."""
    todo = iter(range(rollouts))

    async def worker() -> None:
        for rollout in todo:
            for step in range(calls):
                await call(rollout * calls + step)

    await asyncio.gather(*(call(-1 - i) for i in range(concurrency)))  # open the connections
    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())
    return rollouts / (time.perf_counter() - started)


async def bare(url: str, args: argparse.Namespace) -> float:
    """The loop without an adapter."""

    def session() -> aiohttp.ClientSession:
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async with httpx.AsyncClient(transport=AiohttpTransport(client=session), timeout=60) as client:
        body = {"model": "mock", "messages": MESSAGES, "tools": TOOLS, "temperature": 0.0, "max_tokens": 1024}

        async def call(seed: int) -> None:
            reply = await client.post(f"{url}/chat/completions", json={**body, "seed": seed})
            reply.raise_for_status()
            reply.json()

        return await timed(call, rollouts=args.rollouts, calls=args.calls, concurrency=args.concurrency)


async def adapter(url: str, args: argparse.Namespace) -> float:
    """The same through the adapter."""
    model = OpenAIChatModel(ModelConfig(base_url=url, name="mock", max_concurrency=args.concurrency))

    async def call(seed: int) -> None:
        output = await model.generate(MESSAGES, TOOLS, seed=seed)
        if len(output.tool_calls) != 1:
            raise RuntimeError(f"unexpected completion: {output}")

    try:
        return await timed(call, rollouts=args.rollouts, calls=args.calls, concurrency=args.concurrency)
    finally:
        await model.aclose()


def main() -> None:
    """Run and print one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--latency-ms", type=float, default=50)
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--rollouts", type=int, default=1280)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    command = [sys.executable, "-m", "rayrl.testing.mock_endpoint", "--latency-ms", str(args.latency_ms)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url = (server.stdout.readline() if server.stdout else "").strip()
        rates: dict[str, list[float]] = {"bare": [], "adapter": []}
        for _ in range(args.repeats):
            rates["bare"].append(asyncio.run(bare(url, args)))
            rates["adapter"].append(asyncio.run(adapter(url, args)))
    finally:
        server.terminate()
        server.wait()
    medians = {name: round(statistics.median(values), 1) for name, values in rates.items()}
    ideal = args.concurrency / (args.calls * args.latency_ms / 1000) if args.latency_ms else None
    result = {"rollouts_per_s": medians, "ratio": round(medians["adapter"] / medians["bare"], 3), "ideal": ideal}
    print(json.dumps({**result, "settings": vars(args), "runs": rates}))


if __name__ == "__main__":
    main()
