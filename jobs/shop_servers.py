"""Embedded shop servers of a run: started with it, restarted when they die, gone when it ends (however it ends)."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pydantic import SecretStr

from rayrl.environments.config import AnyEnvironment
from rayrl.environments.shop_config import ShopEnvironmentConfig
from rayrl.errors import EnvironmentFaultError
from rayrl.schemas import JsonDict
from rayrl.shop.config import ShopServerConfig
from rayrl.shop.process import ShopProcess

PROBE_S = 0.2


@dataclass(frozen=True)
class Shops:
    """The environment config that points at the running servers, and what opens their private side."""

    environment: AnyEnvironment
    admin_token: SecretStr | None = None
    servers: list[_Kept] = field(default_factory=list)

    @property
    def pids(self) -> list[int]:
        """Process ids of the servers now."""
        return [kept.process.pid for kept in self.servers]


class _Kept:
    """One server that comes back on its port when it dies."""

    def __init__(self, config: ShopServerConfig, token: str) -> None:
        self._token = token
        self.process = ShopProcess(config, admin_token=token)
        # clients know the address, so a restarted server must answer at the same one
        self._config = config.model_copy(update={"port": int(self.process.ready["port"])})

    def restart(self) -> None:
        self.process.stop()
        deadline = time.monotonic() + 30
        while True:
            try:
                self.process = ShopProcess(self._config, admin_token=self._token)
                return
            except EnvironmentFaultError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)  # the port may still be in the hands of the dead process


@contextmanager
def embedded_shops(environment: AnyEnvironment, *, host: str, on_event: Callable[[JsonDict], None]) -> Iterator[Shops]:
    """Start ``environment.embedded.servers`` servers unless the config names addresses or another environment."""
    if not isinstance(environment, ShopEnvironmentConfig) or environment.base_urls or environment.embedded is None:
        yield Shops(environment)
        return
    token = secrets.token_hex(16)
    kept: list[_Kept] = []
    stop = threading.Event()
    keeper = threading.Thread(target=_keep_alive, args=(kept, stop, on_event), name="shop-keeper", daemon=True)
    try:
        for _ in range(environment.embedded.servers):
            kept.append(_Kept(environment.server_config().model_copy(update={"host": host}), token))
        keeper.start()
        running = environment.model_copy(update={"base_urls": [item.process.base_url for item in kept]})
        yield Shops(running, SecretStr(token), kept)
    finally:
        stop.set()
        if keeper.is_alive():
            keeper.join(timeout=60)
        for item in kept:
            item.process.stop()


def _keep_alive(kept: list[_Kept], stop: threading.Event, on_event: Callable[[JsonDict], None]) -> None:
    while not stop.wait(PROBE_S):
        for index, item in enumerate(kept):
            if item.process.running or stop.is_set():
                continue
            on_event({"event": "shop_server_died", "server": index, "pid": item.process.pid})
            try:
                item.restart()
                on_event({"event": "shop_server_restarted", "server": index, "pid": item.process.pid})
            except EnvironmentFaultError as error:
                on_event({"event": "shop_server_restart_failed", "server": index, "message": str(error)})
