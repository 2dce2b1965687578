"""An environment in this process that does nothing: the yardstick for what the rest of the system costs.

``steps`` calls of ``noop`` end an episode with reward 1. It keeps the whole protocol, so it also shows the smallest
environment a user can write.
"""

from __future__ import annotations

from typing import Any

from rayrl.schemas import EpisodeJob, JsonDict, Observation, ResetResult, StepResult, ToolCall

VERSION = "null-v1"
TOOLS: list[JsonDict] = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Does nothing; call it until the episode is done.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string"}},
                "required": ["query"],
                "additionalProperties": False,
            },
        },
    }
]


class NullEnvironment:
    """One episode of nothing."""

    def __init__(self, steps: int, leases: set[int]) -> None:
        self._steps = steps
        self._leases = leases
        self._done = 0
        self._task = 0

    async def reset(self, job: EpisodeJob) -> ResetResult:
        """Start; the observation is a function of the job alone."""
        self._task = job.task_id
        self._leases.add(id(self))
        return ResetResult(
            instruction=f"Call search {self._steps} times (task {job.task_id}).",
            observation=self._observe(),
            environment_version=VERSION,
        )

    async def step(self, call: ToolCall, *, seed: int) -> StepResult:
        """Count."""
        self._done += 1
        done = self._done >= self._steps
        detail: dict[str, Any] = {"r_success": 1, "r_strict": 1.0} if done else {}
        return StepResult(
            action=f"search[{call.arguments.get('query', '')}]",
            observation=self._observe(),
            done=done,
            reward=1.0 if done else 0.0,
            reward_detail=detail,
            feedback={"action": call.name, "valid": True, "reason": "executed", "message": ""},
            termination_reason="finished" if done else None,
        )

    async def terminate(self, reason: str) -> StepResult:
        """End without a score."""
        return StepResult(
            action=reason,
            observation=self._observe(),
            done=True,
            reward=0.0,
            reward_detail={"r_success": 0, "r_strict": 0.0},
            termination_reason=reason,
        )

    async def close(self) -> None:
        """Forget the lease."""
        self._leases.discard(id(self))

    def _observe(self) -> Observation:
        state = {"page_type": "null", "task": self._task, "done": self._done}
        return Observation(text=f"Step {self._done} of {self._steps}.", state=state, version=VERSION, tools=TOOLS)


class NullEnvironmentFactory:
    """Opens :class:`NullEnvironment`; configure with ``environment.options.steps``."""

    def __init__(self, steps: int = 5) -> None:
        self.steps = steps
        self._leases: set[int] = set()

    @property
    def leases_open(self) -> int:
        """Episodes that were reset and not closed."""
        return len(self._leases)

    def identity(self) -> dict[str, Any]:
        """Fingerprint part."""
        return {"kind": "null", "version": VERSION, "steps": self.steps}

    async def start(self) -> None:
        """Nothing to check."""

    def open(self) -> NullEnvironment:
        """A fresh episode."""
        return NullEnvironment(self.steps, self._leases)

    async def aclose(self) -> None:
        """Nothing to close."""
