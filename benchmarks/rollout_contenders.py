"""The contenders of benchmarks/rollouts.py that live in rayrl's own environment: the bare loop and rayrl itself.

    python -m benchmarks.rollout_contenders NAME WORK.json --rollouts N --concurrency C

``WORK.json`` is the :class:`Work` every contender is given. Each contender prints one JSON line with at least
``rollouts``, ``seconds``, ``rollouts_per_s`` and ``calls``. rayrl's seconds are its own ``episodes`` stage: from the
first submission to the last trace on disk (fsynced), Ray's start-up apart; that is printed beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import orjson
import psutil
import yaml
from httpx_aiohttp import AiohttpTransport

from rayrl.environments.shop_tools import page_tools
from rayrl.settings import RunConfig
from rayrl.shop.generator import generate_catalogue
from rayrl.tasks import SPLITS_VERSION, task_ids_sha256
from rayrl.testing.null_environment import TOOLS
from rayrl.traces.store import RunReader

JsonDict = dict[str, Any]
SYSTEM = "You are an agent. Call the tool you are given, one call per turn, until the task is done."


@dataclass(frozen=True)
class Work:
    """The same work for all: ``steps`` sequential completions per rollout, one tool, short observations."""

    url: str
    """The mock endpoint, up to ``/v1``; of the shop section the shop server."""
    steps: int
    system: str = SYSTEM
    products: int = 0
    """Shop section: size of the generated catalogue."""
    level: str = "competent"
    """Shop section: level of the scripted shopper."""

    @classmethod
    def load(cls, path: Path) -> Work:
        """Read what :meth:`save` wrote."""
        known = {k: v for k, v in json.loads(path.read_text()).items() if k in cls.__dataclass_fields__}
        return cls(**known)

    def save(self, path: Path) -> Path:
        """Write for another process, with the texts that the peers need."""
        texts = {"user": self.user("{task}"), "observation": f"Step {{step}} of {self.steps}.", "tools": TOOLS}
        path.write_text(json.dumps({**asdict(self), **texts}))
        return path

    def user(self, task: int | str) -> str:
        """First user message; what the null environment's instruction and first observation make."""
        return f"Call search {self.steps} times (task {task}).\nStep 0 of {self.steps}."


def result(*, rollouts: int, seconds: float, calls: int, **more: Any) -> JsonDict:
    """What a contender prints."""
    rate = round(rollouts / seconds, 2) if seconds else None
    return {"rollouts": rollouts, "seconds": round(seconds, 3), "rollouts_per_s": rate, "calls": calls, **more}


@asynccontextmanager
async def http_client() -> AsyncIterator[httpx.AsyncClient]:
    """httpx's API over aiohttp's connections, as many as there are requests."""

    def session() -> aiohttp.ClientSession:
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async with httpx.AsyncClient(transport=AiohttpTransport(client=session), timeout=120) as client:
        yield client


async def in_parallel(concurrency: int, items: list[Any], play: Callable[[Any], Awaitable[None]]) -> float:
    """Play all items, ``concurrency`` at a time; returns the seconds it took."""
    todo = iter(items)

    async def loop() -> None:
        for item in todo:
            await play(item)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(loop())
    return time.perf_counter() - began


async def bare(work: Work, rollouts: int, concurrency: int) -> JsonDict:
    """The loop without a system around it: request, parse, append; nothing is checked, recorded or limited."""
    calls = 0
    cpu = time.process_time()
    async with http_client() as client:
        url = f"{work.url}/chat/completions"
        body = {"model": "mock", "tools": TOOLS, "tool_choice": "required", "temperature": 0.0, "max_tokens": 1024}

        async def play(task: int) -> None:
            nonlocal calls
            messages: list[JsonDict] = [
                {"role": "system", "content": work.system},
                {"role": "user", "content": work.user(task)},
            ]
            for step in range(1, work.steps + 1):
                reply = await client.post(url, json={**body, "messages": messages, "seed": task * work.steps + step})
                message = reply.json()["choices"][0]["message"]
                calls += 1
                messages.append(message)
                text = f"Step {step} of {work.steps}."
                messages.append({"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": text})

        seconds = await in_parallel(concurrency, list(range(rollouts)), play)
    return result(rollouts=rollouts, seconds=seconds, calls=calls, cpu_s=round(time.process_time() - cpu, 3))


