"""Environments with one fault each, named by dotted path in the configs of the job tests."""

from __future__ import annotations

import asyncio
from typing import Any

from rayrl.errors import EnvironmentFaultError
from rayrl.schemas import EpisodeJob, ResetResult
from rayrl.testing.null_environment import NullEnvironment, NullEnvironmentFactory


class _Flaky(NullEnvironment):
    fail: frozenset[int] = frozenset()
    slow: frozenset[int] = frozenset()
    seconds = 0.0

    async def reset(self, job: EpisodeJob) -> ResetResult:
        if job.task_id in self.fail:
            raise EnvironmentFaultError(f"HTTP 500 for task {job.task_id}", code="http_500", stage="reset")
        await asyncio.sleep(3600.0 if job.task_id in self.slow else self.seconds)
        return await super().reset(job)


class Flaky(NullEnvironmentFactory):
    """Some tasks fail every time."""

    def __init__(self, fail: list[int] | None = None, seconds: float = 0.0) -> None:
        super().__init__(steps=2)
        self.fail = frozenset(fail or [])
        self.seconds = seconds

    def identity(self) -> dict[str, Any]:
        return {"kind": "flaky", "version": "1"}

    def open(self) -> _Flaky:
        environment = _Flaky(self.steps, self._leases)
        environment.fail, environment.seconds = self.fail, self.seconds
        return environment


class Slow(Flaky):
    """Every reset takes its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds=seconds)


class Mixed(Flaky):
    """Some tasks hang, the others are quick."""

    def __init__(self, slow: list[int]) -> None:
        super().__init__()
        self.slow = frozenset(slow)

    def open(self) -> _Flaky:
        environment = super().open()
        environment.slow = self.slow
        return environment


class Hanging(Flaky):
    """No reset ever answers."""

    def __init__(self) -> None:
        super().__init__(seconds=3600.0)


class Down(NullEnvironmentFactory):
    """The server is not there."""

    async def start(self) -> None:
        raise EnvironmentFaultError("no server at http://127.0.0.1:9", code="unreachable", stage="reset")
