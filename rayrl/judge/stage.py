"""The judge stage: transcript in, raw output and parsed scores out; batched, resumable, never touching the agent loop.

Invariants:

* a judge sees the public transcript only: no private goal, no reasoning, no persona unless asked, no reward;
* the raw output is kept; a score that is missing, out of range or of another type stays missing (null) and is counted,
  it never becomes a middle value;
* an output belongs to (episode record, rubric hash, judge identity); a resume skips exactly those that exist with a
  parsed output or a recorded refusal, and tries failed calls again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any

import orjson

from rayrl.errors import EpisodeError
from rayrl.export.conversation import ConversationOptions, messages_of
from rayrl.judge.bounded import bounded
from rayrl.judge.rubric import TOOL_NAME, Rubric
from rayrl.models.base import ChatModel
from rayrl.schemas import JsonDict, ModelOutput, canonical_json, sha256_hex, step_seed

JUDGE_SCHEMA = "rayrl-judge-v1"


@dataclass(frozen=True)
class JudgeJob:
    """One episode to judge."""

    run: str
    episode_id: str
    attempt: int
    job: JsonDict
    messages: list[JsonDict]
    input_sha256: str


def transcript(record: JsonDict, options: ConversationOptions, max_chars: int) -> str:
    """The conversation as text, one block per message; beyond ``max_chars`` the middle is cut and says so."""
    blocks = []
    for message in messages_of(record, options):
        text = str(message.get("content") or "").strip()
        calls = [
            f"-> {call['function']['name']}({call['function']['arguments']})"
            for call in message.get("tool_calls") or []
        ]
        blocks.append(f"[{message['role']}] " + "\n".join([text, *calls]).strip())
    termination = (record.get("final") or {}).get("termination_reason")
    blocks.append(f"[end] the episode ended with: {termination}")
    whole = "\n\n".join(blocks)
    if len(whole) <= max_chars:
        return whole
    half = max_chars // 2
    return f"{whole[:half]}\n\n[... {len(whole) - 2 * half} characters cut ...]\n\n{whole[-half:]}"


def judge_job(record: JsonDict, rubric: Rubric, *, run: str, options: ConversationOptions | None = None) -> JudgeJob:
    """What the judge is asked about a complete record."""
    text = transcript(record, options or ConversationOptions(), rubric.max_chars)
    messages: list[JsonDict] = [
        {"role": "system", "content": rubric.instructions.strip()},
        {"role": "user", "content": f"Transcript:\n\n{text}\n\nCall {TOOL_NAME} now."},
    ]
    return JudgeJob(
        run=run,
        episode_id=record["episode_id"],
        attempt=record.get("attempt") or 1,
        job=dict(record.get("job") or {}),
        messages=messages,
        input_sha256=sha256_hex(canonical_json(messages)),
    )


def parse_scores(output: ModelOutput, rubric: Rubric) -> tuple[dict[str, int | None], str | None, list[str]]:
    """``(scores, rationale, problems)`` of a completion. Every criterion has a key; what is unusable is ``None``."""
    scores: dict[str, int | None] = {c.id: None for c in rubric.criteria}
    if output.protocol_error is not None:
        return scores, None, [f"protocol:{output.protocol_error.code}"]
    if output.policy_failure is not None:
        return scores, None, [f"failure:{output.policy_failure.code}"]
    if len(output.tool_calls) != 1 or output.tool_calls[0].name != TOOL_NAME:
        return scores, None, ["no_scores_call"]
    arguments = output.tool_calls[0].arguments
    problems = []
    for criterion in rubric.criteria:
        value = arguments.get(criterion.id)
        if value is None:
            problems.append(f"missing:{criterion.id}")
        elif isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
            problems.append(f"not_an_integer:{criterion.id}")
        elif not criterion.minimum <= value <= criterion.maximum:
            problems.append(f"out_of_range:{criterion.id}")
        else:
            scores[criterion.id] = int(value)
    rationale = arguments.get("rationale")
    return scores, rationale if isinstance(rationale, str) else None, problems


def output_key(item: JsonDict) -> tuple[str, ...]:
    """What makes a judge output this output; see the module docstring."""
    names = ("run", "episode_id", "attempt", "input_sha256", "rubric_sha256", "judge_sha256")
    return tuple(str(item.get(name)) for name in names)


class Judge:
    """Judges jobs concurrently with one model."""

    def __init__(self, model: ChatModel, rubric: Rubric, *, concurrency: int = 8, seed: int = 0) -> None:
        self.model = model
        self.rubric = rubric
        self.identity = model.identity()
        self.judge_sha256 = sha256_hex(canonical_json(self.identity))
        self._concurrency = max(1, concurrency)
        self._seed = seed

    def head(self, job: JudgeJob) -> JsonDict:
        """The identifying part of a job's output."""
        return {
            "schema": JUDGE_SCHEMA,
            "run": job.run,
            "episode_id": job.episode_id,
            "attempt": job.attempt,
            "job": job.job,
            "rubric": {"name": self.rubric.name, "version": self.rubric.version},
            "rubric_sha256": self.rubric.sha256(),
            "judge": self.identity,
            "judge_sha256": self.judge_sha256,
            "input_sha256": job.input_sha256,
        }

    async def judge(self, job: JudgeJob) -> JsonDict:
        """One line of ``judge_outputs.jsonl``; a transport failure is recorded as ``status: failed``."""
        head = self.head(job)
        seed = step_seed(self._seed, int(job.input_sha256[:8], 16))
        try:
            output = await self.model.generate(job.messages, [self.rubric.tool()], seed=seed)
        except EpisodeError as error:
            failure = {"code": error.code, "message": str(error), "class": error.blame.value}
            return {**head, "status": "failed", "error": failure, "scores": None}
        scores, rationale, problems = parse_scores(output, self.rubric)
        raw = output.model_dump(mode="json", exclude={"tokens"}, exclude_none=True)
        return {**head, "status": "judged", "scores": scores, "rationale": rationale, "problems": problems, "raw": raw}

    async def run(self, jobs: Iterable[JudgeJob]) -> AsyncIterator[JsonDict]:
        """Outputs as they come, at most ``concurrency`` calls at a time; jobs are taken lazily."""
        async for output in bounded(jobs, self.judge, concurrency=self._concurrency):
            yield output


def finished_keys(lines: Iterable[bytes]) -> set[tuple[str, ...]]:
    """Keys of the outputs that need not be made again; torn lines are ignored."""
    keys = set()
    for line in lines:
        try:
            item: Any = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(item, dict) and item.get("schema") == JUDGE_SCHEMA and item.get("status") == "judged":
            keys.add(output_key(item))
    return keys