def null_config(work: Work, folder: Path, *, rollouts: int, concurrency: int, mode: str, actors: int) -> JsonDict:
    """rayrl's config for the null environment behind the mock endpoint."""
    prompt = {"name": "bench", "version": "1", "system": f"{work.system}{{skills}}"}
    prompt["user"] = "{instruction}{persona}\n{observation}"
    (folder / "prompt.yaml").write_text(yaml.safe_dump(prompt))
    return {
        **_common(folder, list(range(rollouts)), concurrency=concurrency, mode=mode, actors=actors),
        "environment": {
            "kind": "rayrl.testing.null_environment:NullEnvironmentFactory",
            "options": {"steps": work.steps},
        },
        "model": {"kind": "openai", "name": "mock", "base_url": work.url, "max_concurrency": concurrency},
        "prompt": {"file": str(folder / "prompt.yaml")},
    }


def shop_config(work: Work, folder: Path, *, rollouts: int, concurrency: int, mode: str, actors: int) -> JsonDict:
    """rayrl's config for the running shop server, played by the scripted shopper inside the workers."""
    known = [task["task_id"] for product in generate_catalogue(work.products, 0) for task in product["instructions"]]
    base = _common(folder, known, concurrency=concurrency, mode=mode, actors=actors)
    base["tasks"] |= {"repeats": -(-rollouts // len(known))} if rollouts > len(known) else {"sample_size": rollouts}
    return {
        **base,
        "environment": {
            "kind": "shop",
            "base_urls": [work.url],
            "embedded": {"generate": work.products, "seed": 0},
        },
        "model": {"kind": "scripted", "name": "scripted", "scripted": {"level": work.level}},
    }


def _common(folder: Path, task_ids: list[int], *, concurrency: int, mode: str, actors: int) -> JsonDict:
    split = {"role": "train", "task_ids": task_ids, "task_ids_sha256": task_ids_sha256(task_ids)}
    (folder / "splits.json").write_text(json.dumps({"version": SPLITS_VERSION, "splits": {"bench": split}}))
    actors = 1 if mode == "inprocess" else actors
    return {
        "experiment": {"name": "bench", "run_root": str(folder)},
        "tasks": {"manifest": str(folder / "splits.json"), "split": "bench"},
        "execution": {"mode": mode, "actors": actors, "concurrency": concurrency // actors},
        "tracking": {"wandb": "disabled"},
    }


class CpuMeter:
    """CPU seconds of this process and all below it (Ray's daemons and actors), sampled while a run goes on."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, dict[str, float]]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="cpu-meter", daemon=True)

    def __enter__(self) -> CpuMeter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        me = psutil.Process()
        while not self._stop.wait(0.25):
            used: dict[str, float] = {}
            for process in [me, *me.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    times = process.cpu_times()
                    kind = "driver" if process is me else _kind(process)
                    used[kind] = used.get(kind, 0.0) + times.user + times.system
            self._samples.append((time.monotonic(), used))

    def between(self, start: float, end: float) -> dict[str, float]:
        """CPU seconds by kind of process, from the last sample before ``start`` to the last one before ``end``."""
        before = [used for at, used in self._samples if at <= start]
        until = [used for at, used in self._samples if at <= end]
        if not until:
            return {}
        first = before[-1] if before else {}
        return {kind: round(used - first.get(kind, 0.0), 3) for kind, used in until[-1].items()}


def _kind(process: psutil.Process) -> str:
    name = " ".join(process.cmdline()[:1]) or process.name()
    return "actors" if name.startswith("ray::") else "ray daemons"


def rayrl(config: JsonDict, folder: Path) -> JsonDict:
    """The real road: ``jobs.rollout.run_rollout`` with everything recorded."""
    from jobs.rollout import run_rollout
    from rayrl.experiment import prepare

    experiment = prepare(RunConfig.model_validate(config), folder)
    with CpuMeter() as meter:
        outcome = run_rollout(experiment, quiet=True, install_signals=False)
        ended = time.monotonic()
    if outcome.exit_code:
        raise RuntimeError(f"the run did not complete: {outcome.reason}")
    stages = outcome.stage_seconds
    steps = int(outcome.stats["model_steps"])
    ended -= stages["summary"]
    cpu = meter.between(ended - stages["episodes"], ended)
    return result(
        rollouts=outcome.complete,
        seconds=stages["episodes"],
        calls=steps,
        cpu_s=round(sum(cpu.values()), 3),
        cpu_by_process=cpu,
        startup_s=round(stages["ray"] + stages["environment servers"] + stages["workers"], 3),
        bytes_per_step=round(outcome.stats["bytes_written"] / max(1, steps)),
        commits=int(outcome.stats["commits"]),
        stage_seconds=stages,
    )


def recorded_actions(run_dir: Path) -> list[JsonDict]:
    """What a finished shop run sent to the environment: ``{"task_id", "actions"}`` per episode."""
    return [
        {"task_id": r["job"]["task_id"], "actions": [s["action"] for s in r["steps"] if s.get("action")]}
        for r in RunReader(run_dir).iter_records()
    ]


async def bare_shop(work: Work, episodes: list[JsonDict], concurrency: int) -> JsonDict:
    """Play recorded actions against the shop server: request, parse, build the page's tools; nothing else."""
    steps = 0
    cpu = time.process_time()
    async with http_client() as client:

        async def call(body: JsonDict) -> JsonDict:
            reply = await client.post(f"{work.url}/api/shop_agent", json=body)
            reply.raise_for_status()
            answer: JsonDict = orjson.loads(reply.content)["result"]
            return answer

        async def play(episode: JsonDict) -> None:
            nonlocal steps
            begun = await call({"action": "reset", "idx": episode["task_id"], "include_private_goal": False})
            lease = {"env_idx": begun["env_idx"], "lease_id": begun["lease_id"]}
            for action in episode["actions"]:
                state = await call({"action": "interact", "response": action, **lease})
                page_tools(state["observation_state"])
                steps += 1
            await call({"action": "release_one", **lease})

        seconds = await in_parallel(concurrency, episodes, play)
    cpu = time.process_time() - cpu
    return result(rollouts=len(episodes), seconds=seconds, calls=steps, cpu_s=round(cpu, 3))


def main() -> None:
    """Run one contender and print its line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("name", choices=["bare", "ray", "inprocess", "shop-bare", "shop-ray", "shop-inprocess"])
    parser.add_argument("work", type=Path)
    parser.add_argument("--rollouts", type=int, required=True)
    parser.add_argument("--concurrency", type=int, required=True)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--actions", type=Path, help="shop: where recorded actions are written (rayrl) or read (bare)")
    args = parser.parse_args()
    work = Work.load(args.work)
    if args.name == "bare":
        line = asyncio.run(bare(work, args.rollouts, args.concurrency))
    elif args.name == "shop-bare":
        line = asyncio.run(bare_shop(work, json.loads(args.actions.read_text()), args.concurrency))
    else:
        make = shop_config if args.name.startswith("shop-") else null_config
        mode = args.name.removeprefix("shop-")
        with tempfile.TemporaryDirectory(prefix="rayrl-bench-", dir=args.work.parent) as name:
            folder = Path(name)
            config = make(
                work, folder, rollouts=args.rollouts, concurrency=args.concurrency, mode=mode, actors=args.actors
            )
            line = rayrl(config, folder)
            if args.actions is not None:
                args.actions.write_text(json.dumps(recorded_actions(folder / "bench")))
    print(json.dumps(line))


if __name__ == "__main__":
    main()
