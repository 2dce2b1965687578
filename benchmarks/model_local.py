"""Tokens per second of the local small model, by threads and by completions in flight.

Each setting gets a server of its own in a child process; what is counted are sampled tokens over wall-clock time.

    python -m benchmarks.model_local --threads 1 2 --in-flight 1 2 --completions 12
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any

from rayrl.models.config import LocalConfig, ModelConfig
from rayrl.models.local import LocalModel
from rayrl.models.local_server import local_server

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "Task: buy a foldable desk lamp within 200 yuan."}]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string"}},
                "required": ["query"],
                "additionalProperties": False,
            },
        },
    }
]


async def measure(config: ModelConfig, completions: int) -> dict[str, float]:
    """Sampled tokens per second, and the share of replies that were one legal call."""
    model = LocalModel(config)
    try:
        await model.generate(MESSAGES, TOOLS, seed=0)  # load and warm
        started = time.perf_counter()
        outputs = await asyncio.gather(*(model.generate(MESSAGES, TOOLS, seed=1 + s) for s in range(completions)))
        seconds = time.perf_counter() - started
    finally:
        await model.aclose()
    tokens = sum(output.usage.completion_tokens or 0 for output in outputs)
    legal = sum(len(output.tool_calls) for output in outputs)
    return {"tokens_per_s": round(tokens / seconds, 1), "legal": legal / completions}


def main() -> None:
    """Run and print one JSON line per setting."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--completions", type=int, default=12)
    args = parser.parse_args()
    for threads in args.threads:
        for slots in args.in_flight:
            local = LocalConfig(context=1024, slots=slots, threads=threads)
            with local_server(local) as url:
                config = ModelConfig(kind="local", base_url=url, temperature=0.8, max_tokens=128, local=local)
                figures = asyncio.run(measure(config, args.completions))
            print(json.dumps({"threads": threads, "in_flight": slots, **figures}))


if __name__ == "__main__":
    main()
