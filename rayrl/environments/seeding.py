"""Does a seeded reset mean anything? Checked, not assumed."""

from __future__ import annotations

from rayrl.environments.base import EnvironmentFactory
from rayrl.errors import EnvironmentFaultError
from rayrl.schemas import EpisodeJob, ResetResult, canonical_json


async def require_same_first_observation(factory: EnvironmentFactory, job: EpisodeJob) -> ResetResult:
    """Reset twice with the same job and compare what a policy would see; returns the first.

    An environment that accepts a seed and ignores it, or hides randomness from it, makes a seeded run a fiction, so
    such a run must not start.

    Raises:
        EnvironmentFaultError: code ``not_deterministic``; or whatever reset raises.
    """
    seen: list[ResetResult] = []
    for _ in range(2):
        environment = factory.open()
        try:
            seen.append(await environment.reset(job))
        finally:
            await environment.close()
    first, second = seen
    for name in ("instruction", "persona", "observation"):
        left, right = getattr(first, name), getattr(second, name)
        if canonical_json(_plain(left)) != canonical_json(_plain(right)):
            raise EnvironmentFaultError(
                f"two resets of task {job.task_id} with seed {job.seed} differ in {name}; a seeded run would not be"
                " reproducible",
                code="not_deterministic",
                stage="reset",
            )
    return first


def _plain(value: object) -> object:
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value
