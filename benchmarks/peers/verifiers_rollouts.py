"""verifiers on the work of benchmarks/rollouts.py: a ToolEnv that ends after the given number of turns.

    python verifiers_rollouts.py WORK.json --rollouts N --concurrency C

Runs in the peers' environment and imports nothing of rayrl. The clock covers ``generate`` alone; imports and the
building of the data set are not in it. Results stay in memory, which is its default.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import time
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import verifiers as vf
from datasets import Dataset
from openai import AsyncOpenAI
from verifiers.clients import OpenAIChatCompletionsClient


def search(query: str) -> str:
    """Does nothing; call it until the episode is done.

    Args:
        query: anything.
    """
    return "Step done."


def reward(completion: list) -> float:
    """A reward for having been here."""
    return 1.0


async def play(work: dict, rollouts: int, concurrency: int) -> dict:
    """All rollouts; returns what is printed."""
    questions = [{"question": work["user"].replace("{task}", str(i)), "answer": ""} for i in range(rollouts)]
    environment = vf.ToolEnv(
        dataset=Dataset.from_list(questions),
        system_prompt=work["system"],
        tools=[search],
        max_turns=work["steps"],
        rubric=vf.Rubric(funcs=[reward]),
    )
    inputs = environment.get_dataset()
    async with AsyncOpenAI(base_url=work["url"], api_key="none") as client:
        began = time.perf_counter()
        cpu = time.process_time()
        results = await environment.generate(
            inputs,
            client=OpenAIChatCompletionsClient(client),
            model="mock",
            sampling_args={"temperature": 0.0, "max_tokens": 1024},
            max_concurrent=concurrency,
            on_progress=lambda *_: None,
        )
        seconds = time.perf_counter() - began
        cpu = time.process_time() - cpu
    outputs = results["outputs"]
    calls = sum(sum(message["role"] == "assistant" for message in output["completion"]) for output in outputs)
    line = {"rollouts": len(outputs), "seconds": round(seconds, 3), "calls": calls, "cpu_s": round(cpu, 3)}
    return {**line, "rollouts_per_s": round(len(outputs) / seconds, 2), "version": version("verifiers")}


def main() -> None:
    """Run and print one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--rollouts", type=int, required=True)
    parser.add_argument("--concurrency", type=int, required=True)
    args = parser.parse_args()
    logging.disable(logging.INFO)
    print(json.dumps(asyncio.run(play(json.loads(args.work.read_text()), args.rollouts, args.concurrency))))


if __name__ == "__main__":
    main()
