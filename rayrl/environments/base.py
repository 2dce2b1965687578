"""The Environment protocol: reset, step, terminate, close; and the factory an actor keeps."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from rayrl.schemas import EpisodeJob, ResetResult, StepResult, ToolCall


@runtime_checkable
class Environment(Protocol):
    """One leased episode. The environment alone decides about ``done`` and ``reward``.

    Raises :class:`~rayrl.errors.EnvironmentFaultError` (or ``LeaseLostError``) for its own faults, never for what the
    policy does: an illegal action is an answer with feedback.
    """

    async def reset(self, job: EpisodeJob) -> ResetResult:
        """Take a lease and start ``job.task_id``; the same job twice gives the same first observation."""
        ...

    async def step(self, call: ToolCall, *, seed: int) -> StepResult:
        """Act. ``call`` has passed the tool schema of the last observation, except that enum values may be illegal."""
        ...

    async def terminate(self, reason: str) -> StepResult:
        """End the episode from outside (``generation_length`` or ``action_limit``); scored by the environment."""
        ...

    async def close(self) -> None:
        """Give the lease back. Idempotent; called on every exit path, cancellation included."""
        ...


@runtime_checkable
class EnvironmentFactory(Protocol):
    """Opens environments; one per rollout actor, sharing connections."""

    def identity(self) -> dict[str, Any]:
        """Kind, mode, version, catalogue hash: what changes results. No address. Pure, no network."""
        ...

    async def start(self) -> None:
        """Check that the server is there and is the one the identity names; raise ``EnvironmentFaultError`` if not."""
        ...

    def open(self) -> Environment:
        """A fresh environment; no I/O until ``reset``."""
        ...

    async def aclose(self) -> None:
        """Release connections. Idempotent."""
        ...
