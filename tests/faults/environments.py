"""The null environment with a fault marker in each task's instruction: the mock endpoint obeys it, task by task."""

from __future__ import annotations

from typing import Any

from rayrl.schemas import EpisodeJob, ResetResult
from rayrl.testing.null_environment import NullEnvironment, NullEnvironmentFactory


class MarkedEnvironment(NullEnvironment):
    """``behaviours[task_id % n]`` is what the mock endpoint does in this episode."""

    def __init__(self, steps: int, leases: set[int], behaviours: list[str]) -> None:
        super().__init__(steps, leases)
        self._behaviours = behaviours

    async def reset(self, job: EpisodeJob) -> ResetResult:
        result = await super().reset(job)
        behaviour = self._behaviours[job.task_id % len(self._behaviours)]
        return result.model_copy(update={"instruction": f"{result.instruction} [[mock:{behaviour}]]"})


class MarkedEnvironmentFactory(NullEnvironmentFactory):
    """Configure with ``environment.options``: ``steps`` and ``behaviours``."""

    def __init__(self, behaviours: list[str], steps: int = 3) -> None:
        super().__init__(steps)
        self.behaviours = behaviours

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "behaviours": self.behaviours}

    def open(self) -> MarkedEnvironment:
        return MarkedEnvironment(self.steps, self._leases, self.behaviours)
