"""Replay feeds the recorded completions back: no difference against the same environment, each change is found."""

from __future__ import annotations

import copy

import orjson
import pytest

from rayrl.errors import ContextOverflowError, DataError
from rayrl.prompts import PromptBuilder, PromptConfig
from rayrl.runtime import RuntimeConfig
from rayrl.schemas import ModelOutput, PolicyFailure, ProtocolError
from rayrl.skills.providers import BankEntry, BankSkills
from rayrl.traces.replay import replay
from rayrl.traces.schema import expand
from tests.doubles import FakeFactory, FakeModel, answer, call, job, page, reset_result
from tests.test_runtime import NO_CALL, PROMPT, TWO_CALLS, build

PROMPTS = PromptBuilder(PROMPT, PromptConfig())
CUT = ModelOutput(finish_reason="length", policy_failure=PolicyFailure(code="generation_length", message="cut"))
OVERFLOW = ContextOverflowError("full", code="context_overflow", stage="model")


async def recorded(*outputs, steps=3, skills=None, environments=None, **limits):
    runtime = build(FakeModel(*outputs), environments or FakeFactory(steps=steps), skills=skills, **limits)
    return orjson.loads(orjson.dumps((await runtime.run(job())).record))


async def again(record, environments, **limits):
    return await replay(record, environments=environments, prompts=PROMPTS, limits=RuntimeConfig(**limits))


def where(differences):
    return [d.where for d in differences]


@pytest.mark.parametrize(
    ("outputs", "steps", "limits"),
    [
        ((), 3, {}),
        ((NO_CALL, TWO_CALLS, call("fly", value="x")), 2, {}),
        ((ModelOutput(protocol_error=ProtocolError(code="invalid_body", message="b"), raw_response={"x": 1}),), 2, {}),
        ((call("click", value="a"), CUT), 9, {}),
        ((call("click", value="a"), OVERFLOW), 9, {}),
        ((), 99, {"max_actions": 4}),
        ((), 99, {"max_episode_tokens": 30}),
        ((NO_CALL.model_copy(update={"usage": call("click", usage=(50, 1)).usage}),), 99, {"max_episode_tokens": 30}),
    ],
    ids=["plain", "protocol errors", "raw body", "cut", "overflow", "action limit", "tokens", "tokens after an error"],
)
async def test_the_same_environment_gives_no_difference(outputs, steps, limits):
    record = await recorded(*outputs, steps=steps, **limits)
    replayed, differences = await again(record, FakeFactory(steps=steps), **limits)
    assert differences == []
    assert replayed["final"] == record["final"] and replayed["conversation"] == expand(record)["conversation"]


async def test_the_recorded_skills_are_used_again_without_the_bank():
    bank = BankSkills([BankEntry(skill_id="s", content="Mind the budget.")])
    record = await recorded(skills=bank)
    replayed, differences = await again(record, FakeFactory())
    assert differences == [] and replayed["selected_skills"] == record["selected_skills"]


async def test_another_first_page_is_found():
    record = await recorded()
    other = FakeFactory(on_reset=lambda *_: reset_result(observation=page("another start")))
    _, differences = await again(record, other)
    assert where(differences)[:2] == ["reset.observation", "steps[0].observation"]


async def test_another_reward_is_found():
    record = await recorded(steps=1)
    dearer = FakeFactory(on_step=lambda *_: answer("click[a]", done=True, reward=0.25))
    _, differences = await again(record, dearer)
    assert {"steps[0].environment", "final"} <= set(where(differences))


async def test_an_episode_that_goes_on_longer_is_found():
    record = await recorded(steps=2)
    replayed, differences = await again(record, FakeFactory(steps=3))
    assert "status" in where(differences) and "error" in where(differences)
    assert "after the 2 recorded completions" in replayed["error"]["message"]


async def test_an_episode_that_ends_earlier_is_found():
    record = await recorded(steps=3)
    _, differences = await again(record, FakeFactory(steps=2))
    assert {"number of steps", "number of messages"} <= set(where(differences))


async def test_another_prompt_is_found_as_another_conversation():
    record = await recorded()
    template = PROMPT.model_copy(update={"system": PROMPT.system + " Be quick."})
    prompts = PromptBuilder(template, PromptConfig())
    _, differences = await replay(record, environments=FakeFactory(), prompts=prompts, limits=RuntimeConfig())
    assert where(differences) == ["conversation[0]"]


async def test_a_record_without_steps_cannot_be_replayed():
    record = await recorded()
    bare = {**copy.deepcopy(record), "steps": []}
    with pytest.raises(DataError, match="no steps to replay"):
        await again(bare, FakeFactory())


async def test_replaying_does_not_change_the_record():
    record = await recorded(NO_CALL)
    before = orjson.dumps(record)
    await again(record, FakeFactory())
    assert orjson.dumps(record) == before
