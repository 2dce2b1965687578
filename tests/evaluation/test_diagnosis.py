"""Labels: each rule fires on its behaviour, names the steps, and never quotes the goal."""

import json
from collections import defaultdict

import pytest

from rayrl.evaluation import diagnosis as d
from rayrl.evaluation.known_calls import Call, CallCase, known_calls, read_expected
from rayrl.evaluation.label_rates import label_rates
from rayrl.evaluation.tool_calls import call_accuracy, compare_arguments, same_value
from rayrl.evaluation.view import EpisodeView, StepView, view_of
from rayrl.testing.traces import TraceRecipe, as_v4, make_goal, make_record, make_records, plan_episode

GOAL = {"asin": "700", "price_upper": 100.0, "goal_options": ["red"]}
HOME = {"page_type": "search_home", "actions": []}


def results(*asins, query="q"):
    return {"page_type": "search_results", "products": [{"asin": a} for a in asins], "search_text": query}


def detail(asin, *, missing=(), chosen=None, price=None):
    state = {"page_type": "product_detail", "product": {"asin": asin}, "missing_option_axes": list(missing)}
    state |= {"available_options": {"colour": ["red", "blue"]}, "selected_options": chosen or {}}
    return {**state, "actions": [] if missing else ["buy now"], "selected_price": price}


def step(i, state, tool, value, *, valid=True, reason="executed"):
    arguments = {"query": value} if tool == "search" else {"value": value}
    return StepView(i, state, tool, arguments, f"{tool}[{value}]", valid, reason, None, None)


def broken(i, code="no_tool_call"):
    return StepView(i, HOME, None, {}, None, None, None, code, None)


def episode(*steps, last=HOME, goal=GOAL, **kwargs):
    values = {"reward": 0.0, "detail": {}, "purchase": {}, "termination": None} | kwargs
    return EpisodeView("e", list(steps), last, goal=goal, **values)


def bought(asin, price=50.0, **detail_values):
    return {
        "purchase": {"asin": asin, "price": price, "options": {"colour": "blue"}},
        "detail": {"r_success": 0, "price_verifiable": True, **detail_values},
        "termination": "purchase",
    }


SEARCH = step(0, HOME, "search", "Red  Lamp")
FOUND = results("699", "700")

CASES = {
    "never_searched": (episode(step(0, HOME, "click", "buy now", valid=False)), [0]),
    "target_never_surfaced": (episode(SEARCH, last=results("1", "2")), [0]),
    "surfaced_not_opened": (episode(SEARCH, step(1, FOUND, "click", "699"), last=detail("699")), [1]),
    "wrong_product": (episode(SEARCH, step(1, detail("699"), "click", "buy now"), **bought("699")), [1]),
    "wrong_variant": (
        episode(
            SEARCH, step(1, detail("700", missing=["colour"]), "click", "colour=blue"), **bought("700", r_option=0.0)
        ),
        [1],
    ),
    "option_axis_missed": (
        episode(
            step(0, detail("700", missing=["colour"]), "click", "buy now", valid=False, reason="incomplete_options")
        ),
        [0],
    ),
    "over_budget": (episode(SEARCH, step(1, detail("700"), "click", "buy now"), **bought("700", price=120.0)), [1]),
    "price_not_verified": (
        episode(SEARCH, step(1, detail("700"), "click", "buy now"), **bought("700", price_verifiable=False)),
        [1],
    ),
    "bought_without_inspection": (
        episode(SEARCH, step(1, FOUND, "click", "700"), step(2, detail("700"), "click", "buy now"), **bought("700")),
        [1],
    ),
    "loop": (episode(*(step(i, FOUND, "click", "699") for i in range(3))), [0, 1, 2]),
    "repeated_query": (episode(SEARCH, step(1, HOME, "search", "red lamp"), step(2, HOME, "search", "other")), [0, 1]),
    "protocol_error_streak": (episode(broken(0), broken(1, "unknown_tool"), SEARCH), [0, 1]),
    "invalid_action_streak": (
        episode(*(step(i, HOME, "click", str(i), valid=False, reason="unavailable_action") for i in range(2))),
        [0, 1],
    ),
    "generation_length": (
        episode(SEARCH, StepView(1, HOME, None, {}, None, None, None, None, "generation_length")),
        [1],
    ),
    "context_overflow": (episode(SEARCH, StepView(1, HOME, None, {}, None, None, None, None, "context_overflow")), [1]),
    "action_limit": (episode(SEARCH, termination="action_limit"), [0]),
}


def test_every_rule_has_a_case():
    assert set(CASES) == set(d.RULES)


@pytest.mark.parametrize("name", list(CASES))
def test_rule_fires_on_its_behaviour(name):
    view, steps = CASES[name]
    finding = d.RULES[name](view)
    assert finding is not None
    assert finding.steps == steps


CLEAN = episode(
    SEARCH,
    step(1, FOUND, "click", "699"),
    step(2, detail("699", missing=["colour"]), "click", "< prev"),
    step(3, FOUND, "click", "700"),
    step(4, detail("700", missing=["colour"]), "click", "colour=red"),
    step(5, detail("700", chosen={"colour": "red"}, price="50"), "click", "buy now"),
    reward=1.0,
    detail={"r_success": 1, "r_option": 1.0, "r_price": 1.0, "price_verifiable": True, "target_asin_match": True},
    purchase={"asin": "700", "price": 50.0, "options": {"colour": "red"}},
    termination="purchase",
)


