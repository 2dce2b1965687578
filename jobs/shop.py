"""``rayrl shop serve``: the embedded shop environment as a server of its own."""

from __future__ import annotations

import argparse
from pathlib import Path

from rayrl.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``rayrl shop``."""
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="serve until Ctrl-C")
    source = serve.add_mutually_exclusive_group(required=True)
    source.add_argument("--products", type=Path, help="catalogue in the public product format")
    source.add_argument("--generate", type=int, metavar="N", help="generate a catalogue of N products")
    serve.add_argument("--seed", type=int, default=0, help="seed of the generated catalogue (default 0)")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=5700, help="0 takes any free port and reports it (default 5700)")
    serve.add_argument("--slots", type=int, default=64, help="episodes that may run at once (default 64)")
    serve.add_argument("--page-size", type=int, default=20, help="products on a page of results (default 20)")
    serve.add_argument("--lease-ttl", type=float, default=60.0, metavar="SECONDS")
    serve.add_argument("--queue-timeout", type=float, default=30.0, metavar="SECONDS")
    serve.add_argument("--admin-token-env", metavar="NAME", help="environment variable that holds the admin token")


def _option(location: tuple[int | str, ...]) -> str:
    """The command's option behind a config key."""
    name = str(location[0]) if location else "generate"
    return name.removesuffix("_s").replace("_", "-")


def run(args: argparse.Namespace) -> int:
    """``rayrl shop serve``."""
    from pydantic import ValidationError

    from rayrl.shop.config import ShopServerConfig
    from rayrl.shop.serve import serve

    try:
        config = ShopServerConfig(
            products=args.products,
            generate=args.generate,
            seed=args.seed,
            host=args.host,
            port=args.port,
            slots=args.slots,
            page_size=args.page_size,
            lease_ttl_s=args.lease_ttl,
            queue_timeout_s=args.queue_timeout,
            admin_token_env=args.admin_token_env,
        )
    except ValidationError as error:
        problems = [f"--{_option(e['loc'])}: {e['msg']}" for e in error.errors(include_url=False)]
        raise ConfigError("; ".join(problems)) from None
    serve(config)
    return 0
