"""One episode, every way it can end: exactly one terminal record, the lease given back, nothing private inside."""

from __future__ import annotations

import asyncio
import json
import time

import orjson
import pytest

from rayrl import runtime as runtime_module
from rayrl.config import configs_root
from rayrl.errors import ContextOverflowError, EnvironmentFaultError, LeaseLostError, ModelTransportError
from rayrl.prompts import PromptBuilder, PromptConfig, load_prompt
from rayrl.runtime import AgentRuntime, RuntimeConfig
from rayrl.schemas import ModelOutput, PolicyFailure, ProtocolError, Skill, TokenTrace, ToolCall, Usage, step_seed
from rayrl.skills.providers import BankEntry, BankSkills, NoSkills
from rayrl.testing.null_environment import NullEnvironmentFactory
from rayrl.traces.schema import expand, is_complete
from tests.doubles import TOOLS, FakeFactory, FakeModel, answer, call, hang, job, page, raising, reset_result

PROMPT = load_prompt(configs_root() / "prompts" / "shop_v1.yaml")


def build(model=None, environments=None, skills=None, history=None, **limits):
    return AgentRuntime(
        model=model or FakeModel(),
        environments=environments or FakeFactory(),
        skills=skills or NoSkills(),
        prompts=PromptBuilder(PROMPT, history or PromptConfig()),
        config=RuntimeConfig(**limits),
        provenance={"experiment": "test", "fingerprint": "f"},
    )


async def play(runtime, **more):
    """Runs one job; checks what must hold however it ends."""
    outcome = await runtime.run(job(), **more)
    record = orjson.loads(orjson.dumps(outcome.record))
    assert record["status"] in ("completed", "failed", "cancelled")
    assert (record["final"] is not None) == (record["status"] == "completed")
    assert is_complete(record) == (record["status"] == "completed")
    assert (record["error"] is None) == (record["status"] == "completed")
    assert "SECRET" not in json.dumps(expand(record)) and b"SECRET" not in orjson.dumps(record)
    environments = runtime.environments
    if isinstance(environments, FakeFactory):
        assert all(environment.closes == 1 for environment in environments.opened)
    return outcome, expand(record)


async def test_a_plain_episode_records_everything_the_model_saw():
    model = FakeModel()
    environments = FakeFactory(steps=3)
    _, record = await play(build(model, environments))
    assert record["final"] == {
        "done": True,
        "reward": 1.0,
        "reward_detail": {"r_success": 1},
        "purchase": {},
        "termination_reason": "finished",
    }
    assert [step["action"] for step in record["steps"]] == ["click[a]"] * 3
    assert [step["tools"] for step in record["steps"]] == [TOOLS] * 3
    assert [m["role"] for m in record["conversation"]] == ["system", "user", *["assistant", "tool"] * 3]
    # what the model was asked last is the recorded conversation without what came after
    assert model.asked[-1][0] == record["conversation"][:-2]
    assert record["conversation"][-1]["tool_call_id"] == record["conversation"][-2]["tool_calls"][0]["id"]
    assert record["usage"] == {"prompt_tokens": 30, "completion_tokens": 6, "model_calls": 3}
    assert environments.opened[0].terminated == []


async def test_model_and_environment_get_the_steps_own_seed():
    model, environments = FakeModel(), FakeFactory(steps=3)
    _, record = await play(build(model, environments))
    expected = [step_seed(job().seed, index) for index in range(3)]
    assert [seed for _, _, seed in model.asked] == expected
    assert environments.opened[0].seeds == expected
    assert [step["seed"] for step in record["steps"]] == expected


async def test_the_goal_leaves_beside_the_record_and_without_a_wrapper():
    outcome, _ = await play(build())
    assert outcome.private == {"episode_id": job().episode_id, "attempt": 1, "goal": {"asin": "SECRET"}}


async def test_a_private_answer_without_a_goal_key_is_the_goal():
    environments = FakeFactory(on_reset=lambda *_: reset_result(private={"asin": "SECRET"}))
    outcome, _ = await play(build(environments=environments))
    assert outcome.private["goal"] == {"asin": "SECRET"}


