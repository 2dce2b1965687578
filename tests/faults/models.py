"""Models that misbehave inside the worker, where no endpoint can: they hang, or block the event loop they run on."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from rayrl.schemas import ModelOutput, ToolCall, Usage


class Obedient:
    """Calls ``search`` each time; the parent of the others. ``tokens`` are charged per call."""

    def __init__(self, tokens: int = 10, delay_s: float = 0.0) -> None:
        self.tokens = tokens
        self.delay_s = delay_s

    def identity(self) -> dict[str, Any]:
        return {"kind": type(self).__name__, "scripted": True}

    async def generate(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], *, seed: int) -> ModelOutput:
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        call = ToolCall(id=f"call-{seed}", name="search", arguments={"query": f"{seed % 997}"})
        return ModelOutput(tool_calls=[call], usage=Usage(prompt_tokens=self.tokens, completion_tokens=0))

    async def aclose(self) -> None:
        pass


class HangsOnTask(Obedient):
    """Never answers for one task; a ``stop_file`` that exists ends the hanging (for resumes)."""

    def __init__(self, task_id: int, stop_file: str = "", **settings: Any) -> None:
        super().__init__(**settings)
        self.task_id = task_id
        self.stop_file = Path(stop_file) if stop_file else None

    async def generate(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], *, seed: int) -> ModelOutput:
        released = self.stop_file is not None and self.stop_file.exists()
        if not released and any(f"(task {self.task_id})" in str(m.get("content")) for m in messages):
            await asyncio.Event().wait()
        return await super().generate(messages, tools, seed=seed)


class HangsAlways(Obedient):
    """Never answers anything."""

    async def generate(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], *, seed: int) -> ModelOutput:
        await asyncio.Event().wait()
        raise RuntimeError("unreachable")


class BlocksOnce(Obedient):
    """Blocks the whole event loop for minutes, once per ``marker`` file: the next worker finds the file and behaves."""

    def __init__(self, marker: str, seconds: float = 600.0, **settings: Any) -> None:
        super().__init__(**settings)
        self.marker = Path(marker)
        self.seconds = seconds

    async def generate(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], *, seed: int) -> ModelOutput:
        try:
            self.marker.touch(exist_ok=False)
        except FileExistsError:
            return await super().generate(messages, tools, seed=seed)
        time.sleep(self.seconds)
        raise RuntimeError("the worker was not replaced")


class IgnoresCancellation(Obedient):
    """Swallows every attempt to end it."""

    async def generate(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], *, seed: int) -> ModelOutput:
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue
