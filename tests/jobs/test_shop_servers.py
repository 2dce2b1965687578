"""Embedded shop servers: up before the first episode, back on their port when they die, gone at the end."""

from __future__ import annotations

import os
import signal
import time
import urllib.error
import urllib.request

import pytest

from jobs.shop_servers import embedded_shops
from rayrl.environments.config import CustomEnvironmentConfig
from rayrl.environments.shop_config import EmbeddedShopConfig, ShopEnvironmentConfig


def answers(url):
    try:
        with urllib.request.urlopen(f"{url}/healthz", timeout=2) as response:
            return response.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for(condition, limit_s=30.0):
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until, "nothing happened in time"
        time.sleep(0.05)


def test_a_killed_server_comes_back_at_its_address(products_file):
    config = ShopEnvironmentConfig(embedded=EmbeddedShopConfig(products=products_file))
    events = []
    with embedded_shops(config, host="127.0.0.1", on_event=events.append) as shops:
        (url,) = shops.environment.base_urls
        (pid,) = shops.pids
        assert answers(url)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: any(e["event"] == "shop_server_restarted" for e in events))
        wait_for(lambda: answers(url))
        (again,) = shops.pids
        assert again != pid
        assert shops.admin_token.get_secret_value() not in repr(shops)
    assert [e["event"] for e in events] == ["shop_server_died", "shop_server_restarted"]
    wait_for(lambda: not alive(again))
    assert not answers(url)


def test_servers_end_when_the_run_fails(products_file):
    config = ShopEnvironmentConfig(embedded=EmbeddedShopConfig(products=products_file))
    with pytest.raises(ZeroDivisionError), embedded_shops(config, host="127.0.0.1", on_event=print) as shops:
        (pid,) = shops.pids
        raise ZeroDivisionError
    wait_for(lambda: not alive(pid))


@pytest.mark.parametrize(
    "config",
    [
        ShopEnvironmentConfig(base_urls=["http://127.0.0.1:9"]),
        ShopEnvironmentConfig(base_urls=["http://127.0.0.1:9"], embedded=EmbeddedShopConfig(generate=60)),
        CustomEnvironmentConfig(kind="a.b:C"),
    ],
)
def test_nothing_is_started_where_the_config_names_servers_or_another_environment(config):
    with embedded_shops(config, host="127.0.0.1", on_event=print) as shops:
        assert shops.environment == config and shops.servers == [] and shops.admin_token is None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--generate", 60, "--slots", 0], "slots: "),
        (["--generate", 3], "generate: "),
        (["--generate", 60, "--port", 99999], "port: "),
        (["--products", "nowhere.json"], "nowhere.json"),
        ([], "one of the arguments --products --generate is required"),
    ],
)
def test_serving_names_the_wrong_argument(command, words, says):
    code, found = command("shop", "serve", *words)
    assert code == 2 and says in found["error"]["message"]
