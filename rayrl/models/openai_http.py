"""A ChatModel over any OpenAI-compatible HTTP endpoint (OpenAI, vLLM, SGLang, llama.cpp, SiliconFlow, ...).

Invariants:

* this is the only retry layer: at most ``retries.max_attempts`` requests and ``timeouts.total_s`` seconds a completion;
* an HTTP 200 is never asked for again, whatever is in it; :mod:`rayrl.models.completion` judges it;
* every wait has an end; a ``Retry-After`` beyond that end fails at once instead of waiting in vain;
* no exception carries a request, a header or the key, not even in its chain.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import orjson

from rayrl.errors import ConfigError, ContextOverflowError, ModelTransportError
from rayrl.models.completion import Rules, read_completion, unreadable
from rayrl.models.config import ModelConfig
from rayrl.models.context import is_context_error, prompt_floor
from rayrl.models.http_transport import ApiKey, Endpoint, Fault, Reply, send_once
from rayrl.models.json_schema import render_messages, response_format
from rayrl.models.limiter import Limiter, LimiterTimeoutError, limiter_for
from rayrl.models.retry import RETRY_STATUSES, THROTTLE_STATUSES, backoff_s
from rayrl.schemas import ModelOutput

EventSink = Callable[[str, dict[str, Any]], None]
"""Receives ``(kind, facts)`` of noteworthy happenings: ``model_retry``, ``model_throttled``."""

_EXCERPT = 500


class OpenAIChatModel:
    """See the module docstring. One instance, one connection pool, shared by all episodes of an actor."""

    def __init__(
        self, config: ModelConfig, *, identity: dict[str, Any] | None = None, on_event: EventSink | None = None
    ) -> None:
        if config.base_url is None:
            raise ConfigError("model.base_url is required for an HTTP endpoint")
        self._config = config
        self._identity = identity if identity is not None else config.semantic()
        self._on_event = on_event
        self._key = ApiKey.from_env(config.api_key_env)
        self._template = _static_fields(config)
        self._rules = Rules(
            json_schema=config.tool_protocol == "json_schema", allow_text_beside_call=config.allow_text_beside_call
        )
        self._endpoint: Endpoint | None = None
        self._limiter: Limiter | None = None
        self._closed = False
        self._counts: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"OpenAIChatModel({self._config.name!r} at {self._config.base_url})"

    def identity(self) -> dict[str, Any]:
        """What makes this model this model."""
        return dict(self._identity)

    def stats(self) -> dict[str, float]:
        """Counters since the start (requests, retries, completions, tokens) and the limiter's gauge."""
        gauge = self._limiter.gauge() if self._limiter is not None else {}
        return {**{k: float(v) for k, v in self._counts.items()}, **{f"limiter_{k}": v for k, v in gauge.items()}}

    async def generate(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], *, seed: int) -> ModelOutput:
        """One completion; see :class:`~rayrl.models.base.ChatModel` for what is returned and what is raised."""
        body, prompt_bytes = self._body(messages, tools, seed)
        limit = self._config.context_limit
        if limit is not None and (floor := prompt_floor(prompt_bytes)) >= limit:
            raise ContextOverflowError(
                f"the conversation has at least {floor} tokens, the model's context {limit}",
                code="context_overflow",
                stage="model",
                detail={"known_beforehand": True, "tokens_at_least": floor, "context_limit": limit},
            )
        endpoint, limiter = self._open()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._config.timeouts.queue_s
        trail: list[str] = []
        begin: float | None = None
        while True:
            await self._acquire(limiter, deadline, trail)
            started = loop.time()
            if begin is None:
                begin, deadline = started, started + self._config.timeouts.total_s
            outcome: Reply | Fault | None = None
            try:
                self._counts["requests"] += 1
                until = min(deadline, started + self._config.timeouts.attempt_s)
                outcome = await send_once(endpoint, body, self._key, until)
                if isinstance(outcome, Reply) and outcome.status in THROTTLE_STATUSES:
                    self._throttled(limiter, outcome)
            finally:
                limiter.release(success=isinstance(outcome, Reply) and outcome.status < 300)
            ended = loop.time()
            if isinstance(outcome, Reply) and outcome.status < 300:
                metadata: dict[str, Any] = {"attempts": len(trail) + 1}
                if trail:
                    metadata |= {"retried": trail, "total_ms": round((ended - begin) * 1000, 1)}
                return self._judge(outcome, tools, seed, round((ended - started) * 1000, 3), metadata)
            trail.append(_label(outcome))
            wait = self._next_wait(outcome, trail, seed, remaining=deadline - ended)
            self._counts["retries"] += 1
            self._emit(
                "model_retry", {"attempt": len(trail), "outcome": trail[-1], "wait_s": round(wait, 3), "seed": seed}
            )
            await asyncio.sleep(wait)

    async def aclose(self) -> None:
        """Close the connections. Idempotent."""
        self._closed = True
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            await endpoint.aclose()

    def _open(self) -> tuple[Endpoint, Limiter]:
        if self._closed:
            raise RuntimeError("this model is closed")
        if self._endpoint is None or self._limiter is None:
            self._endpoint = Endpoint(self._config, self._key)
            self._limiter = limiter_for(str(self._config.base_url), self._config.max_concurrency)
        return self._endpoint, self._limiter

    def _body(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], seed: int) -> tuple[bytes, int]:
        """The request, and how many bytes of it surely reach the model as prompt."""
        payload = dict(self._template)
        if self._rules.json_schema:
            payload["messages"] = render_messages(messages, tools)
            if tools:
                payload["response_format"] = response_format(tools, self._config.json_schema_max_string)
        else:
            payload["messages"] = messages
            if tools:
                payload["tools"] = tools
                if self._config.tool_choice != "omit":
                    payload["tool_choice"] = self._config.tool_choice
                if self._config.parallel_tool_calls is not None:
                    payload["parallel_tool_calls"] = self._config.parallel_tool_calls
        if self._config.send_seed:
            payload["seed"] = seed
        body = _dumps(payload)
        # a response schema steers the decoder and is no part of the prompt; native tools are
        schema = payload.get("response_format")
        return body, len(body) - (len(_dumps(schema)) if schema is not None else 0)

    async def _acquire(self, limiter: Limiter, deadline: float, trail: list[str]) -> None:
        try:
            await limiter.acquire(deadline)
            return
        except LimiterTimeoutError:
            pass
        raise ModelTransportError(
            "no turn at the model endpoint within the time allowed (too many calls, or it asked to come back later)",
            code="queue_timeout",
            stage="model",
            detail={"attempts": len(trail), "trail": trail},
        )

    def _throttled(self, limiter: Limiter, reply: Reply) -> None:
        self._counts["throttled"] += 1
        if limiter.throttle(reply.retry_after_s):
            facts = {"status": reply.status, "limit": limiter.state.limit, "retry_after_s": reply.retry_after_s}
            self._emit("model_throttled", facts)

    def _judge(
        self, reply: Reply, tools: list[dict[str, Any]], seed: int, latency_ms: float, metadata: dict[str, Any]
    ) -> ModelOutput:
        if reply.broken is not None:
            self._counts["protocol_errors"] += 1
            reason = f"HTTP {reply.status}, then the body broke off: {reply.broken}"
            return unreadable(reply.body, reason, latency_ms, metadata)
        output = read_completion(reply.body, tools, self._rules, seed=seed, latency_ms=latency_ms, metadata=metadata)
        counts = self._counts
        counts["completions"] += 1
        counts["protocol_errors"] += output.protocol_error is not None
        counts["prompt_tokens"] += output.usage.prompt_tokens or 0
        counts["completion_tokens"] += output.usage.completion_tokens or 0
        return output

    def _next_wait(self, outcome: Reply | Fault, trail: list[str], seed: int, *, remaining: float) -> float:
        """Seconds until the next attempt.

        Raises:
            ModelTransportError: the outcome is not retryable, or attempts or time are spent.
            ContextOverflowError: the server says that the conversation is too long.
        """
        detail: dict[str, Any] = {"attempts": len(trail), "trail": trail}
        retry_after: float | None = None
        if isinstance(outcome, Reply):
            excerpt = outcome.body[:4000].decode("utf-8", "replace")
            if is_context_error(excerpt):
                raise ContextOverflowError(
                    f"HTTP {outcome.status}: {excerpt[:_EXCERPT]}",
                    code="context_overflow",
                    stage="model",
                    detail={"status": outcome.status, **detail},
                )
            detail |= {"status": outcome.status, "body": excerpt[:_EXCERPT]}
            what = f"HTTP {outcome.status}: {' '.join(excerpt.split())[:_EXCERPT]}"
            retryable, code, retry_after = outcome.status in RETRY_STATUSES, "http_status", outcome.retry_after_s
        else:
            what, retryable, code = outcome.message, outcome.retryable, outcome.code
        retries = self._config.retries
        if not retryable:
            raise ModelTransportError(f"the model endpoint failed: {what}", code=code, stage="model", detail=detail)
        wait = backoff_s(len(trail), seed=seed, initial_s=retries.backoff_initial_s, max_s=retries.backoff_max_s)
        wait = max(wait, retry_after or 0.0)
        if len(trail) >= retries.max_attempts or wait >= remaining:
            spent = "attempts" if len(trail) >= retries.max_attempts else "time"
            raise ModelTransportError(
                f"the model endpoint failed {len(trail)} times, {spent} spent; last: {what}",
                code="retries_exhausted",
                stage="model",
                detail={**detail, "last": code, "spent": spent, "retry_after_s": retry_after},
            )
        return wait

    def _emit(self, kind: str, facts: dict[str, Any]) -> None:
        if self._on_event is not None:
            self._on_event(kind, {"at": time.time(), **facts})


def _static_fields(config: ModelConfig) -> dict[str, Any]:
    """The request fields that never change; what is null is left to the server."""
    fields: dict[str, Any] = {
        "model": config.name,
        "messages": [],
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        config.max_tokens_field: config.max_tokens,
        "logprobs": True if config.logprobs else None,
        "return_token_ids": True if config.token_ids else None,
    }
    return {**{key: value for key, value in fields.items() if value is not None}, **config.extra_body}


def _dumps(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # lone surrogates from a broken page
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _label(outcome: Reply | Fault) -> str:
    return str(outcome.status) if isinstance(outcome, Reply) else outcome.code
