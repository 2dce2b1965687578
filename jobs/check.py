"""``rayrl check env|model|skills NAME``: does your own part keep the contract?"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import yaml

from jobs.output import console, print_json
from rayrl.errors import ConfigError
from rayrl.testing.conformance import Finding, check_environment, check_model, check_skills
from rayrl.testing.null_environment import TOOLS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``rayrl check``."""
    parser.add_argument("kind", choices=["env", "model", "skills"])
    parser.add_argument("name", help="short name (shop, scripted, none, ...) or dotted path pkg.module:Name")
    parser.add_argument("options", nargs="*", help="key=value, as in the config section")
    parser.add_argument("--task", type=int, default=0, help="task id an environment is reset with (default 0)")


def run(args: argparse.Namespace) -> int:
    """``rayrl check``; exit code 5 when a clause does not hold."""
    options = _options(args.options)
    findings = asyncio.run(_check(args.kind, args.name, options, args.task))
    bad = [finding for finding in findings if not finding.ok]
    if args.json:
        print_json({"name": args.name, "ok": not bad, "findings": [finding.__dict__ for finding in findings]})
    else:
        out = console()
        for finding in findings:
            mark = "ok  " if finding.ok else "FAIL"
            out.print(f"{mark} {finding.clause}{': ' + finding.detail if finding.detail else ''}", markup=False)
        out.print(f"\n{args.name}: {len(findings) - len(bad)} of {len(findings)} clauses hold")
    return 5 if bad else 0


async def _check(kind: str, name: str, options: dict[str, Any], task: int) -> list[Finding]:
    if kind == "env":
        return await _environment(name, options, task)
    if kind == "model":
        from rayrl.config import parse_config
        from rayrl.models.config import ModelConfig
        from rayrl.models.registry import build_model

        raw = {"kind": name, "options": options} if ":" in name else {"kind": name, **options}
        return await check_model(build_model(parse_config(raw, ModelConfig, source="rayrl check")), tools=TOOLS)
    from rayrl.config import parse_config
    from rayrl.skills.providers import SkillsConfig, build_skills

    raw = {"kind": name, "options": options} if ":" in name else {"kind": name, **options}
    return await check_skills(build_skills(parse_config(raw, SkillsConfig, source="rayrl check")))


async def _environment(name: str, options: dict[str, Any], task: int) -> list[Finding]:
    from jobs.shop_servers import embedded_shops
    from rayrl.config import parse_config
    from rayrl.environments.config import AnyEnvironment, CustomEnvironmentConfig, build_environments
    from rayrl.environments.shop_config import ShopEnvironmentConfig

    config: AnyEnvironment
    if ":" in name:
        config = parse_config({"kind": name, "options": options}, CustomEnvironmentConfig, source="rayrl check")
    else:
        raw = {"kind": name, "embedded": {"generate": 60}, **options}
        config = parse_config(raw, ShopEnvironmentConfig, source="rayrl check")
    with embedded_shops(config, host="127.0.0.1", on_event=lambda _: None) as shops:
        return await check_environment(
            build_environments(shops.environment, admin_token=shops.admin_token), task_id=task
        )


def _options(items: list[str]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for item in items:
        key, separator, value = item.partition("=")
        if not separator or not key:
            raise ConfigError(f"option {item!r} is not of the form key=value")
        out[key] = yaml.safe_load(value)
    return out
