"""expand(intern(x)) == x, whatever x is; each distinct value is stored once; complete means complete."""

from __future__ import annotations

import json

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrl.schemas import EPISODE_SCHEMA, Observation
from rayrl.traces.schema import INTERN_MIN_CHARS, PACK_MIN_BYTES, Interner, expand, interned, is_complete
from tests.doubles import FakeFactory, FakeModel, job
from tests.test_runtime import build

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=120)
NUMBER = st.one_of(st.integers(-(2**53), 2**53), st.floats(allow_nan=False, allow_infinity=False))
LEAF = st.one_of(st.none(), st.booleans(), NUMBER, TEXT)
STATE = st.dictionaries(TEXT, st.recursive(LEAF, lambda x: st.lists(x, max_size=3), max_leaves=5), max_size=4)
TOOLSET = st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": STATE}), max_size=3)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": st.one_of(st.none(), TEXT)}
)
PAGE = st.fixed_dictionaries({"text": TEXT, "state": STATE, "version": st.sampled_from(["v1", "v2"])})
STEP = st.fixed_dictionaries(
    {"observation": PAGE, "tools": TOOLSET}, optional={"environment": PAGE, "protocol_error": STATE}
)
EPISODE = st.fixed_dictionaries(
    {
        "start": st.one_of(st.none(), PAGE),
        "conversation": st.lists(MESSAGE, max_size=6),
        "steps": st.lists(STEP, max_size=5),
    }
)


def plain(episode):
    """The record as ``expand`` gives it."""
    steps = []
    for n, step in enumerate(episode["steps"]):
        out = {"index": n, "observation": step["observation"], "tools": step["tools"]}
        if "environment" in step:
            out["environment"] = {"observation": step["environment"], "done": False}
        if "protocol_error" in step:
            out["protocol_error"] = step["protocol_error"]
        steps.append(out)
    reset = {"instruction": "x", "observation": episode["start"]} if episode["start"] else None
    return {"schema": EPISODE_SCHEMA, "reset": reset, "conversation": episode["conversation"], "steps": steps}


def intern(record):
    """The record as it is written."""
    interner = Interner()

    def page(value):
        return interner.observation(Observation(**value, tools=[]))

    steps = []
    for step in record["steps"]:
        out = {**step, "observation": page(step["observation"]), "tools": interner.toolset(step["tools"])}
        if "environment" in step:
            out["environment"] = {**step["environment"], "observation": page(step["environment"]["observation"])}
        steps.append(out)
    reset = record["reset"]
    if reset:
        reset = {**reset, "observation": page(reset["observation"])}
    return {
        **record,
        "reset": reset,
        "conversation": [interner.message(message) for message in record["conversation"]],
        "steps": steps,
        "interned": interner.dump(),
    }


@given(EPISODE)
@settings(max_examples=50, deadline=None)
def test_what_was_interned_comes_back_the_same_through_json(episode):
    record = plain(episode)
    written = orjson.loads(orjson.dumps(intern(record)))
    before = json.dumps(written, sort_keys=True)
    expanded = expand(written)
    assert expanded == record and types_of(expanded) == types_of(record)
    assert json.dumps(written, sort_keys=True) == before, "expand changed its input"


def types_of(value):
    # 1 == True == 1.0 in Python; a round trip must keep them apart
    if isinstance(value, dict):
        return {k: types_of(v) for k, v in value.items()}
    if isinstance(value, list):
        return [types_of(v) for v in value]
    return type(value)


def test_equal_values_are_stored_once_and_unlike_ones_apart():
    interner = Interner()
    assert interner.state({"a": 1, "b": 2}) == interner.state({"b": 2, "a": 1}) == 0
    assert [interner.state({"a": value}) for value in (1, True, 1.0, "1", None)] == [1, 2, 3, 4, 5]
    assert interner.text("x") == interner.text("x") == 0 and interner.text("y") == 1
    assert interner.toolset([]) == 0 and interner.toolset([{}]) == 1 and interner.toolset([]) == 0


def test_short_messages_stay_readable_and_long_ones_share_the_page_text():
    interner = Interner()
    short = {"role": "user", "content": "x" * (INTERN_MIN_CHARS - 1)}
    long = {"role": "tool", "tool_call_id": "c", "content": "x" * INTERN_MIN_CHARS}
    index = interner.text(long["content"])
    assert interner.message(short) is short
    assert interner.message(long) == {"role": "tool", "tool_call_id": "c", "content_ref": index}
    blocks = {"role": "user", "content": [{"type": "text", "text": "x" * 200}]}
    assert interner.message(blocks) is blocks


def test_a_large_interned_part_is_packed_and_opens_again():
    interner = Interner()
    interner.text("杯" * PACK_MIN_BYTES)
    packed = interner.dump()
    assert isinstance(packed, str) and len(packed) < PACK_MIN_BYTES
    assert interned({"interned": packed})["texts"] == ["杯" * PACK_MIN_BYTES]
    assert interned({}) == {"texts": [], "states": [], "toolsets": []}


async def test_a_real_episode_stores_each_tool_set_once():
    outcome = await build(FakeModel(), FakeFactory(steps=10)).run(job())
    values = interned(outcome.record)
    assert len(values["toolsets"]) == 1
    assert [step["tools"] for step in outcome.record["steps"]] == [0] * 10


def test_a_damaged_reference_is_an_error_not_a_wrong_text():
    record = {
        "interned": {"texts": ["a"], "states": [], "toolsets": []},
        "conversation": [{"content_ref": 3}],
        "steps": [],
    }
    with pytest.raises(IndexError):
        expand(record)


@pytest.mark.parametrize(
    ("change", "complete"),
    [
        ({}, True),
        ({"schema": "rayrl-episode-v0"}, False),
        ({"status": "failed"}, False),
        ({"final": None}, False),
        ({"final": {"done": False}}, False),
        ({"final": {"done": 1}}, False),
        ({"final": {}}, False),
    ],
)
def test_complete_is_schema_status_and_done(change, complete):
    record = {"schema": EPISODE_SCHEMA, "status": "completed", "final": {"done": True, "reward": 0.0}, **change}
    assert is_complete(record) is complete
