"""What the fault, determinism and soak tests share: small configs, a real shop, a mock endpoint, drivers to kill."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil

from jobs.rollout import RunResult, run_rollout
from rayrl.config import parse_config
from rayrl.experiment import Experiment, prepare
from rayrl.schemas import JsonDict
from rayrl.settings import RunConfig
from rayrl.shop.catalogue import catalogue_hash
from rayrl.shop.generator import generate_catalogue
from rayrl.splits import build_splits, facts_from_products
from rayrl.testing.mock_endpoint import MockEndpoint, serve
from rayrl.traces.schema import expand, is_complete
from rayrl.traces.store import RunReader

ROOT = Path(__file__).resolve().parents[2]
PRODUCTS, CATALOGUE_SEED = 120, 3
TTL_S = 5.0
KEY_ENV, KEY = "RAYRL_TEST_API_KEY", "sk-test-7f3a9c51e2d84b06"
PATIENCE_S = 120.0
"""Upper bound of every wait here; a busy machine may need it, a healthy one never does."""


@lru_cache(maxsize=4)
def _split_manifest(products: int) -> str:
    catalogue = generate_catalogue(products, CATALOGUE_SEED)
    source = {"kind": "shop_catalogue", "sha256": catalogue_hash(catalogue)}
    manifest = build_splits(facts_from_products(catalogue), val=10, test=10, seed=1, source=source)
    return json.dumps(manifest.model_dump(mode="json"))


def raw_config(
    root: Path,
    name: str = "run",
    *,
    episodes: int = 30,
    repeats: int = 1,
    latency_ms: float = 0.0,
    products: int = PRODUCTS,
    **sections: Any,
) -> JsonDict:
    """A config on the embedded shop with the scripted shopper; ``sections`` are merged into it, key by key."""
    manifest = root / f"splits_{products}.json"
    if not manifest.exists():
        manifest.write_text(_split_manifest(products))
    raw: JsonDict = {
        "experiment": {"name": name, "seed": 5, "run_root": str(root / "runs")},
        "tasks": {"manifest": str(manifest), "split": "train", "sample_size": episodes, "repeats": repeats},
        "environment": {
            "kind": "shop",
            "embedded": {"generate": products, "seed": CATALOGUE_SEED, "slots": 64, "lease_ttl_s": TTL_S},
        },
        "model": {"kind": "scripted", "name": "shopper", "scripted": {"level": "naive", "latency_ms": latency_ms}},
        "prompt": {"file": str(ROOT / "configs/prompts/shop_v1.yaml")},
        "execution": {"actors": 2, "concurrency": 4, "prefetch": 2, "retry_backoff_s": 0.1},
        "tracking": {"wandb": "disabled"},
    }
    for section, values in sections.items():
        raw[section] = _merged(raw.get(section, {}), values)
    return raw


def null_config(root: Path, name: str, model: str, **sections: Any) -> JsonDict:
    """A config on the environment that does nothing, with a model of :mod:`tests.faults.models`."""
    environment = {"kind": "rayrl.testing.null_environment:NullEnvironmentFactory", "options": {"steps": 3}}
    raw = raw_config(root, name, **sections)
    raw["environment"] = environment
    raw["model"] = {"kind": f"tests.faults.models:{model}", **sections.get("model", {})}
    return raw


def http_model(url: str, **changes: Any) -> JsonDict:
    """A ``model`` section for the mock endpoint with short waits."""
    model = {
        "kind": "openai",
        "name": "mock",
        "base_url": url,
        "retries": {"max_attempts": 3, "backoff_initial_s": 0.01, "backoff_max_s": 0.05},
        "timeouts": {"connect_s": 5.0, "read_s": 5.0, "attempt_s": 5.0, "total_s": 20.0},
        "scripted": {},
    }
    return {**model, **changes}


def _merged(old: JsonDict, new: JsonDict) -> JsonDict:
    if "kind" in new:
        return dict(new)
    return {**old, **{k: _merged(old[k], v) if isinstance(v, dict) and k in old else v for k, v in new.items()}}


def plan(raw: JsonDict) -> Experiment:
    """The experiment of a raw config."""
    return prepare(parse_config(raw, RunConfig, source="test"), ROOT)


def roll_out(raw: JsonDict) -> RunResult:
    """Run it in this process (with Ray actors or without, as the config says)."""
    return run_rollout(plan(raw), quiet=True, install_signals=False)


def at_full_speed(raw: JsonDict) -> JsonDict:
    """The same experiment without Ray and without artificial latency."""
    fast = _merged(raw, {"execution": {"mode": "inprocess", "concurrency": 16}})
    fast["model"] = {**fast["model"], "scripted": {**fast["model"].get("scripted", {}), "latency_ms": 0}}
    return fast


def undisturbed(raw: JsonDict, root: Path) -> dict[str, tuple[float, tuple[str, ...]]]:
    """The outcomes of the same experiment without faults, without Ray, in a directory of its own."""
    calm = _merged(raw, {"experiment": {"run_root": str(root / "calm")}})
    result = roll_out(at_full_speed(calm))
    assert result.status == "complete", result.reason
    return outcomes(result.run_dir)


def outcomes(run_dir: Path) -> dict[str, tuple[float, tuple[str, ...]]]:
    """``{episode: (reward, actions)}`` of the complete results."""
    found = {}
    for record in RunReader(run_dir).results():
        if is_complete(record):
            actions = tuple(str(step.get("action")) for step in record["steps"])
            found[record["episode_id"]] = (record["final"]["reward"], actions)
    return found


def without_times(record: JsonDict) -> JsonDict:
    """A record in the clear without what may differ between two executions: clock times and latencies."""
    out = {k: v for k, v in expand(record).items() if k not in ("started_at", "ended_at", "duration_s")}
    out["steps"] = [
        {**step, "model": {k: v for k, v in step["model"].items() if k != "latency_ms"}} for step in out["steps"]
    ]
    return out


def check_books(result: RunResult) -> None:
    """Every admitted attempt has one terminal record in the ledger and on disk, no episode counts twice."""
    ledger = result.ledger
    assert ledger["admitted"] == ledger["completed"] + ledger["failed"] + ledger["cancelled"], ledger
    scan = RunReader(result.run_dir).scan()
    assert scan.duplicates == 0 and scan.complete == result.complete
    keys = [(r["episode_id"], r["attempt"]) for r in RunReader(result.run_dir).iter_records()]
    assert len(keys) == len(set(keys)), "an attempt was recorded twice"


def events(run_dir: Path, name: str | None = None) -> list[JsonDict]:
    """Events of a run, all or those called ``name``."""
    path = run_dir / "events.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [event for event in lines if name is None or event["event"] == name]


def trace_lines(run_dir: Path) -> int:
    """Records on disk so far."""
    path = run_dir / "traces.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_until(condition: Callable[[], Any], what: str | Callable[[], str], timeout_s: float = PATIENCE_S) -> Any:
    """Poll until ``condition()`` is true; returns its value."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"timed out after {timeout_s:g} s: {what if isinstance(what, str) else what()}")


