"""The filter language: what it can say, what it refuses, and that nothing in it ever runs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrl.errors import UserError
from rayrl.export.filters import Filter, filter_values
from rayrl.testing.traces import TraceRecipe, make_record, plan_episode

RECIPE = TraceRecipe(tasks=40, failure_rate=0.0)
GOOD = next(make_record(RECIPE, t, 0) for t in RECIPE.task_ids() if plan_episode(RECIPE, t, 0).success)
BAD = make_record(RECIPE, 0, 0, fail=True)


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        ("completed and reward_detail.r_success == 1 and steps <= 40", True, False),
        ("completed", True, False),
        ("not completed", False, True),
        ("status in ['failed', 'cancelled']", False, True),
        ("error_class == null", True, False),
        ("reward >= 0.5", True, False),
        ("reward < 0.5", False, False),  # missing is neither above nor below
        ("0 < reward <= 1", True, False),
        ("split == 'val' and job.sample_id == 0", True, True),
        ("reward_detail.nothing.deeper == null", True, True),
        ("purchase.price > -1.5 or provenance.checkpoint_id != 'synthetic-0'", True, False),
        ("'synth' in model", True, True),
        ("episode_id not in ['x']", True, True),
        ("model < 3", False, False),  # different types have no order
        ("true and not false", True, True),
        ("(retried or success) and tokens > 0", True, False),
    ],
)
def test_what_it_says(text, good, bad):
    passes = Filter(text)
    assert passes(GOOD) is good
    assert passes(BAD) is bad


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rewrad > 1", "unknown name 'rewrad' \\(did you mean 'reward'"),
        ("reward > ", "not understood"),
        ("", "it is empty"),
        ("1", "a constant"),
        ("__import__('os').system('true')", "a call is not possible"),
        ("reward.__class__ == 1", "'reward' has no parts"),
        ("steps[0] == 1", "indexing is not possible"),
        ("reward + 1 > 2", "arithmetic is not possible"),
        ("9 ** 9 ** 9 > 1", "arithmetic is not possible"),
        ("(lambda: 1) == 1", "a lambda is not possible"),
        ("[x for x in steps] == 1", "this is not possible"),
        ("f'{reward}' == 'x'", "a formatted string is not possible"),
        ("reward is null", "this comparison is not possible"),
        ("-steps > 1", "only before a number"),
        ("(a := 1) == 1", "an assignment is not possible"),
        ("reward == b'x'", "this kind of value"),
        ("import os", "not understood"),
        ("a" * 3000, "longer than"),
        (" or ".join(["1"] * 300), "more than"),
        ("(" * 500 + "1" + ")" * 500, "not understood|more than"),
        ("goal.asin == 'x'", "unknown name 'goal'"),
    ],
)
def test_what_it_refuses(text, message):
    with pytest.raises(UserError, match=message):
        Filter(text)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_a_filter_or_a_clear_refusal(text):
    try:
        found = Filter(text)
    except UserError as error:
        assert str(error).startswith("filter")
    else:
        assert found(GOOD) in (True, False)


def test_values_hold_nothing_private():
    values = filter_values(GOOD)
    assert "goal" not in values
    assert "persona" not in str(sorted(values))
