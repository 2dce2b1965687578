"""Rollouts per second: a bare loop, rayrl (Ray actors and in-process), inspect-ai and verifiers on the same work.

    python -m benchmarks.rollouts [--peers-python PYTHON] [--out FILE.json]

A loopback mock endpoint answers every completion after 50 ms with one tool call; a rollout is 5 sequential completions.
Contenders take turns, round after round, each in a process of its own, because machines drift: ratios are taken inside
a round, and their medians are what counts. The mock counts the requests: a row whose contender did not make exactly
``steps`` calls a rollout is invalid. A second table does the same with the shop over HTTP. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.rollout_contenders import Work
from rayrl.shop.config import ShopServerConfig
from rayrl.shop.process import shop_processes

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / "benchmarks" / "peers"
OWN = ["bare", "ray", "inprocess"]
PEER_SCRIPTS = {"inspect-ai": "inspect_ai_rollouts.py", "verifiers": "verifiers_rollouts.py"}
SHOP = ["shop-ray", "shop-inprocess", "shop-bare"]
"""In this order: the bare loop replays the actions that the Ray run of its round recorded."""

JsonDict = dict[str, Any]


@dataclass
class Mock:
    """The mock endpoint as a process of its own, so that no contender shares its interpreter."""

    url: str
    process: subprocess.Popen[str]

    def ask(self, path: str, *, post: bool = False) -> JsonDict:
        """Its counters; ``/reset`` clears them."""
        request = urllib.request.Request(
            self.url.removesuffix("/v1") + path, data=b"{}" if post else None, method="POST" if post else "GET"
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            answer: JsonDict = json.load(reply)
        return answer

    def cpu_s(self) -> float:
        """CPU time it has used."""
        import psutil

        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)


@contextmanager
def mock_endpoint(latency_ms: float) -> Iterator[Mock]:
    """Start it, stop it."""
    command = [sys.executable, "-m", "rayrl.testing.mock_endpoint", "--latency-ms", str(latency_ms)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        url = process.stdout.readline().strip() if process.stdout else ""
        if not url:
            raise SystemExit("the mock endpoint did not start")
        yield Mock(url, process)
    finally:
        process.terminate()
        process.wait()


@dataclass
class Bench:
    """One run of the benchmark."""

    args: argparse.Namespace
    folder: Path
    rows: list[JsonDict] = field(default_factory=list)

    def run(
        self, name: str, work: Path, *, rollouts: int, concurrency: int, extra: list[str] | None = None
    ) -> JsonDict:
        """One contender in its own process; a failure becomes a row that says so."""
        if name in PEER_SCRIPTS:
            command = [self.args.peers_python, str(PEERS / PEER_SCRIPTS[name])]
        else:
            command = [sys.executable, "-m", "benchmarks.rollout_contenders", name]
            extra = ["--actors", str(self.args.actors), *(extra or [])]
        command += [str(work), "--rollouts", str(rollouts), "--concurrency", str(concurrency), *(extra or [])]
        # one event loop implementation for all: Ray would take uvloop where it happens to be installed
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USE_UVLOOP": "0", "NO_PROXY": "127.0.0.1"}
        cwd = ROOT if name not in PEER_SCRIPTS else self.folder
        row: JsonDict = {"contender": name, "concurrency": concurrency, "load_before": round(os.getloadavg()[0], 2)}
        try:
            done = subprocess.run(
                command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=self.args.timeout_s
            )
        except subprocess.TimeoutExpired:
            return {**row, "valid": False, "why": f"not done after {self.args.timeout_s} s"}
        if done.returncode:
            return {**row, "valid": False, "why": " | ".join(done.stderr.strip().splitlines()[-3:])}
        return {**row, "valid": True, **json.loads(done.stdout.strip().splitlines()[-1])}

    def all_rounds(self) -> None:
        """Both sections, each against one server that all contenders meet."""
        args = self.args
        if args.concurrency:
            with mock_endpoint(args.latency_ms) as mock:
                work = Work(mock.url, args.steps).save(self.folder / "work.json")
                for number in range(args.rounds):
                    self.null_round(number, mock, work)
        if args.shop_concurrency:
            shop = ShopServerConfig(generate=args.products, slots=max(args.shop_concurrency) + 8)
            with shop_processes(shop) as (servers, _):
                for number in range(args.rounds):
                    self.shop_round(number, servers[0].base_url)

    def null_round(self, number: int, mock: Mock, work: Path) -> None:
        """All contenders once, at every concurrency; the order turns from round to round."""
        names = [*OWN, *([] if self.args.peers_python is None else PEER_SCRIPTS)]
        names = [name for name in names if name in self.args.contenders]
        names = names[number % len(names) :] + names[: number % len(names)]
        for concurrency in self.args.concurrency:
            for name in names:
                peer = name in PEER_SCRIPTS
                rollouts = peer_rollouts(concurrency) if peer else fast_rollouts(concurrency, self.args)
                mock.ask("/reset", post=True)
                cpu = mock.cpu_s()
                row = self.run(name, work, rollouts=rollouts, concurrency=concurrency)
                stats = mock.ask("/stats")
                row |= {"section": "null", "round": number, "mock_requests": stats["requests"]}
                row |= {"mock_span_s": stats["span_s"], "mock_cpu_s": round(mock.cpu_s() - cpu, 2)}
                if row["valid"]:
                    check_calls(row, stats, self.args.steps)
                if row["valid"] and peer:
                    # in the peers' favour: from their first request to their last answer, start and end left out
                    row["own_clock_per_s"] = row["rollouts_per_s"]
                    row["rollouts_per_s"] = max(
                        row["rollouts_per_s"], round(row["rollouts"] / max(1e-9, stats["span_s"]), 2)
                    )
                self.note(row)

    def shop_round(self, number: int, url: str) -> None:
        """rayrl and the bare client on the same shop server."""
        work = Work(url, self.args.steps, products=self.args.products).save(self.folder / "shop.json")
        if number == 0:
            # unmeasured: the same queries come again in every run, so the server's query cache is to be warm for all
            self.run("shop-inprocess", work, rollouts=self.args.shop_rollouts, concurrency=32)
        for concurrency in self.args.shop_concurrency:
            actions = self.folder / f"actions-{concurrency}.json"
            for name in SHOP:
                extra = [] if name == "shop-inprocess" else ["--actions", str(actions)]
                rollouts = self.args.shop_rollouts
                row = self.run(name, work, rollouts=rollouts, concurrency=concurrency, extra=extra)
                row |= {"section": "shop", "round": number}
                if row["valid"] and name == "shop-bare":
                    expected = sum(len(episode["actions"]) for episode in json.loads(actions.read_text()))
                    row |= {"valid": row["calls"] == expected, "expected_steps": expected}
                if row["valid"]:
                    row["steps_per_s"] = round(row["calls"] / row["seconds"], 1)
                self.note(row)

    def note(self, row: JsonDict) -> None:
        """Keep a row and say it."""
        self.rows.append(row)
        said = f"{row['rollouts_per_s']:8.1f} rollouts/s" if row["valid"] else f"INVALID: {row.get('why')}"
        print(
            f"round {row['round']}  C={row['concurrency']:<4} {row['contender']:<15} {said}"
            f"   load {row['load_before']:.1f}",
            file=sys.stderr,
            flush=True,
        )


def check_calls(row: JsonDict, stats: JsonDict, steps: int) -> None:
    """Same work: exactly ``steps`` calls a rollout, seen by the contender and by the mock."""
    expected = steps * row["rollouts"]
    if stats["requests"] != expected or row["calls"] != expected or stats["behaviours"] != {"ok": expected}:
        row["valid"] = False
        row["why"] = f"{stats['requests']} requests at the mock, {row['calls']} counted, {expected} expected"


def fast_rollouts(concurrency: int, args: argparse.Namespace) -> int:
    """Enough for six seconds of a contender at the ideal rate, bounded where no contender reaches it."""
    ideal = concurrency / (args.steps * args.latency_ms / 1000)
    return max(concurrency, int(min(6 * ideal, 3072) * args.scale))


def peer_rollouts(concurrency: int) -> int:
    """A bounded number: the peers' rate hardly depends on it."""
    return max(120, concurrency)


