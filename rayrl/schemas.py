"""What crosses a disk or a wire: frozen, versioned pydantic models and the pure functions that make their ids.

Invariants:

* ids and seeds are pure functions of their inputs; they never depend on worker count, order, time or restarts;
* unknown fields are refused when rayrl *writes* (a typo is a bug); readers of foreign files convert first;
* nothing here does I/O.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

EPISODE_SCHEMA = "rayrl-episode-v1"
MANIFEST_SCHEMA = "rayrl-manifest-v1"

JsonDict = dict[str, Any]


class Frozen(BaseModel):
    """Base of all records: immutable, no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def canonical_json(value: Any) -> bytes:
    """The one canonical form that is hashed: sorted keys, compact separators, non-ASCII kept, UTF-8.

    Raises:
        ValueError: for NaN or infinity, which have no JSON form.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def sha256_hex(data: bytes | str) -> str:
    """Lower-case hex SHA-256; text is hashed as UTF-8."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def episode_seed(experiment_seed: int, task_id: int, sample_id: int) -> int:
    """Seed of one episode: first 4 bytes, big-endian, of SHA-256 of ``"{experiment_seed}:{task_id}:{sample_id}"``."""
    digest = hashlib.sha256(f"{experiment_seed}:{task_id}:{sample_id}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


def step_seed(job_seed: int, step: int) -> int:
    """Seed of one model call or environment step; a hash, since ``seed + step`` makes neighbouring jobs collide."""
    digest = hashlib.sha256(f"step:{job_seed}:{step}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


def episode_id(task_id: int, sample_id: int) -> str:
    """``task-000012__sample-003``: stable across resumes and checkpoints."""
    return f"task-{task_id:06d}__sample-{sample_id:03d}"


class EpisodeJob(Frozen):
    """One episode to run. ``sample_id`` counts independent samples of one task and is never random."""

    task_id: int = Field(ge=0)
    sample_id: int = Field(ge=0)
    seed: int = Field(ge=0)
    split: str

    @property
    def episode_id(self) -> str:
        """See :func:`episode_id`."""
        return episode_id(self.task_id, self.sample_id)


class ToolCall(Frozen):
    """One function call of the model, arguments already parsed."""

    id: str
    name: str
    arguments: JsonDict


class Usage(Frozen):
    """Token counts as the server reported them; ``None`` where it did not."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None

    @property
    def total(self) -> int:
        """Prompt plus completion tokens, unknown counted as 0."""
        return (self.prompt_tokens or 0) + (self.completion_tokens or 0)


class ProtocolError(Frozen):
    """A completion that breaks the one-call rule.

    Codes: ``no_tool_call``, ``multiple_tool_calls``, ``unknown_tool``, ``invalid_arguments_json``,
    ``invalid_arguments``, ``text_beside_call``, ``no_choices``, ``invalid_body``.
    """

    code: str
    message: str


class PolicyFailure(Frozen):
    """The model's own doing ended the episode: ``generation_length`` or ``context_overflow``. Scored zero."""

    code: Literal["generation_length", "context_overflow"]
    message: str


class TokenTrace(Frozen):
    """Token ids and log-probs exactly as the server returned them (never re-tokenised); training data only."""

    prompt_ids: list[int] | None = None
    completion_ids: list[int] | None = None
    completion_logprobs: list[float] | None = None


class ModelOutput(Frozen):
    """One completion, normalised. Exactly one of a single tool call, ``protocol_error`` or ``policy_failure`` holds."""

    tool_calls: list[ToolCall] = []
    reasoning: str | None = None
    content: str | None = None
    finish_reason: str | None = None
    usage: Usage = Usage()
    response_id: str | None = None
    latency_ms: float = 0.0
    metadata: JsonDict = {}
    protocol_error: ProtocolError | None = None
    policy_failure: PolicyFailure | None = None
    raw_response: JsonDict | None = None
    """The raw message, kept only where normalisation lost something (a protocol error or policy failure)."""
    tokens: TokenTrace | None = None


class Observation(Frozen):
    """What the policy may see of the environment now.

    ``text`` is what enters the conversation; ``state`` is its structured form (``observation_state`` for the shop);
    ``tools`` are the OpenAI function tools that are legal on this page.
    """

    text: str
    state: JsonDict
    version: str
    tools: list[JsonDict]


class ResetResult(Frozen):
    """The public start of an episode. ``private`` never enters the conversation or the trace."""

    instruction: str
    observation: Observation
    persona: JsonDict = {}
    environment_version: str
    public: JsonDict = {}
    """Further public facts worth recording (task mode, interaction mode, ...). No lease ids."""
    private: JsonDict | None = None


class StepResult(Frozen):
    """The environment's answer to one action, or to ``terminate``."""

    action: str
    """Canonical action text that was sent; for terminate the reason."""
    observation: Observation
    done: bool
    reward: float
    reward_detail: JsonDict = {}
    purchase: JsonDict = {}
    feedback: JsonDict = {}
    """``action_feedback``: {action, valid, reason, message}."""
    termination_reason: str | None = None
    public: JsonDict = {}
    private: JsonDict | None = None
    """The private goal where the server sends it; goes to private.jsonl only."""


class Skill(Frozen):
    """Procedural knowledge put into the prompt."""

    skill_id: str
    version: str = "1"
    content: str
    metadata: JsonDict = {}

    @property
    def content_sha256(self) -> str:
        """Hash of the content as UTF-8."""
        return sha256_hex(self.content)


class PublicContext(Frozen):
    """All a skill provider may look at. The private goal is not in it, by type."""

    job: EpisodeJob
    instruction: str
    persona: JsonDict
    observation_state: JsonDict
