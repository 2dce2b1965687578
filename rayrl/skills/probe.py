"""What a failure analyst may ask the environment: does the failure repeat, and could the goal have been reached?

Privileged: it uses the gold product. Its findings go to the analyst and into ``privileged_audit``, never further.
"""

from __future__ import annotations

from typing import Any

from rayrl.environments.base import Environment, EnvironmentFactory
from rayrl.schemas import EpisodeJob, JsonDict, StepResult, ToolCall, step_seed


async def probe_failure(factory: EnvironmentFactory, record: JsonDict, goal: JsonDict | None) -> JsonDict:
    """Replay the recorded calls, then try the direct road to the goal.

    Returns ``{"repeats": bool, "reward": float | None, "goal_listed_at": rank | None, "goal_axes": [...]}``.

    Raises:
        EnvironmentFaultError: the environment failed.
    """
    job = EpisodeJob.model_validate(record["job"])
    replayed = await _play(factory, job, _calls(record))
    recorded = (record.get("final") or {}).get("reward")
    found: JsonDict = {
        "repeats": replayed is not None and replayed.done and replayed.reward == recorded,
        "reward": replayed.reward if replayed is not None else None,
    }
    if goal is not None and goal.get("asin"):
        found |= await _direct(factory, job, goal)
    return found


def _calls(record: JsonDict) -> list[ToolCall]:
    calls = []
    for step in record.get("steps") or ():
        made = (step.get("model") or {}).get("tool_calls") or []
        if step.get("action") is not None and len(made) == 1:
            calls.append(ToolCall.model_validate(made[0]))
    return calls


async def _play(factory: EnvironmentFactory, job: EpisodeJob, calls: list[ToolCall]) -> StepResult | None:
    environment = factory.open()
    result: StepResult | None = None
    try:
        await environment.reset(job)
        for index, call in enumerate(calls):
            result = await environment.step(call, seed=step_seed(job.seed, index))
            if result.done:
                break
    finally:
        await environment.close()
    return result


async def _direct(factory: EnvironmentFactory, job: EpisodeJob, goal: JsonDict) -> JsonDict:
    environment = factory.open()
    try:
        await environment.reset(job)
        query = str(goal.get("name") or goal.get("instruction_text") or "")[:64]
        page = await _act(environment, job, "search", {"query": query})
        listed = [str(p.get("asin")) for p in page.observation.state.get("products") or () if isinstance(p, dict)]
        target = str(goal["asin"])
        if target not in listed:
            return {"goal_listed_at": None}
        page = await _act(environment, job, "click", {"value": target})
        return {
            "goal_listed_at": listed.index(target) + 1,
            "goal_axes": page.observation.state.get("missing_option_axes") or [],
        }
    finally:
        await environment.close()


async def _act(environment: Environment, job: EpisodeJob, tool: str, arguments: dict[str, Any]) -> StepResult:
    return await environment.step(ToolCall(id="probe", name=tool, arguments=arguments), seed=step_seed(job.seed, 0))