def medians(rows: list[JsonDict], *, base: str, mine: str) -> list[JsonDict]:
    """Per concurrency and contender: median rate, and medians of the ratios taken inside each round."""
    out = []
    for concurrency in sorted({row["concurrency"] for row in rows}):
        good = [row for row in rows if row["concurrency"] == concurrency and row["valid"]]
        rate = {(row["contender"], row["round"]): row["rollouts_per_s"] for row in good}
        for name in dict.fromkeys(row["contender"] for row in rows):
            of = [row for row in good if row["contender"] == name]
            if not of:
                out.append({"concurrency": concurrency, "contender": name, "valid": False})
                continue
            rounds = [row["round"] for row in of]
            to_base = [rate[name, r] / rate[base, r] for r in rounds if (base, r) in rate]
            mine_to = [rate[mine, r] / rate[name, r] for r in rounds if (mine, r) in rate]
            rates = [row["rollouts_per_s"] for row in of]
            summary = {"concurrency": concurrency, "contender": name, "valid": True, "rounds": len(of)}
            summary |= {"rollouts_per_s": statistics.median(rates), "lowest": min(rates), "highest": max(rates)}
            summary |= {"to_bare": round(statistics.median(to_base), 3) if to_base else None}
            summary |= {"rayrl_to_it": round(statistics.median(mine_to), 2) if mine_to else None}
            cpu = [1000 * row["cpu_s"] / row["rollouts"] for row in of]
            summary["cpu_ms_per_rollout"] = round(statistics.median(cpu), 2)
            for key in ("steps_per_s", "startup_s", "bytes_per_step"):
                values = [row[key] for row in of if key in row]
                summary |= {key: round(statistics.median(values), 1)} if values else {}
            out.append(summary)
    return out


