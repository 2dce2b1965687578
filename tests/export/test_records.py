"""SFT, DPO, GRPO: what goes out, what stays, and that it comes back."""

import json

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrl.errors import UserError
from rayrl.export.back import episode_from_sft, episodes_from_grpo
from rayrl.export.conversation import ConversationOptions, messages_of, tools_of, visible, without_persona
from rayrl.export.records import (
    advantages,
    dpo_record,
    dynamic_sampling,
    group_records,
    grpo_record,
    sft_record,
    sft_steps,
)
from rayrl.prompts import PromptBuilder, PromptConfig, PromptTemplate
from rayrl.testing.traces import TraceRecipe, as_v4, make_goal, make_record, make_records, plan_episode
from rayrl.traces.schema import interned, is_complete

PLAIN = ConversationOptions()
RECIPE = TraceRecipe(tasks=25, samples=3, protocol_error_rate=0.3, skills=("check",))
RECORDS = list(make_records(RECIPE))
DONE = [r for r in RECORDS if is_complete(r)]


def with_persona(record):
    """The record as the prompt builder would have written it."""
    persona = record["reset"]["persona"]
    text = json.dumps(persona, ensure_ascii=False, sort_keys=True)
    conversation = [dict(m) for m in record["conversation"]]
    user = next(m for m in conversation if m["role"] == "user")
    content = interned(record)["texts"][user.pop("content_ref")] if "content_ref" in user else user["content"]
    user["content"] = f"Task: x\nPersona: {text}\n\n{content}"
    return {**record, "conversation": conversation}


def test_conversations_are_valid_and_carry_nothing_extra():
    for record in DONE:
        made = sft_record(record, PLAIN)
        roles = [m["role"] for m in made["messages"]]
        assert roles[:2] == ["system", "user"]
        assert roles[-1] == "assistant"
        assert roles[2::2] == ["assistant"] * len(roles[2::2])
        assert roles[3::2] == ["tool"] * len(roles[3::2])
        calls = [m["tool_calls"][0]["id"] for m in made["messages"] if m.get("tool_calls")]
        answers = [m["tool_call_id"] for m in made["messages"] if m["role"] == "tool"]
        assert calls[: len(answers)] == answers
        text = orjson.dumps(made).decode()
        assert "reasoning" not in text
        assert "no_tool_call" not in text
        assert make_goal(RECIPE, record["job"]["task_id"])["task_id"] == made["task_id"]
        tools = json.loads(made["tools"])
        assert {t["function"]["name"] for t in tools} <= {"search", "click"}
        assert "enum" not in made["tools"]


def test_reasoning_and_protocol_errors_come_only_when_asked_for():
    record = next(r for r in DONE if any("protocol_error" in s for s in r["steps"]))
    full = messages_of(record, ConversationOptions(reasoning=True, protocol_errors=True))
    assert len(full) == len(record["conversation"])
    replies = [m for m in full if m["role"] == "assistant"]
    assert [("tool_calls" in m) for m in replies] == [
        "protocol_error" not in s for s in record["steps"] if "policy_failure" not in s
    ]
    assert all("reasoning_content" in m for m in replies if m.get("tool_calls"))


def test_the_persona_block_goes_unless_asked_for():
    record = with_persona(DONE[0])
    persona = json.dumps(record["reset"]["persona"], ensure_ascii=False, sort_keys=True)
    assert persona in messages_of(record, ConversationOptions(persona=True))[1]["content"]
    user = messages_of(record, PLAIN)[1]["content"]
    assert "Persona" not in user and persona not in user
    assert user.startswith("Task: x\n")
    assert without_persona("Persona:\n" + persona + "\nNext", record["reset"]["persona"]) == "Next"
    assert without_persona("nothing here", record["reset"]["persona"]) == "nothing here"


def test_step_records_have_the_exact_tools_of_their_page():
    record = next(r for r in DONE if any("protocol_error" in s for s in r["steps"]))
    made = list(sft_steps(record, PLAIN))
    acted = [s for s in record["steps"] if s.get("action")]
    assert len(made) == len(acted)
    for item, step in zip(made, acted, strict=True):
        assert json.loads(item["tools"]) == interned(record)["toolsets"][step["tools"]]
        assert item["step"] == step["index"]
        call = item["completion"][0]["tool_calls"][0]["function"]
        assert json.loads(call["arguments"]) == step["model"]["tool_calls"][0]["arguments"]
        assert item["prompt"][-1]["role"] in ("user", "tool")


