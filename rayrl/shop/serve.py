"""Run one shop server in this process until it is told to stop.

Invariant: a server started for a parent does not outlive it. ``watch_parent`` ends the server when its standard input
closes, which the kernel does however the parent dies; the parent's process id is looked at as well, for a pipe that
some other child inherited.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import os
import signal
import sys
from collections.abc import Callable

import orjson

from rayrl.errors import UserError
from rayrl.shop.config import ShopServerConfig
from rayrl.shop.server import ShopServer

ADMIN_TOKEN_ENV = "RAYRL_SHOP_ADMIN_TOKEN"  # noqa: S105 - the name of a variable, not a token


def serve(
    config: ShopServerConfig, *, watch_parent: bool = False, announce: Callable[[str], None] | None = None
) -> None:
    """Serve until SIGINT or SIGTERM (or the parent's death).

    Args:
        config: the server.
        watch_parent: stop when standard input closes or the parent process changes.
        announce: gets one JSON line ``{"event": "ready", "base_url", "port", "pid", ...}`` once the server
            listens; default: print it.

    Raises:
        DataError: the products are wrong.
        UserError: the address is taken.
    """
    server = ShopServer(config)
    # the catalogue lives as long as the process: keep the collector from walking it again and again
    gc.collect()
    gc.freeze()
    with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_main(server, watch_parent, announce or _print_line))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed (it is optional), else the default loop."""
    try:
        factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    except ImportError:
        return None
    return factory


async def _main(server: ShopServer, watch_parent: bool, announce: Callable[[str], None]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        await server.start()
    except OSError as error:
        address = f"{server.config.host}:{server.config.port}"
        raise UserError(
            f"cannot listen on {address}: {error.strerror or error}; choose another --port (0 = any)"
        ) from None
    watcher = asyncio.create_task(_watch_parent(stop)) if watch_parent else None
    try:
        health = server.health()
        line = {"event": "ready", "host": server.config.host, "port": server.port, "base_url": server.base_url}
        line |= {key: health[key] for key in ("pid", "tasks", "products", "environment_slots", "catalogue_sha256")}
        announce(orjson.dumps(line).decode())
        await stop.wait()
    finally:
        if watcher is not None:
            watcher.cancel()
        await server.stop()


async def _watch_parent(stop: asyncio.Event) -> None:
    parent = os.getppid()
    loop = asyncio.get_running_loop()
    fd = sys.stdin.fileno()

    def readable() -> None:
        if not os.read(fd, 4096):
            loop.remove_reader(fd)
            stop.set()

    loop.add_reader(fd, readable)
    while os.getppid() == parent:  # noqa: ASYNC110 - nothing announces a change of parent
        await asyncio.sleep(1.0)
    stop.set()


def _print_line(line: str) -> None:
    print(line, flush=True)
