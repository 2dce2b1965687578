"""Replay: run an episode again against its recorded model outputs, and say where the environment answers differently.

The recorded completions are fed back verbatim, so every difference comes from the environment (or from the runtime
having
changed), not from sampling. The replayed conversation is compared too: it is what the model would have been asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rayrl.environments.base import EnvironmentFactory
from rayrl.errors import DataError
from rayrl.prompts import PromptBuilder
from rayrl.runtime import AgentRuntime, RuntimeConfig
from rayrl.schemas import (
    EpisodeJob,
    JsonDict,
    ModelOutput,
    PolicyFailure,
    ProtocolError,
    PublicContext,
    Skill,
    ToolCall,
    Usage,
)
from rayrl.traces.schema import expand


class RecordedModel:
    """A ChatModel that answers with the completions of a record, in order."""

    def __init__(self, record: JsonDict) -> None:
        self._outputs = [_output(step) for step in record["steps"]]
        self._next = 0

    def identity(self) -> dict[str, Any]:
        """Names itself; a replay is never a run."""
        return {"kind": "recorded"}

    async def generate(self, messages: list[JsonDict], tools: list[JsonDict], *, seed: int) -> ModelOutput:
        """The next recorded completion.

        Raises:
            DataError: the episode went on longer than the record.
        """
        if self._next >= len(self._outputs):
            raise DataError(f"the replay goes on after the {len(self._outputs)} recorded completions")
        self._next += 1
        return self._outputs[self._next - 1]

    async def aclose(self) -> None:
        """Nothing to release."""


class RecordedSkills:
    """The skills the record says were injected."""

    def __init__(self, record: JsonDict) -> None:
        self._skills = [
            Skill(**{k: v for k, v in item.items() if k != "content_sha256"}) for item in record["selected_skills"]
        ]

    def identity(self) -> dict[str, Any]:
        """Names itself."""
        return {"kind": "recorded"}

    async def select(self, context: PublicContext) -> list[Skill]:
        """The recorded selection."""
        return self._skills


@dataclass(frozen=True)
class Difference:
    """One place where the replay departs from the record."""

    where: str
    recorded: Any
    replayed: Any


async def replay(
    record: JsonDict, *, environments: EnvironmentFactory, prompts: PromptBuilder, limits: RuntimeConfig
) -> tuple[JsonDict, list[Difference]]:
    """Replay one record; returns the new record (expanded) and the differences, first ones first.

    Raises:
        DataError: the record never reached the environment, so there is nothing to replay.
    """
    if not record.get("steps") or record.get("reset") is None:
        raise DataError(f"episode {record.get('episode_id')}: the record holds no steps to replay")
    runtime = AgentRuntime(
        model=RecordedModel(record),
        environments=environments,
        skills=RecordedSkills(record),
        prompts=prompts,
        config=limits,
        provenance=record["provenance"],
    )
    outcome = await runtime.run(EpisodeJob(**record["job"]), attempt=record["attempt"])
    replayed = expand(outcome.record)
    return replayed, compare_records(expand(record), replayed)


def compare_records(recorded: JsonDict, replayed: JsonDict) -> list[Difference]:
    """Differences in what matters: status, reset, per-step tools, action, environment answer, conversation, final."""
    found: list[Difference] = []

    def check(where: str, a: Any, b: Any) -> None:
        if a != b:
            found.append(Difference(where, a, b))

    check("status", recorded["status"], replayed["status"])
    if replayed["status"] == "failed" and recorded["status"] != "failed":
        found.append(Difference("error", None, replayed["error"]))
    for key in ("instruction", "persona", "observation", "environment_version"):
        check(f"reset.{key}", (recorded["reset"] or {}).get(key), (replayed["reset"] or {}).get(key))
    for index, (a, b) in enumerate(zip(recorded["steps"], replayed["steps"], strict=False)):
        for key in ("observation", "tools", "action", "environment", "action_feedback", "protocol_feedback"):
            check(f"steps[{index}].{key}", a.get(key), b.get(key))
    check("number of steps", len(recorded["steps"]), len(replayed["steps"]))
    for index, (a, b) in enumerate(zip(recorded["conversation"], replayed["conversation"], strict=False)):
        check(f"conversation[{index}]", a, b)
    check("number of messages", len(recorded["conversation"]), len(replayed["conversation"]))
    check("final", recorded["final"], replayed["final"])
    return found


def _output(step: JsonDict) -> ModelOutput:
    model = step.get("model") or {}
    error, failure = step.get("protocol_error"), step.get("policy_failure")
    if error or "action" in step:
        # the completion was used or answered: the failure is the runtime's verdict (token limit), not the model's
        failure = None
    return ModelOutput(
        tool_calls=[ToolCall(**call) for call in model.get("tool_calls", [])],
        reasoning=model.get("reasoning"),
        content=model.get("content"),
        finish_reason=model.get("finish_reason"),
        usage=Usage(**model.get("usage", {})),
        response_id=model.get("response_id"),
        latency_ms=model.get("latency_ms", 0.0),
        metadata=model.get("metadata", {}),
        protocol_error=ProtocolError(**error) if error else None,
        policy_failure=PolicyFailure(**failure) if failure else None,
        raw_response=model.get("raw_response"),
    )