def test_short_histories_look_as_the_policy_saw_them():
    template = PromptTemplate(name="t", version="1", system="{skills}", user="{instruction}{observation}")
    messages = messages_of(max(DONE, key=lambda r: len(r["steps"])), PLAIN)
    builder = PromptBuilder(template, PromptConfig(history="last_n", last_n=2))
    assert visible(messages, 2) == builder.visible(messages)
    assert visible(messages, None) == messages


def test_v4_records_give_the_same_conversation():
    for record in DONE[:10]:
        assert messages_of(as_v4(record), PLAIN) == messages_of(record, PLAIN)
        assert tools_of(as_v4(record)) == tools_of(record)


def test_sft_records_convert_back_and_forth():
    for record in DONE:
        made = sft_record(record, ConversationOptions(reasoning=True))
        back = episode_from_sft(made)
        assert is_complete(back)
        assert back["provenance"]["converted_from"] == "sft"
        assert sft_record(back, ConversationOptions(reasoning=True)) == made


def test_grpo_records_convert_back_and_forth():
    kept, _ = dynamic_sampling(group_records(RECORDS))
    assert kept
    for group in kept:
        made = grpo_record(group, PLAIN)
        back = group_records(episodes_from_grpo(made))
        assert len(back) == 1
        assert grpo_record(back[0], PLAIN) == made


def test_groups_leave_out_failures_and_count_them():
    groups = group_records(RECORDS)
    assert sum(len(g.records) for g in groups) == len({r["episode_id"] for r in DONE})
    assert sum(g.failed for g in groups) == len(RECORDS) - len(DONE)


def test_dynamic_sampling_keeps_groups_with_a_signal_and_says_why_not():
    groups = group_records(RECORDS)
    kept, report = dynamic_sampling(groups)
    assert {g.key for g in kept} == {g.key for g in groups if len(set(g.rewards)) > 1}
    fallen = report.zero_spread_all_wrong + report.zero_spread_all_right + report.zero_spread_other + report.too_small
    assert report.kept + fallen == report.groups == 25
    assert report.effective_samples == sum(len(g.records) for g in kept)
    with pytest.raises(UserError, match=r"starved: \d+ of 25 groups .* all wrong"):
        dynamic_sampling(groups, min_groups=26)


def test_a_group_shares_prompt_skills_and_checkpoint():
    a = make_record(RECIPE, 0, 0)
    for change in ({"skills": ()}, {"checkpoint": "other"}):
        b = make_record(TraceRecipe(**{**RECIPE.__dict__, **change}), 0, 1)
        with pytest.raises(UserError, match="not one group"):
            group_records([a, b])


def test_dpo_takes_best_and_worst():
    for group in group_records(DONE):
        made = dpo_record(group, PLAIN)
        rewards = group.rewards
        if max(rewards) == min(rewards):
            assert made is None
            continue
        assert (made["chosen_reward"], made["rejected_reward"]) == (max(rewards), min(rewards))
        assert made["prompt"][-1]["role"] == "user"
        assert made["chosen"][0]["role"] == made["rejected"][0]["role"] == "assistant"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=16))
def test_advantages_are_normalised_or_zero(rewards):
    found = np.array(advantages(rewards))
    assert np.isfinite(found).all()
    if np.ptp(rewards) <= 1e-6:
        assert not found.any()
    else:
        assert found.mean() == pytest.approx(0, abs=1e-6)
        assert found.std() == pytest.approx(1, abs=1e-6)
        order = np.argsort(rewards, kind="stable")
        assert (np.diff(found[order]) >= -1e-9).all()


def test_nan_rewards_never_enter():
    with pytest.raises(ValueError, match="not finite"):
        advantages([0.0, float("nan")])
    record = make_record(RECIPE, 0, 0)
    record["final"]["reward"] = float("nan")
    assert group_records([record])[0].failed == 1


def test_plans_and_rewards_agree():
    for record in DONE:
        job = record["job"]
        assert plan_episode(RECIPE, job["task_id"], job["sample_id"]).success == (record["final"]["reward"] == 1.0)
