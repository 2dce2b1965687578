"""AgentRuntime: the state machine of ONE episode, holding ONE environment lease.

Invariants:

* ``run`` always returns exactly one terminal record (completed, failed or cancelled) and never raises, so that the
  ledger of the pool can close;
* the lease is closed on every exit path, cancellation included; a failed release is recorded in the episode;
* the environment alone decides about ``done`` and reward; the runtime adds no reward, no finish action;
* a completion that breaks the protocol costs one action and never touches the environment; a completion cut by length
  is never executed; HTTP 200 is never sampled again;
* nothing private enters the record: it is returned beside it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

import orjson
from pydantic import Field

from rayrl.config import Section, operational
from rayrl.environments.base import Environment, EnvironmentFactory
from rayrl.errors import (
    Blame,
    ContextOverflowError,
    DeadlineExceededError,
    EnvironmentFaultError,
    EpisodeError,
)
from rayrl.models.base import ChatModel
from rayrl.prompts import PromptBuilder
from rayrl.runtime_checks import describe_error, of_type, one_call, step_result
from rayrl.schemas import (
    EPISODE_SCHEMA,
    EpisodeJob,
    JsonDict,
    ModelOutput,
    PolicyFailure,
    ProtocolError,
    PublicContext,
    ResetResult,
    Skill,
    StepResult,
    ToolCall,
    step_seed,
)
from rayrl.skills.base import SkillProvider
from rayrl.traces.schema import Interner, Status

CLOSE_TIMEOUT_S = 15.0


class RuntimeConfig(Section):
    """Limits of one episode."""

    max_actions: int = Field(30, ge=1)
    """Completions per episode, protocol errors included; the episode is then ended with ``action_limit``."""
    max_episode_tokens: int | None = Field(None, ge=1)
    """Prompt + completion tokens per episode as the server counts them; ended with ``generation_length`` beyond."""
    deadline_s: float = operational(900.0, gt=0)
    """Wall-clock limit of an attempt; past it the attempt is an infrastructure failure, unscored, and run again."""


@dataclass
class Progress:
    """Where an episode is now; read by the watchdog to name what hangs."""

    episode_id: str
    stage: str = "start"
    step: int = 0
    request: str = ""
    since: float = field(default_factory=time.monotonic)

    def enter(self, stage: str, step: int = 0, request: str = "") -> None:
        """Note that the episode entered ``stage``."""
        self.stage, self.step, self.request, self.since = stage, step, request, time.monotonic()


@dataclass(frozen=True)
class EpisodeOutcome:
    """What an attempt leaves behind."""

    record: JsonDict
    """The trace record, see :mod:`rayrl.traces.schema`."""
    private: JsonDict | None
    """The private goal, for ``private.jsonl``; ``None`` when the environment gave none."""
    training: list[JsonDict] | None
    """Token ids and log-probs per step, for ``training.jsonl``; ``None`` when the server returned none."""


class AgentRuntime:
    """Runs episodes one at a time per call; a single instance may run many concurrently (all state is per call)."""

    def __init__(
        self,
        *,
        model: ChatModel,
        environments: EnvironmentFactory,
        skills: SkillProvider,
        prompts: PromptBuilder,
        config: RuntimeConfig,
        provenance: JsonDict,
    ) -> None:
        self.model = model
        self.environments = environments
        self.skills = skills
        self.prompts = prompts
        self.config = config
        self.provenance = provenance

    async def run(
        self, job: EpisodeJob, *, attempt: int = 1, on_step: Callable[[Progress], None] | None = None
    ) -> EpisodeOutcome:
        """One attempt at ``job``. Cancelling the calling task yields a ``cancelled`` record instead of an exception."""
        episode = _Episode(self, job, attempt, on_step or (lambda _: None))
        status: Status = "completed"
        error: JsonDict | None = None
        try:
            limit = asyncio.timeout(self.config.deadline_s)
            try:
                async with limit:
                    await episode.play()
            except TimeoutError as timeout:
                if not limit.expired():
                    raise  # a time-out of the environment's or model's own, not ours
                raise DeadlineExceededError(
                    f"no result after {self.config.deadline_s:g} s; was in stage {episode.progress.stage!r}",
                    code="deadline",
                    stage=episode.progress.stage,
                    detail={"step": episode.progress.step, "request": episode.progress.request},
                ) from timeout
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
            status = "cancelled"
            error = {
                "class": Blame.INFRASTRUCTURE.value,
                "code": "cancelled",
                "stage": episode.progress.stage,
                "type": "CancelledError",
                "message": f"cancelled in stage {episode.progress.stage!r}",
            }
        except Exception as failure:
            status = "failed"
            error = describe_error(failure, stage=episode.progress.stage)
        cleanup = await episode.close()
        if cleanup:
            error = {**error, "cleanup_errors": cleanup} if error else None
        try:
            return episode.outcome(status, error, cleanup)
        except Exception as failure:
            # something the episode holds has no JSON form; what it was is said, the rest of it cannot be kept
            return episode.without_content(describe_error(failure, stage="record"), cleanup)


class _Episode:
    """State of one attempt."""

    def __init__(
        self, runtime: AgentRuntime, job: EpisodeJob, attempt: int, on_step: Callable[[Progress], None]
    ) -> None:
        self.runtime = runtime
        self.job = job
        self.attempt = attempt
        self.on_step = on_step
        self.progress = Progress(job.episode_id)
        self.intern = Interner()
        self.environment: Environment | None = None
        self.reset: ResetResult | None = None
        self.selected: list[Skill] = []
        self.conversation: list[JsonDict] = []
        self.steps: list[JsonDict] = []
        self.training: list[JsonDict] = []
        self.final: StepResult | None = None
        self.private: JsonDict | None = None
        self.usage = {"prompt_tokens": 0, "completion_tokens": 0, "model_calls": 0}
        self.started_at = datetime.now(UTC)
        self.clock = time.monotonic()

    async def play(self) -> None:
        """Reset, then act until the environment says done."""
        rt, job = self.runtime, self.job
        self._enter("reset")
        self.environment = rt.environments.open()
        self.reset = of_type(await self.environment.reset(job), ResetResult, "reset")
        self._keep_private(self.reset.private)
        observation = self.reset.observation
        self._enter("select_skills")
        selected = await rt.skills.select(
            PublicContext(
                job=job,
                instruction=self.reset.instruction,
                persona=self.reset.persona,
                observation_state=observation.state,
            )
        )
        if not isinstance(selected, list) or not all(isinstance(skill, Skill) for skill in selected):
            raise EpisodeError("select() did not return a list of Skill", code="skills_protocol", stage="select_skills")
        self.selected = selected
        self.conversation = rt.prompts.start(
            instruction=self.reset.instruction,
            persona=self.reset.persona,
            observation=observation,
            skills=self.selected,
            max_actions=rt.config.max_actions,
        )
        for index in range(rt.config.max_actions):
            seed = step_seed(job.seed, index)
            step: JsonDict = {
                "index": index,
                "seed": seed,
                "observation": self.intern.observation(observation),
                "tools": self.intern.toolset(observation.tools),
            }
            self._enter("model", index, f"completion {index + 1}")
            try:
                messages = rt.prompts.visible(self.conversation)
                output = await rt.model.generate(messages, observation.tools, seed=seed)
            except ContextOverflowError as overflow:
                failure = PolicyFailure(code="context_overflow", message=str(overflow))
                output = ModelOutput(policy_failure=failure)
            output = one_call(output, observation.tools)
            self._record_output(step, output)
            self.steps.append(step)
            if output.policy_failure is not None:
                step["policy_failure"] = output.policy_failure.model_dump()
                await self._terminate("generation_length", index)
                return
            if output.protocol_error is not None:
                self._protocol_error(step, output, output.protocol_error, observation.tools)
            else:
                call = output.tool_calls[0]
                self._enter("step", index, call.name)
                result = step_result(await self.environment.step(call, seed=seed), "step")
                self._acted(step, output, call, result)
                observation = result.observation
                if result.done:
                    self.final = result
                    return
            if self._over_budget():
                message = f"more than {rt.config.max_episode_tokens} tokens in this episode"
                step["policy_failure"] = {"code": "generation_length", "message": message}
                await self._terminate("generation_length", index)
                return
        await self._terminate("action_limit", rt.config.max_actions - 1)

    async def close(self) -> list[JsonDict]:
        """Release the lease whatever happened; returns what went wrong while doing so."""
        if self.environment is None:
            return []
        self._enter("close", self.progress.step)
        try:
            await asyncio.wait_for(asyncio.shield(self.environment.close()), CLOSE_TIMEOUT_S)
        except (Exception, asyncio.CancelledError) as failure:
            return [{"type": type(failure).__name__, "message": str(failure) or "the release did not end in time"}]
        return []

    def outcome(self, status: Status, error: JsonDict | None, cleanup: list[JsonDict]) -> EpisodeOutcome:
        """The record of this attempt."""
        final = None
        if status == "completed" and self.final is not None:
            final = {
                "done": self.final.done,
                "reward": self.final.reward,
                "reward_detail": self.final.reward_detail,
                "purchase": self.final.purchase,
                "termination_reason": self.final.termination_reason,
            }
        reset = None
        if self.reset is not None:
            reset = {
                "instruction": self.reset.instruction,
                "persona": self.reset.persona,
                "environment_version": self.reset.environment_version,
                "public": self.reset.public,
                "observation": self.intern.observation(self.reset.observation),
            }
        conversation = [self.intern.message(message) for message in self.conversation]
        record: JsonDict = {
            "schema": EPISODE_SCHEMA,
            "episode_id": self.job.episode_id,
            "attempt": self.attempt,
            "status": status,
            "job": self.job.model_dump(),
            "provenance": self.runtime.provenance,
            "started_at": self.started_at.isoformat(),
            "ended_at": datetime.now(UTC).isoformat(),
            "duration_s": round(time.monotonic() - self.clock, 6),
            "reset": reset,
            "selected_skills": [
                {**skill.model_dump(), "content_sha256": skill.content_sha256} for skill in self.selected
            ],
            "conversation": conversation,
            "steps": self.steps,
            "final": final,
            "error": error,
            "usage": self.usage,
            "interned": self.intern.dump(),
        }
        if cleanup and error is None:
            record["cleanup_errors"] = cleanup
        training = None
        if self.training:
            training = [
                {"episode_id": self.job.episode_id, "attempt": self.attempt, **tokens} for tokens in self.training
            ]
        return EpisodeOutcome(record=record, private=self._private_line(), training=training)

    def without_content(self, error: JsonDict, cleanup: list[JsonDict]) -> EpisodeOutcome:
        """A failed record that says only that there was an episode, and why nothing of it could be kept."""
        self.reset, self.selected, self.conversation, self.steps, self.training = None, [], [], [], []
        self.intern = Interner()
        return self.outcome("failed", {**error, "cleanup_errors": cleanup} if cleanup else error, cleanup)

    def _private_line(self) -> JsonDict | None:
        if self.private is None:
            return None
        # an environment that keeps more than the goal private says {"goal": ..., more}; else all of it is the goal
        goal = self.private.get("goal", self.private)
        return {"episode_id": self.job.episode_id, "attempt": self.attempt, "goal": goal}

    async def _terminate(self, reason: str, index: int) -> None:
        self._enter("terminate", index, reason)
        if self.environment is None:  # play() opened it; kept for the type checker and for readers
            raise EnvironmentFaultError("terminate without an environment", code="no_environment", stage="terminate")
        result = step_result(await self.environment.terminate(reason), "terminate")
        if not result.done:
            raise EnvironmentFaultError(
                f"the environment did not end the episode on terminate({reason!r})",
                code="terminate_ignored",
                stage="terminate",
            )
        self._keep_private(result.private)
        self.final = result

    def _record_output(self, step: JsonDict, output: ModelOutput) -> None:
        self.usage["model_calls"] += 1
        self.usage["prompt_tokens"] += output.usage.prompt_tokens or 0
        self.usage["completion_tokens"] += output.usage.completion_tokens or 0
        model = {
            "tool_calls": [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in output.tool_calls],
            "reasoning": output.reasoning,
            "content": output.content,
            "finish_reason": output.finish_reason,
            "usage": {k: v for k, v in output.usage.model_dump().items() if v is not None},
            "response_id": output.response_id,
            "latency_ms": round(output.latency_ms, 3),
            "metadata": output.metadata,
            "raw_response": output.raw_response,
        }
        step["model"] = {key: value for key, value in model.items() if value not in (None, {}, [])}
        if output.tokens is not None:
            self.training.append({"step": step["index"], **output.tokens.model_dump(exclude_none=True)})

    def _protocol_error(self, step: JsonDict, output: ModelOutput, error: ProtocolError, tools: list[JsonDict]) -> None:
        feedback = self.runtime.prompts.protocol_feedback(error, tools)
        step["protocol_error"] = error.model_dump()
        step["protocol_feedback"] = feedback
        # the broken completion goes back as text: replaying malformed tool calls would make the next request invalid
        said = output.content or ""
        if not said and output.raw_response is not None:
            said = orjson.dumps(output.raw_response).decode()[:2000]
        self.conversation.append({"role": "assistant", "content": said})
        self.conversation.append({"role": "user", "content": feedback})

    def _acted(self, step: JsonDict, output: ModelOutput, call: ToolCall, result: StepResult) -> None:
        step["action"] = result.action
        environment: JsonDict = {
            "observation": self.intern.observation(result.observation),
            "done": result.done,
            "reward": result.reward,
        }
        for key, value in (
            ("reward_detail", result.reward_detail),
            ("purchase", result.purchase),
            ("termination_reason", result.termination_reason),
            ("public", result.public),
        ):
            if value:
                environment[key] = value
        step["environment"] = environment
        step["action_feedback"] = result.feedback
        self._keep_private(result.private)
        self.conversation.append(
            {
                "role": "assistant",
                "content": output.content or "",
                "tool_calls": [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {"name": call.name, "arguments": orjson.dumps(call.arguments).decode()},
                    }
                ],
            }
        )
        self.conversation.append({"role": "tool", "tool_call_id": call.id, "content": result.observation.text})

    def _over_budget(self) -> bool:
        limit = self.runtime.config.max_episode_tokens
        return limit is not None and self.usage["prompt_tokens"] + self.usage["completion_tokens"] > limit

    def _keep_private(self, private: JsonDict | None) -> None:
        if private is not None:
            self.private = private

    def _enter(self, stage: str, step: int = 0, request: str = "") -> None:
        self.progress.enter(stage, step, request)
        self.on_step(self.progress)