async def test_the_goal_of_the_last_answer_is_kept_and_no_goal_means_none():
    done = answer(done=True, reward=1.0, private={"goal": {"asin": "SECRET-2"}})
    outcome, _ = await play(build(environments=FakeFactory(on_step=lambda *_: done)))
    assert outcome.private["goal"] == {"asin": "SECRET-2"}
    environments = FakeFactory(on_reset=lambda *_: reset_result())
    outcome, _ = await play(build(environments=environments))
    assert outcome.private is None


async def test_token_ids_go_into_the_training_namespace_only():
    tokens = TokenTrace(completion_ids=[991, 992], completion_logprobs=[-0.1, -0.2])
    outcome, record = await play(build(FakeModel(call("click", value="a", tokens=tokens)), FakeFactory(steps=2)))
    assert outcome.training == [
        {
            "episode_id": job().episode_id,
            "attempt": 1,
            "step": 0,
            "completion_ids": [991, 992],
            "completion_logprobs": [-0.1, -0.2],
        }
    ]
    assert "991" not in json.dumps(record["steps"])


# --- what the model does wrong is scored, never raised

NO_CALL = ModelOutput(content="I think...", finish_reason="stop")
TWO_CALLS = ModelOutput(
    tool_calls=[ToolCall(id="x", name="click", arguments={"value": v}) for v in "ab"], finish_reason="tool_calls"
)
UNKNOWN = call("fly", value="a")
FLAGGED = ModelOutput(
    protocol_error=ProtocolError(code="invalid_arguments_json", message="bad JSON"),
    raw_response={"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]},
)


@pytest.mark.parametrize(
    ("output", "code"),
    [
        (NO_CALL, "no_tool_call"),
        (TWO_CALLS, "multiple_tool_calls"),
        (UNKNOWN, "unknown_tool"),
        (FLAGGED, "invalid_arguments_json"),
    ],
)
async def test_a_protocol_error_costs_an_action_and_leaves_the_environment_alone(output, code):
    model, environments = FakeModel(output), FakeFactory(steps=2)
    _, record = await play(build(model, environments))
    first = record["steps"][0]
    assert first["protocol_error"]["code"] == code
    assert "action" not in first and "environment" not in first
    assert len(environments.opened[0].calls) == 2 and len(record["steps"]) == 3
    # the same page again, with feedback that names code and tools, and nothing malformed replayed
    assert record["steps"][1]["observation"] == first["observation"]
    assistant, feedback = model.asked[1][0][-2:]
    assert assistant["role"] == "assistant" and "tool_calls" not in assistant
    assert feedback["role"] == "user" and code in feedback["content"] and "search, click" in feedback["content"]
    assert feedback["content"] == first["protocol_feedback"]


async def test_protocol_errors_alone_reach_the_action_limit():
    environments = FakeFactory()
    _, record = await play(build(FakeModel(*[NO_CALL] * 9), environments, max_actions=4))
    assert environments.opened[0].terminated == ["action_limit"]
    assert environments.opened[0].calls == []
    assert len(record["steps"]) == 4 and record["final"]["termination_reason"] == "action_limit"


async def test_the_action_limit_ends_the_episode_through_the_environment():
    environments = FakeFactory(steps=99)
    _, record = await play(build(FakeModel(), environments, max_actions=5))
    assert len(environments.opened[0].calls) == 5
    assert environments.opened[0].terminated == ["action_limit"]
    assert record["final"]["reward"] == 0.0


async def test_a_completion_cut_by_length_is_never_executed():
    cut = ModelOutput(
        tool_calls=[ToolCall(id="x", name="click", arguments={"value": "a"})],
        finish_reason="length",
        policy_failure=PolicyFailure(code="generation_length", message="cut"),
    )
    environments = FakeFactory()
    _, record = await play(build(FakeModel(cut), environments))
    assert environments.opened[0].calls == []
    assert environments.opened[0].terminated == ["generation_length"]
    assert record["steps"][0]["policy_failure"]["code"] == "generation_length"
    assert record["final"]["termination_reason"] == "generation_length"


async def test_a_conversation_that_no_longer_fits_is_scored_not_failed():
    overflow = ContextOverflowError("8192 tokens", code="context_overflow", stage="model")
    environments = FakeFactory(steps=9)
    _, record = await play(build(FakeModel(call("click", value="a"), overflow), environments))
    assert [s.get("policy_failure", {}).get("code") for s in record["steps"]] == [None, "context_overflow"]
    assert environments.opened[0].terminated == ["generation_length"]
    assert record["usage"]["model_calls"] == 2


async def test_the_token_limit_counts_what_the_server_reports():
    environments = FakeFactory(steps=99)
    _, record = await play(build(FakeModel(), environments, max_episode_tokens=30))
    # 12 tokens a call: the third one goes beyond 30, its action still counts
    assert len(environments.opened[0].calls) == 3
    assert environments.opened[0].terminated == ["generation_length"]
    assert record["steps"][-1]["policy_failure"]["code"] == "generation_length"


async def test_an_episode_that_ends_on_its_last_token_is_done_not_cut():
    _, record = await play(build(FakeModel(), FakeFactory(steps=3), max_episode_tokens=30))
    assert record["final"]["termination_reason"] == "finished"


async def test_unknown_token_counts_are_no_limit():
    silent = [call("click", value="a").model_copy(update={"usage": Usage()}) for _ in range(3)]
    _, record = await play(build(FakeModel(*silent), FakeFactory(steps=3), max_episode_tokens=1))
    assert record["final"]["termination_reason"] == "finished"


async def test_an_illegal_click_is_the_environments_to_answer():
    environments = FakeFactory(steps=1)
    _, record = await play(build(FakeModel(call("click", value="not in the enum")), environments))
    assert environments.opened[0].calls[0].arguments == {"value": "not in the enum"}
    assert "protocol_error" not in record["steps"][0]


# --- failures of others: recorded once, with the party to blame

SICK = EnvironmentFaultError("HTTP 500", code="http_500", stage="", detail={"status": 500})


@pytest.mark.parametrize(
    ("hooks", "stage"),
    [
        ({"on_reset": raising(SICK)}, "reset"),
        ({"on_step": raising(SICK)}, "step"),
        ({"on_step": lambda *_: answer(), "on_terminate": raising(SICK)}, "terminate"),
    ],
)
async def test_environment_faults_name_the_stage(hooks, stage):
    _, record = await play(build(environments=FakeFactory(**hooks), max_actions=3))
    error = record["error"]
    assert (error["class"], error["code"], error["stage"]) == ("environment", "http_500", stage)
    assert error["detail"] == {"status": 500} and "traceback" not in error


async def test_a_lost_lease_keeps_the_steps_that_were_made():
    lost = LeaseLostError("gone", code="lease_expired", stage="step")
    environments = FakeFactory(on_step=lambda env, _: None if len(env.calls) < 3 else raising(lost)(), steps=9)
    _, record = await play(build(environments=environments))
    assert record["status"] == "failed" and record["error"]["code"] == "lease_expired"
    assert len(record["steps"]) == 3 and record["reset"]["instruction"] == "buy a mug"


async def test_model_transport_errors_are_unscored():
    error = ModelTransportError("503", code="retries_exhausted", stage="model", detail={"attempts": 6})
    environments = FakeFactory()
    _, record = await play(build(FakeModel(error), environments))
    assert record["error"]["class"] == "model_transport" and record["steps"] == []
    assert environments.opened[0].terminated == []


async def test_an_unexpected_exception_is_infrastructure_with_its_traceback():
    _, record = await play(build(environments=FakeFactory(on_step=raising(ZeroDivisionError("oops")))))
    error = record["error"]
    assert (error["class"], error["code"], error["type"]) == ("infrastructure", "unexpected", "ZeroDivisionError")
    assert "ZeroDivisionError: oops" in error["traceback"]


async def test_the_deadline_is_infrastructure_and_says_where_it_hung():
    _, record = await play(build(environments=FakeFactory(on_step=hang), deadline_s=0.05))
    error = record["error"]
    assert (error["class"], error["code"], error["stage"]) == ("infrastructure", "deadline", "step")
    assert error["detail"] == {"step": 0, "request": "click"}


async def test_a_timeout_of_the_environments_own_is_not_the_deadline():
    _, record = await play(build(environments=FakeFactory(on_step=raising(TimeoutError("mine")))))
    assert (record["error"]["code"], record["error"]["message"]) == ("unexpected", "mine")


@pytest.mark.parametrize("stage", ["on_reset", "on_step", "on_terminate"])
async def test_cancelling_yields_a_cancelled_record_and_the_task_goes_on(stage):
    hooks = {stage: hang} | ({"on_step": lambda *_: answer()} if stage == "on_terminate" else {})
    environments = FakeFactory(**hooks)
    runtime = build(environments=environments, max_actions=2)
    task = asyncio.create_task(play(runtime))
    await asyncio.sleep(0.02)
    task.cancel()
    _, record = await task
    assert record["status"] == "cancelled"
    assert record["error"]["code"] == "cancelled" and record["error"]["message"]
    assert environments.open_leases == 0 and task.cancelling() == 0


async def test_a_failing_release_is_recorded_and_costs_no_score():
    environments = FakeFactory(on_close=raising(EnvironmentFaultError("409", code="stale", stage="close")))
    _, record = await play(build(environments=environments))
    assert record["status"] == "completed"
    assert record["cleanup_errors"] == [{"type": "EnvironmentFaultError", "message": "409"}]


async def test_a_failing_release_after_a_failure_keeps_the_first_error():
    environments = FakeFactory(on_step=raising(SICK), on_close=raising(OSError("socket")))
    _, record = await play(build(environments=environments))
    assert record["error"]["code"] == "http_500"
    assert record["error"]["cleanup_errors"] == [{"type": "OSError", "message": "socket"}]


async def test_a_release_that_hangs_does_not_hold_the_record(monkeypatch):
    monkeypatch.setattr(runtime_module, "CLOSE_TIMEOUT_S", 0.05)
    began = time.monotonic()
    _, record = await play(build(environments=FakeFactory(on_close=hang)))
    assert time.monotonic() - began < 10
    assert record["status"] == "completed" and record["cleanup_errors"][0]["type"] == "TimeoutError"


async def test_a_cancellation_while_releasing_does_not_lose_a_finished_episode():
    released = asyncio.Event()

    async def slow(*_):
        await asyncio.sleep(0.05)
        released.set()

    task = asyncio.create_task(play(build(environments=FakeFactory(on_close=slow))))
    await asyncio.sleep(0.02)
    task.cancel()
    _, record = await task
    assert record["status"] == "completed" and record["final"]["reward"] == 1.0
    await asyncio.wait_for(released.wait(), 5)  # the release goes on by itself


async def test_an_environment_that_cannot_be_opened_is_a_failed_record():
    class Broken(FakeFactory):
        def open(self):
            raise EnvironmentFaultError("no server", code="unreachable", stage="reset")

    _, record = await play(build(environments=Broken()))
    assert record["error"]["code"] == "unreachable" and record["reset"] is None


@pytest.mark.parametrize(
    ("hooks", "code"),
    [
        ({"on_reset": lambda *_: {"instruction": "x"}}, "protocol"),
        ({"on_step": lambda *_: "done"}, "protocol"),
        ({"on_step": lambda *_: answer(done=True, reward=float("nan"))}, "bad_reward"),
        ({"on_step": lambda *_: answer(done=True, reward=float("inf"))}, "bad_reward"),
        ({"on_step": lambda *_: answer(), "on_terminate": lambda *_: answer(done=False)}, "terminate_ignored"),
        ({"on_reset": lambda *_: reset_result(observation=page(state={"s": {1, 2}}))}, "unexpected"),
        ({"on_reset": lambda *_: reset_result(observation=page(text="\ud800"))}, "unexpected"),
    ],
)
async def test_answers_against_the_protocol_are_failed_records_never_exceptions(hooks, code):
    _, record = await play(build(environments=FakeFactory(**hooks), max_actions=2))
    assert record["status"] == "failed" and record["error"]["code"] == code


@pytest.mark.parametrize("selection", [None, "text", [{"skill_id": "a"}]])
async def test_a_provider_that_returns_nonsense_fails_the_episode_only(selection):
    class Nonsense(NoSkills):
        async def select(self, context):
            return selection

    _, record = await play(build(skills=Nonsense()))
    assert (record["error"]["code"], record["error"]["stage"]) == ("skills_protocol", "select_skills")


# --- skills, prompt, history


async def test_skills_enter_the_system_message_and_the_record_with_their_hash():
    bank = BankSkills([BankEntry(skill_id="budget", version="3", content="Mind the {budget} & braces.")])
    model = FakeModel()
    _, record = await play(build(model, skills=bank))
    skill = record["selected_skills"][0]
    assert skill["content_sha256"] == Skill(skill_id="budget", content="Mind the {budget} & braces.").content_sha256
    assert (skill["skill_id"], skill["version"]) == ("budget", "3")
    assert "- [budget] Mind the {budget} & braces." in model.asked[0][0][0]["content"]


async def test_a_provider_sees_public_facts_only():
    seen = []

    class Spy(NoSkills):
        async def select(self, context):
            seen.append(context)
            return []

    await play(build(skills=Spy()))
    assert "SECRET" not in seen[0].model_dump_json() and seen[0].instruction == "buy a mug"


async def test_history_last_n_stubs_what_the_model_sees_but_not_what_is_recorded():
    model = FakeModel()
    history = PromptConfig(history="last_n", last_n=1)
    _, record = await play(build(model, FakeFactory(steps=4), history=history))
    seen = [m["content"] for m in model.asked[-1][0] if m["role"] == "tool"]
    assert seen[0].startswith("[earlier observation omitted: click[a]") and seen[-1] == "click[a]"
    assert [m["content"] for m in record["conversation"] if m["role"] == "tool"] == ["click[a]"] * 4


async def test_progress_names_the_stage_for_the_watchdog():
    stages = []
    await play(build(), on_step=lambda p: stages.append((p.stage, p.step, p.request)))
    assert stages[0] == ("reset", 0, "") and stages[1] == ("select_skills", 0, "")
    assert stages[2:4] == [("model", 0, "completion 1"), ("step", 0, "click")]
    assert stages[-1][0] == "close"


async def test_many_episodes_share_one_runtime():
    environments = NullEnvironmentFactory(steps=3)
    runtime = build(_Searcher(), environments)
    outcomes = await asyncio.gather(*(runtime.run(job(task)) for task in range(20)))
    assert {o.record["episode_id"] for o in outcomes} == {job(task).episode_id for task in range(20)}
    assert all(o.record["final"]["reward"] == 1.0 for o in outcomes) and environments.leases_open == 0


class _Searcher(FakeModel):
    async def generate(self, messages, tools, *, seed):
        await asyncio.sleep(0)
        return call("search", query=str(seed))


async def test_the_same_job_gives_the_same_record_apart_from_time():
    def stable(outcome):
        record = expand(outcome.record)
        for key in ("started_at", "ended_at", "duration_s"):
            del record[key]
        text = json.dumps(record, sort_keys=True)
        for number, name in enumerate(dict.fromkeys(part.split('"')[0] for part in text.split('"id": "')[1:])):
            text = text.replace(f'"{name}"', f'"call-{number}"')
        return text

    first = await build().run(job())
    assert stable(first) == stable(await build().run(job()))


@pytest.mark.parametrize(
    "limits", [{"max_actions": 0}, {"max_actions": -3}, {"max_episode_tokens": 0}, {"deadline_s": 0}]
)
def test_limits_that_allow_nothing_are_refused(limits):
    with pytest.raises(ValueError, match=r"greater than"):
        RuntimeConfig(**limits)
