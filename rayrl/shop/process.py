"""Shop servers as child processes: start, wait until ready, stop by process id.

Invariants: a child never outlives its parent, however the parent ends (it watches its standard input, see ``serve``);
the admin token reaches the child through its environment, never its command line; whatever fails to start is stopped
again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import orjson

from rayrl.errors import EnvironmentFaultError
from rayrl.shop.config import ShopServerConfig
from rayrl.shop.serve import ADMIN_TOKEN_ENV

_FLAGS = (
    "seed",
    "slots",
    "host",
    "port",
    "page_size",
    "max_query_length",
    "lease_ttl_s",
    "queue_timeout_s",
    "max_queue",
)


class ShopProcess:
    """One running server process.

    Attributes:
        base_url: where it answers.
        pid: its process id.
        ready: its ready line (port, tasks, products, catalogue_sha256, ...).
    """

    def __init__(self, config: ShopServerConfig, *, admin_token: str, ready_timeout_s: float = 60.0) -> None:
        """Start the server and wait until it listens.

        Raises:
            EnvironmentFaultError: it died or was not ready in time; the message ends with what it said.
        """
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "PYTHONPATH": path, ADMIN_TOKEN_ENV: admin_token}
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        self._process = subprocess.Popen(
            command_line(config),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=env,
            # a Ctrl-C at the terminal is the parent's to handle; it then stops its servers in order
            start_new_session=True,
        )
        self.pid = self._process.pid
        try:
            self.ready: dict[str, Any] = self._wait_ready(ready_timeout_s)
        except BaseException:
            self.stop()
            raise
        self.base_url: str = self.ready["base_url"]

    def _wait_ready(self, timeout_s: float) -> dict[str, Any]:
        stdout = self._process.stdout
        if stdout is None:
            raise EnvironmentFaultError("the shop server has no output pipe", code="server_start", stage="reset")
        deadline = time.monotonic() + timeout_s
        buffer = b""
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while b"\n" not in buffer:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise self._failure(f"was not ready within {timeout_s:g} s")
                chunk = os.read(stdout.fileno(), 65_536)
                if not chunk:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._process.wait(5)
                    raise self._failure(f"ended with status {self._process.returncode} before it was ready")
                buffer += chunk
        line: dict[str, Any] = orjson.loads(buffer.split(b"\n", 1)[0])
        return line

    def _failure(self, what: str) -> EnvironmentFaultError:
        said = self.stderr_tail()
        return EnvironmentFaultError(
            f"the shop server {what}" + (f": {said}" if said else ""), code="server_start", stage="reset"
        )

    def stderr_tail(self, size: int = 2000) -> str:
        """The last bytes of what the server wrote to its error output."""
        end = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, end - size))
        return self._errors.read().decode(errors="replace").strip()

    @property
    def running(self) -> bool:
        """Whether the process is alive."""
        return self._process.poll() is None

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ask the server to end, then make it. Idempotent."""
        process = self._process
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        for insist in (None, process.terminate, process.kill):
            if insist is not None and process.poll() is None:
                insist()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
                break
        if process.stdout is not None:
            process.stdout.close()


def command_line(config: ShopServerConfig) -> list[str]:
    """How to start this server from a shell."""
    command = [sys.executable, "-m", "rayrl.shop", "--watch-parent"]
    if config.products is not None:
        command += ["--products", str(config.products)]
    else:
        command += ["--generate", str(config.generate)]
    for name in _FLAGS:
        value = getattr(config, name)
        if value is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    return command


@contextlib.contextmanager
def shop_processes(
    config: ShopServerConfig, count: int = 1, *, admin_token: str | None = None
) -> Iterator[tuple[list[ShopProcess], str]]:
    """Run ``count`` servers for the time of the block; yields them with their admin token (made up if not given).

    Raises:
        EnvironmentFaultError: one of them did not start; the others are stopped.
    """
    token = admin_token or secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        servers: list[ShopProcess] = []
        for _ in range(count):
            servers.append(ShopProcess(config, admin_token=token))
            stack.callback(servers[-1].stop)
        yield servers, token