@contextmanager
def saboteur(when: Callable[[], Any], act: Callable[[], None]) -> Iterator[list[BaseException]]:
    """Do ``act`` from a thread as soon as ``when()`` is true, while the block runs; a failure of it fails the test."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while not stop.is_set():
                if when():
                    act()
                    return
                time.sleep(0.01)
            raise AssertionError("the run ended before its sabotage")
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield failures
    finally:
        stop.set()
        thread.join(PATIENCE_S)
    if failures:
        raise failures[0]


def actor_pids(root_pid: int | None = None) -> list[int]:
    """Rollout actors among the descendants of a driver (this process by default)."""
    return _descendants(root_pid, lambda line: line.startswith("ray::RolloutActor"))


def shop_pids(root_pid: int | None = None) -> list[int]:
    """Embedded shop servers among the descendants of a driver."""
    return _descendants(root_pid, lambda line: "-m rayrl.shop" in line)


def _descendants(root_pid: int | None, wanted: Callable[[str], bool]) -> list[int]:
    found = []
    for process in psutil.Process(root_pid or os.getpid()).children(recursive=True):
        try:
            if wanted(" ".join(process.cmdline())):
                found.append(process.pid)
        except psutil.Error:
            continue
    return sorted(found)


def health(base_url: str) -> JsonDict:
    """``/healthz`` of a shop server."""
    with urllib.request.urlopen(f"{base_url}/healthz", timeout=10) as answer:
        found: JsonDict = json.load(answer)
        return found


def wait_all_slots_free(base_url: str, timeout_s: float = TTL_S + 20) -> None:
    """No lease is left at the server, after its TTL at the latest (the rest of the wait is for a busy machine)."""
    wait_until(
        lambda: (h := health(base_url))["free_slots"] == h["environment_slots"], "slots are still taken", timeout_s
    )


class ProcessTree:
    """A command in a session of its own, marked so that everything it starts can be found again."""

    def __init__(self, command: list[str], log: Path, env: dict[str, str] | None = None) -> None:
        self.mark = uuid.uuid4().hex
        self.log = log
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_") or k.startswith("RAY_AUTH")}
        inherited |= {"RAYRL_TEST_MARK": self.mark, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**inherited, **(env or {})},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        """What it printed so far."""
        return self.log.read_text(errors="replace")

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Exit status."""
        return self.process.wait(timeout_s)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the driver process alone."""
        self.process.send_signal(number)

    def relatives(self) -> dict[int, str]:
        """Living processes of this run: Ray's, the actors, the shop servers, the driver itself.

        Known by the driver's session (Ray's processes stay in it) or by the mark in their environment (shop servers
        have sessions of their own; but a process that sets its title may have overwritten its environment).
        """
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                state, _, _, session, *_ = (entry / "stat").read_text().rpartition(") ")[2].split()
                ours = int(session) == self.process.pid or self.mark.encode() in (entry / "environ").read_bytes()
                if ours and state != "Z":
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
            except (OSError, ProcessLookupError):
                continue
        return found

    def clean_up(self) -> None:
        """End what is left of this run, whatever the test did."""
        for pid in self.relatives():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(30)


class Driver(ProcessTree):
    """``python -m jobs.rollout`` in a process of its own."""

    def __init__(self, root: Path, raw: JsonDict, *overrides: str, env: dict[str, str] | None = None) -> None:
        self.run_dir = Path(raw["experiment"]["run_root"]) / raw["experiment"]["name"]
        name = uuid.uuid4().hex[:8]
        config = root / f"config-{name}.yaml"
        config.write_text(json.dumps(raw))
        command = [sys.executable, "-m", "jobs.rollout", str(config), *overrides]
        super().__init__(command, root / f"driver-{name}.log", env)

    def wait_for_traces(self, n: int) -> None:
        """Until ``n`` records are on disk."""

        def reached() -> bool:
            assert self.process.poll() is None, f"the driver ended early:\n{self.output[-3000:]}"
            return trace_lines(self.run_dir) >= n

        wait_until(reached, f"{n} traces of {self.run_dir}")


@contextmanager
def driver(root: Path, raw: JsonDict, *overrides: str, env: dict[str, str] | None = None) -> Iterator[Driver]:
    """A :class:`Driver` that is gone after the block."""
    running = Driver(root, raw, *overrides, env=env)
    try:
        yield running
    finally:
        running.clean_up()


class ThreadedMock:
    """The mock endpoint on an event loop in a thread, so that blocking test code and Ray actors can talk to it."""

    def __init__(self, **settings: Any) -> None:
        self.mock = MockEndpoint(**settings)
        self._stop: asyncio.Event | None = None
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()), daemon=True)

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        async with serve(self.mock):
            self._ready.set()
            await self._stop.wait()

    def __enter__(self) -> MockEndpoint:
        self._thread.start()
        assert self._ready.wait(30)
        return self.mock

    def __exit__(self, *_: object) -> None:
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
