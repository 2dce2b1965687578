"""The scripted shopper: a deterministic policy behind the ChatModel protocol, for tests, benchmarks and gate studies.

It is no language model and says so: ``identity()`` carries ``scripted: true`` and its version. It reads only the
messages and tools it is given. Its competences come from the config's level and switches, from habit, and from the
skills in the prompt (:mod:`rayrl.models.scripted_skills`). Habit and noise are drawn from the calls' seeds, so repeated
samples of a task differ and the same sample never does.
"""

from __future__ import annotations

import asyncio
import time
from random import Random
from typing import Any

from rayrl.models import walk
from rayrl.models.config import ScriptedConfig
from rayrl.models.scripted_policy import Move, Shopper, read_past
from rayrl.models.scripted_prompt import observation_of, read_page, read_wish, skills_section
from rayrl.models.scripted_skills import COMPETENCES, taught
from rayrl.schemas import ModelOutput, ProtocolError, ToolCall, Usage

SCRIPTED_VERSION = "1"
"""Bumped whenever the same conversation and seed may give another call."""

_BYTES_PER_TOKEN = 4


def scripted_identity(config: ScriptedConfig, *, name: str, checkpoint_id: str | None = None) -> dict[str, Any]:
    """What makes this shopper this shopper."""
    return {
        "kind": "scripted",
        "scripted": True,
        "version": SCRIPTED_VERSION,
        "name": name,
        "checkpoint_id": checkpoint_id,
        "config": config.semantic(),
    }


def base_competences(config: ScriptedConfig) -> frozenset[str]:
    """The competences a config switches on, before any skill is read."""
    everything = config.level == "competent"
    switched = {name: getattr(config, name) for name in COMPETENCES}
    return frozenset(name for name, value in switched.items() if (everything if value is None else value))


class ScriptedModel:
    """See the module docstring. Stateless: safe to share by any number of episodes."""

    def __init__(
        self, config: ScriptedConfig | None = None, *, name: str = "scripted", checkpoint_id: str | None = None
    ) -> None:
        self._config = config or ScriptedConfig()
        self._identity = scripted_identity(self._config, name=name, checkpoint_id=checkpoint_id)
        self._base = base_competences(self._config)

    def identity(self) -> dict[str, Any]:
        """See :func:`scripted_identity`."""
        return dict(self._identity)

    async def aclose(self) -> None:
        """Nothing to release."""

    async def generate(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], *, seed: int) -> ModelOutput:
        """One decision as a completion."""
        if self._config.latency_ms:
            await asyncio.sleep(self._config.latency_ms / 1000)
        return self.answer(messages, tools, seed=seed)

    def answer(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], *, seed: int) -> ModelOutput:
        """As :meth:`generate`, without awaiting; pure apart from the measured latency."""
        started = time.perf_counter()
        rng = Random(seed)
        slip = rng.random() < self._config.noise
        mute = rng.random() < self._config.protocol_noise
        functions = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        move = self._move(messages, functions, rng, seed, slip) if functions and not mute else None
        prompt_bytes = sum(len(str(message.get("content") or "").encode()) for message in messages)
        said = len(move[2].encode()) + len(str(move[1]).encode()) if move else 8
        facts: dict[str, Any] = {
            "usage": Usage(
                prompt_tokens=prompt_bytes // _BYTES_PER_TOKEN + 40 * len(tools),
                completion_tokens=max(1, said // _BYTES_PER_TOKEN),
            ),
            "response_id": f"scripted-{seed:08x}",
            "latency_ms": round((time.perf_counter() - started) * 1000 + self._config.latency_ms, 3),
            "metadata": {"scripted": SCRIPTED_VERSION},
        }
        if move is None:
            return ModelOutput(
                content="I am thinking about it.",
                finish_reason="stop",
                protocol_error=ProtocolError(code="no_tool_call", message="the completion holds no tool call"),
                raw_response={"role": "assistant", "content": "I am thinking about it."},
                **facts,
            )
        call = ToolCall(id=call_id(seed), name=move[0], arguments=move[1])
        return ModelOutput(tool_calls=[call], reasoning=move[2], finish_reason="tool_calls", **facts)

    def _move(
        self, messages: list[dict[str, Any]], functions: dict[str, dict[str, Any]], rng: Random, seed: int, slip: bool
    ) -> tuple[str, dict[str, Any], str] | None:
        values = (functions.get("click", {}).get("properties") or {}).get("value", {}).get("enum") or []
        page = read_page(_current_observation(messages))
        if page.kind == "other" or not (values or "search" in functions):
            plain = walk.next_call(functions, messages)
            return (*plain, "no shop page: the plain walk") if plain else None
        competences = self._competences(messages, seed)
        first_user = next((m["content"] for m in messages if m["role"] == "user"), "")
        shopper = Shopper(read_wish(str(first_user)), page, read_past(messages), values, competences)
        move: Move = shopper.slip(rng) if slip and values else shopper.decide(search="search" in functions)
        key = "query" if move.tool == "search" else "value"
        return move.tool, {key: move.argument}, move.why

    def _competences(self, messages: list[dict[str, Any]], seed: int) -> frozenset[str]:
        """Config, then habit, then the skills in the prompt; a skill that unteaches has the last word."""
        mood = Random(f"habit:{_first_call_id(messages) or call_id(seed)}")
        habits = frozenset(name for name in COMPETENCES if mood.random() < self._config.habit)
        known = self._base | habits
        first = messages[0] if messages else {}
        if not self._config.obeys_skills or first.get("role") not in ("system", "developer"):
            return known
        on, off = taught(skills_section(str(first.get("content") or "")))
        return (known | on) - off


def call_id(seed: int) -> str:
    """Id of the call made with a seed."""
    return f"call_{seed:08x}"


def _first_call_id(messages: list[dict[str, Any]]) -> str | None:
    """Id of the conversation's first call: what tells samples of one task apart for as long as the episode lasts."""
    for message in messages:
        if message["role"] == "assistant" and message.get("tool_calls"):
            return str(message["tool_calls"][0].get("id"))
    return None


def _current_observation(messages: list[dict[str, Any]]) -> str:
    """The newest observation: the last tool message, else the one in the first user message."""
    for message in reversed(messages):
        if message["role"] == "tool":
            return str(message.get("content") or "")
    first = next((m for m in messages if m["role"] == "user"), None)
    return observation_of(str(first["content"])) if first else ""
