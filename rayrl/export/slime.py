"""slime rollout requests and samples: pure conversion both ways, in the dict form of slime's ``Sample.to_dict``.

Nothing of slime is imported, so its version does not matter here; only its field names do. What rayrl needs to come
back lies under ``metadata["rayrl"]``: the job for a request, the (redacted) trace record for a sample. Tokens, loss
mask and log-probs come from the server's own numbers (``training.jsonl``) and are never made by re-tokenising text;
where a turn's prompt does not continue the tokens before it, the sample says so and is marked for removal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from rayrl.errors import DataError
from rayrl.export.conversation import ConversationOptions, messages_of, split_prompt, tools_of, without_persona
from rayrl.schemas import EpisodeJob, JsonDict
from rayrl.traces.schema import interned

PENDING, COMPLETED, TRUNCATED, ABORTED, FAILED = "pending", "completed", "truncated", "aborted", "failed"
KEY = "rayrl"


@dataclass(frozen=True)
class TokenAssembly:
    """One token sequence of a whole episode: prompt, then response with a mask (1 = sampled by the policy)."""

    tokens: list[int]
    response_length: int
    loss_mask: list[int]
    log_probs: list[float]
    drift_step: int | None
    """First step whose prompt does not continue the tokens so far; the sequence ends before it. ``None`` = none."""


def assemble_tokens(training: list[JsonDict]) -> TokenAssembly | None:
    """Join the per-step tokens of an episode (lines of ``training.jsonl``, in step order).

    Tokens between two completions (observations, chat-template glue) get mask 0 and log-prob 0. ``None`` when the first
    step has no token ids.
    """
    steps = sorted(training, key=lambda item: int(item.get("step", 0)))
    if not steps or not steps[0].get("prompt_ids") or steps[0].get("completion_ids") is None:
        return None
    prompt: list[int] = list(steps[0]["prompt_ids"])
    response: list[int] = []
    mask: list[int] = []
    log_probs: list[float] = []
    drift = None
    for item in steps:
        ids, completion = item.get("prompt_ids"), item.get("completion_ids")
        so_far = prompt + response
        if not ids or completion is None or ids[: len(so_far)] != so_far:
            drift = int(item.get("step", 0))
            break
        glue = ids[len(so_far) :]
        given = item.get("completion_logprobs") or []
        response += [*glue, *completion]
        mask += [0] * len(glue) + [1] * len(completion)
        log_probs += [0.0] * len(glue) + (given if len(given) == len(completion) else [0.0] * len(completion))
    return TokenAssembly(prompt + response, len(response), mask, log_probs, drift)


def request_from_job(job: EpisodeJob, *, group_index: int | None = None, index: int | None = None) -> JsonDict:
    """A pending sample that asks for one episode. The prompt is made at rollout time, by the environment."""
    return {
        "group_index": job.task_id if group_index is None else group_index,
        "index": index,
        "prompt": [],
        "label": None,
        "status": PENDING,
        "metadata": {KEY: {"job": job.model_dump(), "episode_id": job.episode_id}},
    }


def job_from_request(request: JsonDict) -> EpisodeJob:
    """The job of a request or sample.

    Raises:
        DataError: it was not made by rayrl, or its job is not valid.
    """
    try:
        return EpisodeJob.model_validate(request["metadata"][KEY]["job"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"slime sample without a rayrl job in metadata.{KEY}.job: {error}") from None


def redact(record: JsonDict, options: ConversationOptions) -> JsonDict:
    """The record without reasoning and persona, unless the options keep them; the input is not changed."""
    out = dict(record)
    if not options.reasoning:
        out["steps"] = [_without_reasoning(step) for step in record.get("steps") or []]
    persona = (record.get("reset") or {}).get("persona")
    if persona and not options.persona:
        out["reset"] = {**record["reset"], "persona": {}}
        values = interned(record)
        texts = values.get("texts") or []
        spoken = {m["content_ref"] for m in record["conversation"] if "content_ref" in m and m["role"] in _TOLD}
        cleaned = [without_persona(t, persona) if i in spoken else t for i, t in enumerate(texts)]
        out["interned"] = {**values, "texts": cleaned}
        out["conversation"] = [
            {**m, "content": without_persona(m["content"], persona)}
            if m["role"] in _TOLD and isinstance(m.get("content"), str)
            else m
            for m in record["conversation"]
        ]
    return out


_TOLD = ("system", "user")


def _without_reasoning(step: JsonDict) -> JsonDict:
    model = step.get("model")
    if not isinstance(model, dict):
        return step
    kept = {k: v for k, v in model.items() if k not in ("reasoning", "raw_response")}
    return {**step, "model": kept}


def _status(record: JsonDict) -> str:
    if record.get("status") == "cancelled":
        return ABORTED
    if record.get("status") != "completed":
        return FAILED
    return TRUNCATED if (record.get("final") or {}).get("termination_reason") == "generation_length" else COMPLETED


def sample_from_record(
    record: JsonDict,
    options: ConversationOptions,
    *,
    training: list[JsonDict] | None = None,
    group_index: int | None = None,
    index: int | None = None,
) -> JsonDict:
    """A finished sample, dict form.

    ``reward`` is ``None`` for a failed attempt, which is marked for removal: a technical failure never reaches a loss.
    """
    kept = redact(record, options)
    prompt, completion = split_prompt(messages_of(kept, options))
    job, final = record["job"], record.get("final") or {}
    assembly = assemble_tokens(training or [])
    status = _status(record)
    drift = assembly.drift_step if assembly else None
    ours: JsonDict = {
        "job": {k: job[k] for k in ("task_id", "sample_id", "seed", "split")},
        "episode_id": record["episode_id"],
        "tools": orjson.dumps(tools_of(record)).decode(),
        "record": kept,
    }
    if drift is not None:
        ours["token_drift_step"] = drift
    if training:
        ours["training"] = training
    return {
        "group_index": job["task_id"] if group_index is None else group_index,
        "index": index,
        "prompt": prompt,
        "tokens": assembly.tokens if assembly else [],
        "response": orjson.dumps(completion).decode(),
        "response_length": assembly.response_length if assembly else 0,
        "label": None,
        "reward": final.get("reward") if status in (COMPLETED, TRUNCATED) else None,
        "loss_mask": assembly.loss_mask if assembly else None,
        "rollout_log_probs": assembly.log_probs if assembly else None,
        "remove_sample": status in (FAILED, ABORTED) or drift is not None,
        "status": status,
        "metadata": {KEY: ours},
    }


def record_from_sample(sample: JsonDict) -> JsonDict:
    """The trace record of a sample; equals the record it was made from, after :func:`redact`.

    Raises:
        DataError: it was not made by rayrl.
    """
    try:
        record: JsonDict = sample["metadata"][KEY]["record"]
    except (KeyError, TypeError):
        raise DataError(f"slime sample without a trace in metadata.{KEY}.record") from None
    return record


def training_from_sample(sample: JsonDict) -> list[JsonDict] | None:
    """The per-step token lines a sample was made from, or ``None``."""
    found: Any = (sample.get("metadata") or {}).get(KEY, {}).get("training")
    return found if isinstance(found, list) else None