def table(summaries: list[JsonDict], *, per_rollout_s: float | None) -> str:
    """Markdown."""
    shop = per_rollout_s is None
    lines = [
        "| C | contender | rollouts/s | lowest–highest | of the ideal | of the bare loop | rayrl on Ray is | CPU ms | "
        + ("steps/s |" if shop else "start-up |"),
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for s in summaries:
        if not s["valid"]:
            lines.append(f"| {s['concurrency']} | {s['contender']} | invalid | | | | | | |")
            continue
        rate = s["rollouts_per_s"]
        cells = [
            str(s["concurrency"]),
            s["contender"],
            f"{rate:.1f}",
            f"{s['lowest']:.1f}–{s['highest']:.1f}",
            f"{rate * per_rollout_s / s['concurrency']:.0%}" if per_rollout_s else "",
            _filled(s["to_bare"], "{:.0%}"),
            _filled(s["rayrl_to_it"], "{:.2f}×"),
            f"{s['cpu_ms_per_rollout']:.1f}",
            _filled(s.get("steps_per_s"), "{:.0f}") if shop else _filled(s.get("startup_s"), "{:.1f} s"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _filled(value: float | None, form: str) -> str:
    return form.format(value) if value else ""


def machine() -> JsonDict:
    """Where this was measured."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    versions = {name: metadata.version(name) for name in ("ray", "httpx", "httpx-aiohttp", "aiohttp", "pydantic")}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": cpu, "cores": cores, "python": platform.python_version(), "versions": versions}


def peers_environment(given: str | None) -> str:
    """A python that has the peers: the given one, or an environment made under ``.run/peers`` on first use."""
    if given is not None:
        return given
    folder = ROOT / ".run" / "peers"
    python = folder / "bin" / "python"
    wanted = (PEERS / "requirements.txt").read_text()
    stamp = folder / "installed.txt"
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"installing the peers into {folder} (once; a few minutes)", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, "-r", str(PEERS / "requirements.txt")], check=True)
        stamp.write_text(wanted)
    return str(python)


def main() -> None:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--concurrency", type=int, nargs="*", default=[32, 128, 256], help="total concurrent rollouts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contenders", nargs="+", default=[*OWN, *PEER_SCRIPTS], choices=[*OWN, *PEER_SCRIPTS])
    parser.add_argument("--peers-python", help="python of an environment with benchmarks/peers/requirements.txt")
    parser.add_argument("--actors", type=int, default=2, help="rollout actors of rayrl on Ray")
    parser.add_argument("--steps", type=int, default=5, help="completions per rollout")
    parser.add_argument("--latency-ms", type=float, default=50.0)
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the fast contenders' rollouts")
    parser.add_argument("--shop-concurrency", type=int, nargs="*", default=[32, 128], help="none: skip the shop")
    parser.add_argument("--shop-rollouts", type=int, default=1200)
    parser.add_argument("--products", type=int, default=2000)
    parser.add_argument("--timeout-s", type=float, default=600.0, help="of one contender")
    parser.add_argument("--out", type=Path, help="write everything measured as JSON")
    args = parser.parse_args()
    if args.concurrency and set(args.contenders) & set(PEER_SCRIPTS):
        args.peers_python = peers_environment(args.peers_python)
    load = [round(x, 2) for x in os.getloadavg()]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rayrl-bench-") as folder:
        bench = Bench(args, Path(folder))
        signal.signal(
            signal.SIGTERM, signal.default_int_handler
        )  # so that a time-out around this leaves nothing behind
        try:
            bench.all_rounds()
        except KeyboardInterrupt:
            print("interrupted; what was measured so far:", file=sys.stderr)
    null = medians([row for row in bench.rows if row["section"] == "null"], base="bare", mine="ray")
    in_shop = medians([row for row in bench.rows if row["section"] == "shop"], base="shop-bare", mine="shop-ray")
    report = {
        "benchmark": "rollouts",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "load_average_before": load,
        "load_average_after": [round(x, 2) for x in os.getloadavg()],
        "seconds": round(time.monotonic() - began, 1),
        "settings": {k: v for k, v in vars(args).items() if k not in ("peers_python", "out")},
        "null": null,
        "shop": in_shop,
        "rows": bench.rows,
    }
    print(f"{report['date']}, {report['machine']}, load {load} before, {report['load_average_after']} after\n")
    if null:
        print(table(null, per_rollout_s=args.steps * args.latency_ms / 1000), end="\n\n")
    if in_shop:
        print(table(in_shop, per_rollout_s=None), end="\n\n")
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1))
        print(f"written to {args.out}")


if __name__ == "__main__":
    main()