@pytest.mark.parametrize("name", list(d.RULES))
def test_no_rule_fires_on_a_clean_success(name):
    assert d.RULES[name](CLEAN) is None


def test_without_a_goal_the_reward_detail_decides():
    kwargs = bought("700", target_asin_match=True, r_option=0.5, r_price=0.0)
    view = episode(SEARCH, goal=None, **kwargs)
    assert d.target_never_surfaced(view) is None
    assert d.wrong_variant(view) is not None
    assert d.over_budget(view) is not None


def test_labels_find_what_the_generator_planned_and_hold_no_gold():
    recipe = TraceRecipe(tasks=150, failure_rate=0.0)
    expected = {
        "never_searched": "never_searched",
        "target_never_surfaced": "target_never_surfaced",
        "not_opened": "surfaced_not_opened",
        "wrong_variant": "wrong_variant",
        "loop": "loop",
        "repeated_query": "repeated_query",
        "action_limit": "action_limit",
        "generation_length": "generation_length",
    }
    seen = defaultdict(int)
    for record in make_records(recipe):
        task, sample = record["job"]["task_id"], record["job"]["sample_id"]
        plan, goal = plan_episode(recipe, task, sample), make_goal(recipe, task)
        line = d.label_record(record, goal, run="r")
        assert d.label_record(as_v4(record), goal, run="r") == line
        names = {f["label"] for f in line["labels"]}
        seen[plan.mode] += 1
        if plan.mode in expected:
            assert expected[plan.mode] in names
        assert (line["diagnosis"] == "success") == plan.success
        if record["final"]["purchase"].get("asin") != goal["asin"]:
            assert goal["asin"] not in json.dumps(line["labels"])
        indices = {s["index"] for s in record["steps"]}
        bad = [f for f in line["labels"] if not set(f["steps"]) <= indices]
        assert bad == []
    assert set(expected) <= set(seen)


def test_rates_have_intervals_examples_and_do_not_depend_on_order():
    recipe = TraceRecipe(tasks=60, samples=2, failure_rate=0.0)
    lines = [d.label_record(r, make_goal(recipe, r["job"]["task_id"]), run="r") for r in make_records(recipe)]
    rates = label_rates(lines)
    assert rates == label_rates(lines[::-1])
    item = rates["labels"]["action_limit"]
    assert item["low"] <= item["mean"] <= item["high"]
    assert item["mean"] == item["episodes"] / 120
    assert item["success_with"] == 0.0
    assert 0 < len(item["examples"]) <= 5
    blind = label_rates([d.label_record(r, run="r") for r in make_records(recipe)])
    assert blind["labels"]["surfaced_not_opened"]["n"] == 0  # cannot be decided, so no rate


def test_same_value_and_arguments():
    assert same_value("Red  lamp", "red lamp") and same_value(1, 1.0) and not same_value(True, 1)
    assert not same_value("1", 1) and same_value(["a"], ["a"])
    verdicts = compare_arguments({"a": 1, "b": "x", "c": 2}, {"a": 1, "b": "y", "z": 0})
    assert verdicts == {"a": "right", "b": "wrong", "c": "missing", "z": "invented"}


def test_call_accuracy_by_tool_and_argument():
    call = Call("search", {"query": "lamp", "page": 1})
    cases = [
        CallCase("1", call, Call("search", {"query": "LAMP", "page": 1})),
        CallCase("2", call, Call("search", {"query": "sofa"})),
        CallCase("3", call, Call("click", {"value": "x"})),
        CallCase("4", call, None),
    ]
    found = call_accuracy(cases)
    assert found["tool_choice"]["rate"] == 0.5
    assert found["exact_call"]["rate"] == 0.25
    assert found["by_argument"]["search.query"] == {
        **found["by_argument"]["search.query"],
        "right": 1,
        "wrong": 1,
        "n": 2,
        "rate": 0.5,
    }
    assert found["by_argument"]["search.page"]["missing"] == 1
    assert {c["actual"] for c in found["confusion"]} == {"click", "(none)"}
    assert call_accuracy([])["tool_choice"]["rate"] is None


def test_known_calls_come_from_the_goal():
    cases = list(known_calls(CLEAN))
    assert [c.expected.arguments["value"] for c in cases] == ["colour=red", "buy now"]
    assert call_accuracy(cases)["exact_call"]["rate"] == 1.0
    recipe = TraceRecipe(tasks=60, failure_rate=0.0)
    record = next(
        make_record(recipe, t, 0) for t in recipe.task_ids() if plan_episode(recipe, t, 0).mode == "wrong_variant"
    )
    wrong = call_accuracy(known_calls(view_of(record, make_goal(recipe, record["job"]["task_id"]))))
    assert wrong["by_argument"]["click.value"]["wrong"] >= 1


def test_expected_calls_file(tmp_path):
    path = tmp_path / "calls.jsonl"
    path.write_text('{"task_id": 1, "step": 0, "name": "search", "arguments": {"query": "x"}}\n\n{"task_id": 2}\n')
    with pytest.raises(Exception, match=r"calls\.jsonl:3"):
        read_expected(path)
    path.write_text('{"task_id": 1, "step": 0, "name": "search", "arguments": {"query": "x"}}\n')
    assert read_expected(path) == {(1, 0): Call("search", {"query": "x"})}
