from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hypothesis import settings

from rayrl.models.config import ModelConfig
from rayrl.models.openai_http import OpenAIChatModel
from rayrl.testing.mock_endpoint import MockEndpoint, serve

settings.register_profile("rayrl-models", deadline=None)
settings.load_profile("rayrl-models")

SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search products.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}},
            "required": ["query"],
            "additionalProperties": False,
        },
    },
}


def click(*values: str) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": "click",
            "description": "Click a value.",
            "parameters": {
                "type": "object",
                "properties": {"value": {"type": "string", "enum": list(values)}},
                "required": ["value"],
                "additionalProperties": False,
            },
        },
    }


MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "shop"},
    {"role": "user", "content": "Task: buy a lamp"},
]

# generous, so that a busy machine does not turn a slow answer into a fault
FAST: dict[str, Any] = {
    "timeouts": {"connect_s": 10, "read_s": 20, "attempt_s": 30, "total_s": 60, "queue_s": 60},
    "retries": {"max_attempts": 3, "backoff_initial_s": 0.01, "backoff_max_s": 0.05},
}
IMPATIENT: dict[str, Any] = {**FAST["timeouts"], "read_s": 0.4, "attempt_s": 1.0}
"""For endpoints that never answer."""


@pytest.fixture
async def mock() -> AsyncIterator[MockEndpoint]:
    async with serve() as endpoint:
        yield endpoint


@pytest.fixture
async def make(mock: MockEndpoint) -> AsyncIterator[Callable[..., OpenAIChatModel]]:
    built: list[OpenAIChatModel] = []

    def factory(on_event: Any = None, **settings: Any) -> OpenAIChatModel:
        config = ModelConfig.model_validate({"base_url": mock.url, "name": "mock", **FAST, **settings})
        built.append(OpenAIChatModel(config, on_event=on_event))
        return built[-1]

    yield factory
    for model in built:
        await model.aclose()
