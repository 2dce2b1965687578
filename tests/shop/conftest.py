"""Servers and a tiny raw client for the shop tests."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rayrl.shop.config import ShopServerConfig
from rayrl.shop.server import ShopServer

FIXTURES = Path(__file__).parent.parent / "fixtures"
PRODUCTS = FIXTURES / "shop_products.json"
WIRE = FIXTURES / "shop_wire.jsonl"


class Raw:
    """Plain HTTP against one server, nothing hidden."""

    def __init__(self, session: aiohttp.ClientSession, base: str) -> None:
        self.session = session
        self.base = base

    async def post(self, body: Any, *, headers: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
        async with self.session.post(f"{self.base}/api/shop_agent", json=body, headers=headers) as response:
            return response.status, await response.json()

    async def get(self, path: str, *, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        async with self.session.get(f"{self.base}{path}", headers=headers) as response:
            text = await response.text()
            return response.status, (await response.json()) if "json" in response.content_type else text

    async def reset(self, idx: int = 4, **more: Any) -> dict[str, Any]:
        status, body = await self.post({"action": "reset", "idx": idx, **more})
        assert status == 200, body
        return body["result"]

    async def act(self, lease: dict[str, Any], text: str, **more: Any) -> tuple[int, dict[str, Any]]:
        status, body = await self.post({"action": "interact", **key(lease), "response": text, **more})
        return status, body["result"]

    async def release(self, lease: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        status, body = await self.post({"action": "release_one", **key(lease)})
        return status, body["result"]


def key(lease: dict[str, Any]) -> dict[str, Any]:
    return {"env_idx": lease["env_idx"], "lease_id": lease["lease_id"]}


@contextlib.asynccontextmanager
async def running(admin_token: str | None = None, **options: Any) -> AsyncIterator[tuple[ShopServer, Raw]]:
    if "generate" not in options:
        options.setdefault("products", PRODUCTS)
    server = ShopServer(ShopServerConfig(**options), admin_token=admin_token)
    await server.start()
    try:
        async with aiohttp.ClientSession() as session:
            yield server, Raw(session, server.base_url)
    finally:
        await server.stop()


@pytest.fixture
def shop_server() -> Callable[..., Any]:
    return running
