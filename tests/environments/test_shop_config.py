"""Config and identity of the shop environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rayrl.config import is_operational, parse_config
from rayrl.environments.shop import EmbeddedShopConfig, ShopEnvironmentConfig
from rayrl.environments.shop_tools import action_text, page_tools
from rayrl.errors import ConfigError, DataError
from rayrl.schemas import ToolCall
from rayrl.shop.generator import generate_catalogue

URL = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "give base_urls"),
        ({"base_urls": ["127.0.0.1:80"]}, "must start with http"),
        ({"base_urls": [URL, URL]}, "an address occurs twice"),
        ({"base_urls": [URL], "catalogue_sha256": "abc"}, "catalogue_sha256"),
        ({"embedded": {}}, "give either products"),
        ({"embedded": {"generate": 24, "products": "x.json"}}, "give either products"),
        ({"embedded": {"generate": 24}, "interaction_mod": "x"}, "did you mean 'interaction_mode'"),
        ({"embedded": {"generate": 24, "slot": 3}}, "did you mean 'slots'"),
        ({"base_urls": [URL], "interaction_mode": "many"}, "interaction_mode"),
    ],
)
def test_a_wrong_config_is_explained(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(raw, ShopEnvironmentConfig, source="test.yaml")


def test_every_key_is_documented() -> None:
    for section in (ShopEnvironmentConfig, EmbeddedShopConfig):
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name}"


BASE: dict[str, Any] = {"embedded": {"generate": 24, "seed": 1}}


@pytest.mark.parametrize(
    "change",
    [
        {"interaction_mode": "multi_turn"},
        {"persona": True},
        {"environment_version": "other"},
        {"max_query_length": 30},
        {"embedded": {"generate": 24, "seed": 2}},
        {"embedded": {"generate": 25, "seed": 1}},
        {"embedded": {"generate": 24, "seed": 1, "page_size": 5}},
    ],
)
def test_what_changes_results_changes_the_identity(change: dict[str, Any]) -> None:
    base, other = ShopEnvironmentConfig(**BASE), ShopEnvironmentConfig(**{**BASE, **change})
    assert base.identity() != other.identity()
    assert base.semantic() == base.identity()


@pytest.mark.parametrize(
    "change",
    [
        {"base_urls": [URL]},
        {"step_timeout_s": 1.0},
        {"connect_timeout_s": 1.0},
        {"reset_timeout_s": 1.0},
        {"unreachable_timeout_s": 1.0},
        {"release_timeout_s": 1.0},
        {"max_attempts": 9},
        {"backoff_s": 1.0},
        {"max_backoff_s": 1.0},
        {"admin_token_env": "X"},
        {"trust_env": True},
        {"embedded": {"generate": 24, "seed": 1, "slots": 7, "servers": 3, "lease_ttl_s": 5}},
        {"embedded": {"generate": 24, "seed": 1, "queue_timeout_s": 5, "max_queue": 3}},
    ],
)
def test_what_does_not_change_results_does_not(change: dict[str, Any]) -> None:
    assert ShopEnvironmentConfig(**BASE).identity() == ShopEnvironmentConfig(**{**BASE, **change}).identity()
    for name in change:
        if name != "embedded":
            assert is_operational(ShopEnvironmentConfig.model_fields[name])


def test_a_file_and_the_generator_with_the_same_products_are_the_same_experiment(tmp_path: Path) -> None:
    file = tmp_path / "products.json"
    file.write_text(json.dumps(generate_catalogue(24, 1)), encoding="utf-8")
    from_file = ShopEnvironmentConfig(embedded=EmbeddedShopConfig(products=file))
    assert from_file.identity() == ShopEnvironmentConfig(**BASE).identity()


def test_a_contradicting_hash_and_a_missing_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="catalogue_sha256 is 000"):
        ShopEnvironmentConfig(**BASE, catalogue_sha256="0" * 64).identity()
    missing = EmbeddedShopConfig(products=tmp_path / "none.json")
    with pytest.raises(DataError, match=r"none\.json"):
        ShopEnvironmentConfig(embedded=missing).identity()


def test_the_server_config_of_an_embedded_shop() -> None:
    config = ShopEnvironmentConfig(
        embedded=EmbeddedShopConfig(generate=24, seed=1, slots=3, page_size=4, lease_ttl_s=5), max_query_length=9
    ).server_config()
    assert (config.generate, config.seed, config.slots, config.page_size) == (24, 1, 3, 4)
    assert (config.lease_ttl_s, config.max_query_length, config.port) == (5, 9, 0)
    with pytest.raises(ConfigError, match="no shop to start"):
        ShopEnvironmentConfig(base_urls=[URL]).server_config()


def test_equal_pages_give_equal_tools() -> None:
    state = {"search_available": False, "actions": ["back to search", "1234567"]}
    assert page_tools(state) == page_tools(dict(state))
    assert page_tools({"search_available": True, "actions": []}) == page_tools(
        {"search_available": True, "actions": []}
    )
    assert page_tools({"search_available": False, "actions": []}) == []


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("search", {"query": " red\n lamp "}, "search[red lamp]"),
        ("click", {"value": "颜色=rose | gold"}, "click[颜色=rose | gold]"),
        ("click", {"value": 123}, "click[123]"),
        ("search", {}, "search[]"),
        ("finish", {"x": 1}, "finish[]"),
    ],
)
def test_action_text(name: str, arguments: dict[str, Any], text: str) -> None:
    assert action_text(ToolCall(id="1", name=name, arguments=arguments)) == text
