"""slime: requests and samples, both ways, without loss; tokens joined, never made up."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrl.errors import DataError
from rayrl.export.conversation import ConversationOptions
from rayrl.export.slime import (
    assemble_tokens,
    job_from_request,
    record_from_sample,
    redact,
    request_from_job,
    sample_from_record,
    training_from_sample,
)
from rayrl.schemas import EpisodeJob
from rayrl.testing.traces import TraceRecipe, make_record, make_records

EVERYTHING = ConversationOptions(reasoning=True, persona=True, protocol_errors=True)


@dataclass
class Sample:
    """The fields of slime's sample that conversion speaks of, with its dict form."""

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    prompt: Any = ""
    tokens: list = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: Any = None
    loss_mask: list | None = None
    rollout_log_probs: list | None = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict = field(default_factory=dict)

    def to_dict(self):
        return {**self.__dict__, "status": self.status.value}

    @staticmethod
    def from_dict(data):
        return Sample(**{**data, "status": Sample.Status(data["status"])})


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 999), st.integers(0, 2**32 - 1), st.sampled_from(["train", "val"]))
def test_requests_round_trip(task, sample, seed, split):
    job = EpisodeJob(task_id=task, sample_id=sample, seed=seed, split=split)
    request = orjson.loads(orjson.dumps(request_from_job(job, group_index=3, index=9)))
    assert job_from_request(request) == job
    assert job_from_request(Sample.from_dict(request).to_dict()) == job


def test_foreign_samples_are_refused():
    with pytest.raises(DataError, match=r"metadata\.rayrl\.job"):
        job_from_request({"metadata": {}})
    with pytest.raises(DataError, match=r"metadata\.rayrl\.record"):
        record_from_sample({"metadata": {"rayrl": {}}})


@pytest.mark.parametrize("options", [EVERYTHING, ConversationOptions()])
def test_samples_round_trip_through_slime_and_json(options):
    for record in make_records(TraceRecipe(tasks=15, failure_rate=0.3, protocol_error_rate=0.2)):
        sample = sample_from_record(record, options, group_index=1, index=2)
        through = Sample.from_dict(orjson.loads(orjson.dumps(sample))).to_dict()
        assert through == sample
        assert record_from_sample(through) == redact(record, options)
        assert job_from_request(through).model_dump() == record["job"]
    assert redact(record, EVERYTHING) == record


def test_reasoning_and_persona_do_not_travel_by_default():
    record = make_record(TraceRecipe(), 0, 0)
    text = orjson.dumps(sample_from_record(record, ConversationOptions())).decode()
    assert '"reasoning"' not in text
    assert record_from_sample(sample_from_record(record, ConversationOptions()))["reset"]["persona"] == {}
    assert record["reset"]["persona"]  # the input is left alone


def test_status_reward_and_removal():
    recipe = TraceRecipe(tasks=80, failure_rate=0.0)
    seen = set()
    for record in make_records(recipe):
        sample = sample_from_record(record, EVERYTHING)
        cut = record["final"]["termination_reason"] == "generation_length"
        assert sample["status"] == ("truncated" if cut else "completed")
        assert sample["reward"] == record["final"]["reward"]
        assert sample["remove_sample"] is False
        seen.add(sample["status"])
    assert seen == {"truncated", "completed"}
    failed = sample_from_record(make_record(recipe, 0, 0, fail=True), EVERYTHING)
    assert (failed["status"], failed["reward"], failed["remove_sample"]) == ("failed", None, True)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=4), st.lists(st.integers(10, 19), max_size=5)), min_size=1)
)
def test_tokens_of_turns_join_with_a_mask(turns):
    prompt, lines = [1, 2], []
    for index, (glue, completion) in enumerate(turns):
        prompt = [*prompt, *glue]
        lines.append(
            {
                "step": index,
                "prompt_ids": list(prompt),
                "completion_ids": completion,
                "completion_logprobs": [-0.5] * len(completion),
            }
        )
        prompt = [*prompt, *completion]
    found = assemble_tokens(lines[::-1])
    assert found.drift_step is None
    assert found.tokens == prompt
    assert len(found.loss_mask) == len(found.log_probs) == found.response_length
    response = found.tokens[len(found.tokens) - found.response_length :]
    sampled = [t for t, m in zip(response, found.loss_mask, strict=True) if m]
    assert sampled == [t for _, completion in turns for t in completion]
    assert all(p == 0.0 for p, m in zip(found.log_probs, found.loss_mask, strict=True) if not m)


def test_drift_is_said_and_the_sample_removed():
    lines = [
        {"step": 0, "prompt_ids": [1], "completion_ids": [5, 6], "completion_logprobs": [-1.0, -1.0]},
        {"step": 1, "prompt_ids": [1, 5, 7, 2], "completion_ids": [8], "completion_logprobs": [-1.0]},
    ]
    found = assemble_tokens(lines)
    assert (found.drift_step, found.tokens) == (1, [1, 5, 6])
    sample = sample_from_record(make_record(TraceRecipe(), 0, 0), EVERYTHING, training=lines)
    assert sample["remove_sample"] is True
    assert sample["metadata"]["rayrl"]["token_drift_step"] == 1
    assert training_from_sample(sample) == lines
    assert assemble_tokens([{"step": 0}]) is None
    assert assemble_tokens([]) is None
