"""Rows: explicit schema, nulls then strings, both record schemas."""

import orjson
import pyarrow as pa
import pytest

from rayrl.errors import DataError
from rayrl.evaluation.rows import (
    EPISODE_ARROW,
    STEP_ARROW,
    check_record,
    episode_row,
    episode_rows,
    step_rows,
    to_table,
    values_table,
)
from rayrl.testing.traces import TraceRecipe, as_v4, make_record, make_records, plan_episode


def find(recipe, mode):
    return next(
        make_record(recipe, t, s)
        for t in recipe.task_ids()
        for s in range(recipe.samples)
        if plan_episode(recipe, t, s).mode == mode
    )


def test_a_row_counts_steps_errors_and_actions_apart():
    recipe = TraceRecipe(tasks=60, protocol_error_rate=0.4)
    record = find(recipe, "never_searched")
    row = episode_row(record)
    errors = sum("protocol_error" in s for s in record["steps"])
    assert row["model_steps"] == len(record["steps"])
    assert row["protocol_errors"] == errors
    assert row["total_actions"] == len(record["steps"]) - errors
    assert row["invalid_actions"] == row["total_actions"]  # buying on the search page is never possible
    assert (row["reward"], row["termination_reason"], row["complete"]) == (0.0, "action_limit", True)


def test_policy_failures_are_scored():
    row = episode_row(find(TraceRecipe(tasks=80), "generation_length"))
    assert (row["policy_failure"], row["reward"], row["complete"]) == ("generation_length", 0.0, True)


def test_failed_attempts_have_no_reward_and_name_their_error():
    record = make_record(TraceRecipe(), 0, 0, fail=True)
    row = episode_row(record)
    assert row["reward"] is None
    assert row["r_success"] is None
    assert row["complete"] is False
    assert row["error_class"] in {"model_transport", "environment", "infrastructure"}


def test_both_schemas_give_the_same_row():
    for record in make_records(TraceRecipe(tasks=20)):
        ours, theirs = episode_row(record), episode_row(as_v4(record))
        assert {**theirs, "schema": None} == {**ours, "schema": None}


def test_other_components_are_kept_and_nonsense_is_not():
    record = find(TraceRecipe(), "success")
    record["final"]["reward_detail"] |= {"r_style": 0.25, "r_text": "high", "note": 3}
    assert orjson.loads(episode_row(record)["components_json"]) == {"r_style": 0.25}


@pytest.mark.parametrize("late", ["text", 3, {"deep": [1, None]}, [], None])
def test_null_then_anything_keeps_the_schema(late):
    """A field that is null in the first record and something else later never changes a type."""
    first, second = make_record(TraceRecipe(), 0, 0), make_record(TraceRecipe(), 1, 0)
    first["provenance"]["checkpoint_id"] = None
    second["provenance"]["checkpoint_id"] = late
    first["final"]["purchase"] = None
    second["final"]["purchase"] = {"price": late}
    table = to_table(episode_rows([first, second]))
    assert table.schema.equals(EPISODE_ARROW)
    assert table["checkpoint_id"][0].as_py() is None


def test_a_record_with_almost_nothing_still_gives_a_row():
    row = episode_row({"schema": "rayrl-episode-v1", "episode_id": "x", "status": "failed"})
    assert row["complete"] is False
    assert row["model_steps"] == 0
    assert to_table([row]).num_rows == 1


def test_step_rows_follow_the_pages():
    record = find(TraceRecipe(tasks=40), "success")
    rows = step_rows(record, run="r")
    table = values_table([tuple(r[n] for n in STEP_ARROW.names) for r in rows], STEP_ARROW)
    assert table.num_rows == len(record["steps"])
    assert rows[-1]["done"] is True
    assert rows[-1]["action"] == "click[buy now]"
    assert {r["page_type"] for r in rows} >= {"search_home", "search_results", "product_detail"}
    assert step_rows(as_v4(record), run="r") == rows


def test_unknown_fields_and_foreign_records_are_refused():
    with pytest.raises(DataError, match="row 0: unknown fields"):
        to_table([{"episode_id": "x", "rewrd": 1.0}])
    with pytest.raises(DataError, match=r"f\.jsonl:3: not an episode record \(schema 'other'"):
        check_record({"schema": "other"}, "f.jsonl:3")


def test_schema_has_no_nested_types():
    assert not any(pa.types.is_nested(field.type) for field in (*EPISODE_ARROW, *STEP_ARROW))


def test_selective_decoding_gives_the_same_rows():
    from rayrl.evaluation.fastjson import loads_for_row
    from rayrl.evaluation.rows import episode_values

    records = list(make_records(TraceRecipe(tasks=20, failure_rate=0.3, skills=("s1",))))
    odd = make_record(TraceRecipe(), 0, 0)
    odd["steps"] = [{"model": "a string where an object is expected"}, *odd["steps"]]
    strange = {**make_record(TraceRecipe(), 1, 0), "selected_skills": {"not": "a list"}}
    for record in [*records, *map(as_v4, records), odd]:
        line = orjson.dumps(record)
        try:
            expected = episode_values(orjson.loads(line))
        except AttributeError as error:
            with pytest.raises(AttributeError, match=str(error)):
                episode_values(loads_for_row(line))
        else:
            assert episode_values(loads_for_row(line)) == expected
    assert loads_for_row(orjson.dumps(strange)) == strange
    with pytest.raises(orjson.JSONDecodeError):
        loads_for_row(orjson.dumps(records[0])[:-40])
