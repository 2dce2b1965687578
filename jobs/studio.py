"""``rayrl studio``: runs, training, arena, skills and the workbench as a web application on this machine."""

from __future__ import annotations

import argparse
import gc
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.output import console, print_json
from jobs.runs import default_root
from rayrl.errors import UserError

if TYPE_CHECKING:
    from rayrl.retrieval.gate import RetrievalGate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``rayrl studio``."""
    parser.add_argument("--root", help="store (default ~/.rayrl/studio)")
    parser.add_argument("--runs", help="folder with runs to show (default: $RAYRL_RUNS or ./runs)")
    parser.add_argument("--host", help="address to bind to (default 127.0.0.1); others need a token")
    parser.add_argument("--port", type=int, help="port (default 8765; 0 takes a free one)")
    parser.add_argument("--config", type=Path, help="YAML with the keys of the studio's settings")
    parser.add_argument(
        "--skill", action="append", default=[], metavar="NAME=FOLDER", help="a deployed Skill; may repeat"
    )
    parser.add_argument(
        "--skill-root", action="append", default=[], metavar="FOLDER", help="snapshots may be taken below"
    )
    parser.add_argument("--openapi", action="store_true", help="print the OpenAPI document and end")


def run(args: argparse.Namespace) -> int:
    """``rayrl studio``."""
    import uvicorn

    from rayrl.config import load_raw, parse_config
    from rayrl.studio.app import create_app
    from rayrl.studio.config import StudioConfig
    from rayrl.studio.pages import shell
    from rayrl.workbench.launcher import DriverHandle, ProcessDriver, Supervisor
    from rayrl.workbench.readers.rows import Limits
    from rayrl.workbench.samples import SKILL, skill_folder
    from rayrl.workbench.workbench import Workbench

    raw = load_raw(args.config) if args.config else {}
    for key in ("root", "runs", "host", "port"):
        if getattr(args, key) is not None:
            raw[key] = getattr(args, key)
    raw.setdefault("runs", str(default_root()))
    deployed = {SKILL: str(skill_folder(1)), **raw.get("skills", {})}
    for item in args.skill:
        name, separator, folder = item.partition("=")
        if not separator or not Path(folder).expanduser().is_dir():
            raise UserError(f"--skill {item!r} is not of the form NAME=FOLDER with an existing folder")
        deployed[name] = folder
    raw |= {"skills": deployed, "skill_roots": [*raw.get("skill_roots", []), *args.skill_root]}
    config = parse_config(raw, StudioConfig, source=str(args.config or "rayrl studio"))
    if not Path(config.runs).expanduser().is_dir():
        print(f"rayrl studio: the runs folder {config.runs} does not exist; the pages stay empty", file=sys.stderr)
    token = os.environ.get(config.token_env) or None
    bench = Workbench(config.root, limits=Limits(max_bytes=config.max_upload_mb * 1024 * 1024))
    root = bench.store.root
    command = [sys.executable, "-m", "jobs.workbench", "drive", "--root", str(root)]

    def launch(experiment_id: str) -> DriverHandle:
        return ProcessDriver(command, experiment_id, root / "logs" / f"{experiment_id}.log")

    gate = _gate(config.checkpoints)
    app = create_app(bench, config, supervisor=Supervisor(bench.store, launch), token=token, gate=gate)
    if args.openapi:
        print_json(app.openapi())
        return 0
    listener = _listen(config.host, config.port)
    port = listener.getsockname()[1]
    if args.json:
        print_json({"url": f"http://{config.host}:{port}", "root": str(root)})
    else:
        console().print(
            f"rayrl studio: http://{config.host}:{port}  (store {root}, runs {config.runs}); Ctrl-C ends it",
            markup=False,
        )
    # what was imported stays: otherwise every full collection looks at all of it again, 70 ms within somebody's request
    shell.warm().join()
    gc.collect()
    gc.freeze()
    if gate is not None:
        gate.warm_up(wait=False)  # its encoders take seconds to load: not within somebody's request
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, server_header=False))
    server.run(sockets=[listener])
    bench.close()
    return 0


def _gate(folder: str | None) -> RetrievalGate | None:
    if folder is None:
        return None
    from rayrl.retrieval.gate import RetrievalGate

    return RetrievalGate(Path(folder).expanduser())


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)  # now, not when the server is up: who reads the address may connect at once and waits
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from None
    return listener
