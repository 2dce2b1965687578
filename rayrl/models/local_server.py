"""The local model as a process of its own, so that several actors share one set of weights.

The child dies with its parent, however the parent ends: it exits as soon as its standard input closes. The first line
it prints is its address. By hand: ``python -m rayrl.models.local_server --port 8080 --stay``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from rayrl.errors import ConfigError
from rayrl.models.config import LocalConfig
from rayrl.models.local import start_server, weights_path


@contextmanager
def local_server(config: LocalConfig | None = None, *, port: int = 0) -> Iterator[str]:
    """Serve the local model in a child process for the duration of the block.

    Yields:
        The base URL, ending in ``/v1``, for ``model.base_url`` of every actor.

    Raises:
        ConfigError: packages or weights are missing, or the child did not come up within ``start_timeout_s``.
    """
    settings = config or LocalConfig()
    weights_path(settings)  # say what is missing here, not in a child's log
    command = [sys.executable, "-m", "rayrl.models.local_server", "--port", str(port)]
    command += ["--config", json.dumps(settings.model_dump(mode="json"))]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:  # a pipe would fill up unread
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            yield _address(child, settings.start_timeout_s, log)
        finally:
            for stream in (child.stdin, child.stdout):
                if stream is not None:
                    stream.close()
            child.terminate()
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _address(child: subprocess.Popen[str], timeout_s: float, log: IO[str]) -> str:
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.append(child.stdout.readline() if child.stdout else ""), daemon=True)
    reader.start()
    reader.join(timeout_s)
    address = lines[0].strip() if lines else ""
    if address.startswith("http://"):
        return address
    child.kill()
    child.wait()
    log.seek(0)
    said = log.read().strip().splitlines()
    why = said[-1] if said else f"no answer within {timeout_s:g} s"
    raise ConfigError(f"the local model server did not start: {why[:300]}")


def _die_with_parent() -> None:
    while sys.stdin.buffer.read(4096):
        pass
    os._exit(0)  # llama.cpp's threads know no other end


def main(argv: list[str] | None = None) -> None:
    """Command line of the server process."""
    parser = argparse.ArgumentParser(prog="python -m rayrl.models.local_server", description="Serve the local model.")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--config", default="{}", help="the model.local section as JSON")
    parser.add_argument("--stay", action="store_true", help="do not exit when standard input closes")
    arguments = parser.parse_args(argv)
    try:
        server = start_server(LocalConfig.model_validate_json(arguments.config), port=arguments.port)
    except (ConfigError, ValueError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    print(f"{server.listening_address}/v1", flush=True)
    try:
        if arguments.stay:
            threading.Event().wait()
        _die_with_parent()
    except KeyboardInterrupt:
        os._exit(130)


if __name__ == "__main__":
    main()
