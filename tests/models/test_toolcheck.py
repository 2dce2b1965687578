from __future__ import annotations

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrl.models.toolcheck import _simple, argument_error

SEARCH = {
    "type": "object",
    "properties": {"query": {"type": "string", "maxLength": 10}},
    "required": ["query"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"query": "lamp"}, None),
        ({"query": "x" * 11}, "longer than 10"),
        ({}, "'query' is missing"),
        ({"query": 3}, "expected string, got integer"),
        ({"query": None}, "got null"),
        ({"query": True}, "got boolean"),
        ({"query": "a", "page": 2}, "unexpected property 'page'"),
        ([], "expected object, got array"),
        ("lamp", "got string"),
    ],
)
def test_search_arguments(arguments, part):
    problem = argument_error(arguments, SEARCH)
    assert problem is None if part is None else problem is not None and part in problem


def test_enum_values_are_the_environments_business():
    schema = {"type": "object", "properties": {"value": {"type": "string", "enum": ["a"]}}, "required": ["value"]}
    assert argument_error({"value": "zzz"}, schema) is None
    assert argument_error({"value": 1}, schema) is not None


def test_other_keywords_go_to_jsonschema_and_enums_stay_out():
    schema = {
        "type": "object",
        "properties": {
            "file": {"anyOf": [{"type": "string", "pattern": "^[a-z]+$"}, {"type": "integer", "enum": [1]}]}
        },
        "required": ["file"],
    }
    assert not _simple(schema)
    assert argument_error({"file": "abc"}, schema) is None
    assert argument_error({"file": 2}, schema) is None
    problem = argument_error({"file": "ABC"}, schema)
    assert problem is not None and problem.startswith("arguments.file")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-5, 5) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
SCHEMAS = st.recursive(
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object"])
            | st.just(["string", "null"]),
            "maxLength": st.integers(0, 3),
            "minLength": st.integers(0, 2),
            "minimum": st.integers(-2, 2),
            "maximum": st.integers(-2, 2),
        },
    ),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["object", "array"]),
            "properties": st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
            "required": st.lists(st.sampled_from("abc"), unique=True, max_size=2),
            "additionalProperties": st.booleans() | inner,
            "items": inner,
        },
    ),
    max_leaves=4,
)


@given(SCHEMAS, JSON)
def test_the_direct_check_agrees_with_jsonschema(schema, value):
    assert _simple(schema)
    assert (argument_error(value, schema) is None) == jsonschema.Draft202012Validator(schema).is_valid(value)
