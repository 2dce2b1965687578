"""``rayrl calls SET``: how often a model picks the right tool and fills each argument right, on a set of known calls.

The set is JSON lines of cases (``rayrl export --to calls`` makes one from traces). The model is the ``model`` section
of a YAML file. A call that could not be made counts as failed and is left out of the accuracy; a reply without a usable
call counts as wrong.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

import orjson

from jobs.output import console, print_json
from rayrl.config import Section, load_config
from rayrl.errors import EpisodeError
from rayrl.evaluation.known_calls import Call, CallCase
from rayrl.evaluation.tables import calls_table
from rayrl.evaluation.tool_calls import call_accuracy
from rayrl.export.calls import read_cases
from rayrl.judge.bounded import bounded
from rayrl.models.base import ChatModel
from rayrl.models.config import ModelConfig
from rayrl.models.registry import build_model
from rayrl.schemas import JsonDict, sha256_hex, step_seed

Case = tuple[str, list[JsonDict], list[JsonDict], Call]


class CallsConfig(Section):
    """Which model is tested."""

    model: ModelConfig
    """The model."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("set", type=Path, help="JSON lines of cases")
    parser.add_argument("--config", required=True, help="YAML with a model section")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write every case with the call made (JSON lines)")
    parser.add_argument("--concurrency", type=int, default=8, help="calls at a time (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the set; each case derives its own")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides of the config")


async def run_set(
    model: ChatModel, cases: list[Case], *, concurrency: int = 8, seed: int = 0
) -> tuple[list[CallCase], list[JsonDict]]:
    """Ask the model every case. Returns the answered cases in set order, and a line per case for a file."""
    answered: dict[str, CallCase] = {}
    lines: dict[str, JsonDict] = {}

    async def ask(case: Case) -> None:
        name, messages, tools, expected = case
        line: JsonDict = {"case_id": name, "expected": [expected.name, expected.arguments]}
        try:
            output = await model.generate(messages, tools, seed=step_seed(seed, int(sha256_hex(name)[:8], 16)))
        except EpisodeError as error:
            lines[name] = {**line, "error": {"code": error.code, "message": str(error)}}
            return
        usable = len(output.tool_calls) == 1 and output.protocol_error is None
        actual = Call(output.tool_calls[0].name, output.tool_calls[0].arguments) if usable else None
        problem = output.protocol_error.code if output.protocol_error else None
        answered[name] = CallCase(name, expected, actual)
        lines[name] = {**line, "actual": [actual.name, actual.arguments] if actual else None, "problem": problem}

    async for _ in bounded(cases, ask, concurrency=concurrency):
        pass
    order = [case[0] for case in cases]
    return [answered[n] for n in order if n in answered], [lines[n] for n in order]


def run(args: argparse.Namespace) -> int:
    """Entry point of the command."""
    config = load_config(args.config, CallsConfig, args.overrides)
    cases = read_cases(args.set)

    async def work() -> tuple[list[CallCase], list[JsonDict]]:
        model = build_model(config.model)
        try:
            return await run_set(model, cases, concurrency=args.concurrency, seed=args.seed)
        finally:
            await model.aclose()

    answered, lines = asyncio.run(work())
    failed = len(cases) - len(answered)
    result: dict[str, Any] = {"cases": len(cases), "failed": failed, "accuracy": call_accuracy(answered)}
    if args.out is not None:
        args.out.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    if args.json:
        print_json(result)
    else:
        console().print(calls_table(result["accuracy"], 0.95))
        console().print(f"{len(cases)} cases, {failed} could not be asked")
    return 6 if failed else 0


if __name__ == "__main__":
    from jobs.command import command_main

    raise SystemExit(command_main("calls", add_arguments, run, None))
