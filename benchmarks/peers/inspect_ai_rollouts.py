"""inspect-ai on the work of benchmarks/rollouts.py: a task whose solver makes the calls and executes the tool.

    python inspect_ai_rollouts.py WORK.json --rollouts N --concurrency C

Runs in the peers' environment and imports nothing of rayrl. The clock covers ``eval`` alone; imports and the building
of the samples are not in it. Its log is written as it comes (all samples, to a temporary folder).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from inspect_ai import Task, eval, task  # the name is theirs
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import get_model
from inspect_ai.solver import Generate, Solver, TaskState, solver, system_message, use_tools
from inspect_ai.tool import Tool, tool


@tool
def search() -> Tool:
    """The one tool."""

    async def execute(query: str) -> str:
        """Does nothing; call it until the episode is done.

        Args:
            query: anything.
        """
        return "Step done."

    return execute


@solver
def play(steps: int) -> Solver:
    """``steps`` completions, each followed by its tool call."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        for _ in range(steps):
            state = await generate(state, tool_calls="single")
        return state

    return solve


@task
def rollouts(work: dict, n: int) -> Task:
    """``n`` samples."""
    samples = [Sample(input=work["user"].replace("{task}", str(i)), target="") for i in range(n)]
    return Task(
        dataset=MemoryDataset(samples),
        solver=[system_message(work["system"]), use_tools(search()), play(work["steps"])],
    )


def main() -> None:
    """Run and print one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--rollouts", type=int, required=True)
    parser.add_argument("--concurrency", type=int, required=True)
    args = parser.parse_args()
    work = json.loads(args.work.read_text())
    model = get_model("openai-api/mock/mock", base_url=work["url"], api_key="none")
    job = rollouts(work, args.rollouts)
    with tempfile.TemporaryDirectory() as logs:
        began = time.perf_counter()
        cpu = time.process_time()
        log = eval(
            job,
            model=model,
            log_dir=logs,
            display="none",
            log_realtime=False,  # the database of its live view; without it the same run is a third faster
            max_connections=args.concurrency,
            max_samples=args.concurrency,
            temperature=0.0,
            max_tokens=1024,
        )[0]
        seconds = time.perf_counter() - began
        cpu = time.process_time() - cpu
        if log.status != "success":
            raise SystemExit(f"inspect-ai ended with {log.status}: {log.error}")
        samples = log.samples or []  # read from the log on first use
        calls = sum(sum(message.role == "assistant" for message in sample.messages) for sample in samples)
    line = {"rollouts": len(samples), "seconds": round(seconds, 3), "calls": calls, "cpu_s": round(cpu, 3)}
    print(json.dumps({**line, "rollouts_per_s": round(len(samples) / seconds, 2), "version": version("inspect-ai")}))


if __name__ == "__main__":
    main()
