"""Servers as child processes, and the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from rayrl.errors import EnvironmentFaultError
from rayrl.shop.__main__ import main, parser
from rayrl.shop.config import ShopServerConfig
from rayrl.shop.process import ShopProcess, command_line, shop_processes

ROOT = Path(__file__).parents[2]


def health(base_url: str) -> dict[str, object]:
    with urllib.request.urlopen(f"{base_url}/healthz", timeout=5) as response:
        answer: dict[str, object] = json.loads(response.read())
    return answer


def gone(pid: int, within_s: float) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_two_servers_with_the_same_catalogue_start_and_stop() -> None:
    config = ShopServerConfig(generate=24, seed=1, slots=3, page_size=7)
    with shop_processes(config, 2) as (servers, token):
        first, second = (health(server.base_url) for server in servers)
        assert first["catalogue_sha256"] == second["catalogue_sha256"] == servers[0].ready["catalogue_sha256"]
        assert (first["environment_slots"], first["page_size"]) == (3, 7)
        assert servers[0].ready["port"] != servers[1].ready["port"]
        # the token is not where other users of the machine can read it
        assert token not in " ".join(psutil.Process(servers[0].pid).cmdline())
        request = urllib.request.Request(
            f"{servers[0].base_url}/api/private/goal?idx=0", headers={"X-Admin-Token": token}
        )
        with urllib.request.urlopen(request, timeout=5) as response:
            assert json.loads(response.read())["result"]["idx"] == 0
    assert all(not server.running for server in servers)


def test_stopping_is_idempotent_and_survives_a_dead_server() -> None:
    server = ShopProcess(ShopServerConfig(generate=12), admin_token="t")
    os.kill(server.pid, signal.SIGKILL)
    server.stop()
    server.stop()
    assert not server.running


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    file = tmp_path / "broken.json"
    file.write_text("[]")
    with pytest.raises(EnvironmentFaultError, match=r"status 2.*broken\.json: the top level must be a non-empty list"):
        ShopProcess(ShopServerConfig(products=file), admin_token="t")


def test_a_taken_port_is_named() -> None:
    with shop_processes(ShopServerConfig(generate=12)) as (servers, _):
        port = servers[0].ready["port"]
        with pytest.raises(EnvironmentFaultError, match=f"cannot listen on 127.0.0.1:{port}"):
            ShopProcess(ShopServerConfig(generate=12, port=port), admin_token="t")


def test_killing_the_parent_leaves_no_server_behind() -> None:
    driver = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import time\n"
            "from rayrl.shop.config import ShopServerConfig\n"
            "from rayrl.shop.process import ShopProcess\n"
            "server = ShopProcess(ShopServerConfig(generate=12), admin_token='t')\n"
            "print(server.pid, flush=True)\n"
            "time.sleep(60)\n",
        ],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert driver.stdout is not None
    pid = int(driver.stdout.readline())
    assert psutil.pid_exists(pid)
    driver.kill()
    driver.wait()
    assert gone(pid, 5)


def test_the_command_line_carries_every_option(tmp_path: Path) -> None:
    config = ShopServerConfig(
        generate=12,
        seed=3,
        slots=5,
        port=0,
        page_size=4,
        max_query_length=9,
        lease_ttl_s=7,
        queue_timeout_s=8,
        max_queue=2,
    )
    given = vars(parser().parse_args(command_line(config)[3:]))
    for name in (
        "generate",
        "seed",
        "slots",
        "page_size",
        "max_query_length",
        "lease_ttl_s",
        "queue_timeout_s",
        "max_queue",
    ):
        assert given[name] == getattr(config, name)
    file = ShopServerConfig(products=tmp_path / "p.json")
    assert vars(parser().parse_args(command_line(file)[3:]))["products"] == tmp_path / "p.json"


def test_wrong_options_are_explained(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--generate", "12", "--slots", "0"]) == 2
    assert "slots: Input should be greater than or equal to 1" in capsys.readouterr().err
    assert main(["--products", str(tmp_path / "none.json")]) == 2
    assert "none.json cannot be read" in capsys.readouterr().err
