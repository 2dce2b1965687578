"""``python -m rayrl.shop --generate 300 --port 0``: one shop server from the command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rayrl.errors import UserError
from rayrl.shop.config import ShopServerConfig
from rayrl.shop.serve import ADMIN_TOKEN_ENV, serve


def parser() -> argparse.ArgumentParser:
    """The command line; every option is a field of :class:`ShopServerConfig`."""
    out = argparse.ArgumentParser(prog="python -m rayrl.shop", description="Serve the shop environment over HTTP.")
    source = out.add_mutually_exclusive_group(required=True)
    source.add_argument("--products", type=Path, help="JSON file in the public product format")
    source.add_argument("--generate", type=int, metavar="N", help="generate N products instead")
    fields = ShopServerConfig.model_fields
    for name, kind in {
        "seed": int,
        "slots": int,
        "host": str,
        "port": int,
        "page_size": int,
        "max_query_length": int,
        "lease_ttl_s": float,
        "queue_timeout_s": float,
        "max_queue": int,
    }.items():
        out.add_argument(
            f"--{name.replace('_', '-')}", type=kind, default=argparse.SUPPRESS, help=fields[name].description
        )
    out.add_argument(
        "--admin-token-env",
        default=ADMIN_TOKEN_ENV,
        help=f"environment variable that holds the admin token (default {ADMIN_TOKEN_ENV}; unset means no token)",
    )
    out.add_argument("--watch-parent", action="store_true", help="stop when standard input closes")
    return out


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    given: dict[str, Any] = {k: v for k, v in vars(parser().parse_args(argv)).items() if v is not None}
    watch_parent = given.pop("watch_parent")
    try:
        serve(ShopServerConfig(**given), watch_parent=watch_parent)
    except ValidationError as error:
        for item in error.errors(include_url=False, include_input=False):
            print(f"error: {'.'.join(map(str, item['loc'])) or 'options'}: {item['msg']}", file=sys.stderr)
        return 2
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
