"""Conformance tests that a user runs on their own environment, model or skill provider (``rayrl check``).

Each check drives the real object through the protocol and returns findings; it never judges quality, only the contract:
what the runtime, the pool and resume rely on.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import jsonschema

from rayrl.environments.base import Environment, EnvironmentFactory
from rayrl.models.base import ChatModel
from rayrl.schemas import (
    EpisodeJob,
    JsonDict,
    ModelOutput,
    Observation,
    PublicContext,
    ResetResult,
    Skill,
    StepResult,
    ToolCall,
    canonical_json,
    episode_seed,
)
from rayrl.skills.base import SkillProvider

CALL_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Finding:
    """One clause of the contract and whether it holds."""

    clause: str
    ok: bool
    detail: str = ""


class _Checker:
    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def note(self, clause: str, ok: bool, detail: str = "") -> bool:
        self.findings.append(Finding(clause, ok, "" if ok else detail))
        return ok

    async def call(self, clause: str, awaitable: Awaitable[Any]) -> Any:
        """Await with a time-out; a raised exception is a finding and yields ``None``."""
        try:
            return await asyncio.wait_for(awaitable, CALL_TIMEOUT_S)
        except TimeoutError:
            self.note(clause, False, f"no answer within {CALL_TIMEOUT_S:g} s")
        except Exception as error:
            self.note(clause, False, f"{type(error).__name__}: {error}")
        return None


def job_for(task_id: int) -> EpisodeJob:
    """The job a check plays."""
    return EpisodeJob(task_id=task_id, sample_id=0, seed=episode_seed(0, task_id, 0), split="check")


def check_identity(checker: _Checker, target: Any) -> None:
    """``identity()`` is a pure JSON object."""
    try:
        first, second = target.identity(), target.identity()
        canonical_json(first)
    except Exception as error:
        checker.note("identity() is a JSON object", False, f"{type(error).__name__}: {error}")
        return
    checker.note("identity() is a JSON object", isinstance(first, dict), f"it is a {type(first).__name__}")
    checker.note("identity() is the same twice", first == second, f"{first} then {second}")
    text = canonical_json(first).decode().lower()
    checker.note("identity() holds no address or key", "http://" not in text and "api_key" not in text, text[:200])


async def check_environment(factory: Any, *, task_id: int = 0, max_steps: int = 50) -> list[Finding]:
    """The environment contract: reset repeatable, tools legal, terminate ends, close idempotent, concurrency
    isolated."""
    checker = _Checker()
    if not checker.note(
        "offers identity, start, open, aclose", isinstance(factory, EnvironmentFactory), "a method is missing"
    ):
        return checker.findings
    check_identity(checker, factory)
    await checker.call("start()", factory.start())
    try:
        first = await _reset(checker, factory, task_id)
        if first is not None:
            environment, reset = first
            if not reset.observation.tools or any(map(tool_problem, reset.observation.tools)):
                await checker.call("close()", environment.close())  # there is nothing that could be called
            else:
                await _play(checker, environment, reset, max_steps)
                await _again(checker, factory, task_id, reset)
                await _terminate(checker, factory, task_id)
                await _isolated(checker, factory, task_id)
        leases = getattr(factory, "leases_open", None)
        if isinstance(leases, int):
            checker.note("no lease is open after all closes", leases == 0, f"{leases} are open")
    finally:
        await checker.call("aclose()", factory.aclose())
        await checker.call("aclose() twice", factory.aclose())
    return checker.findings


async def _reset(checker: _Checker, factory: Any, task_id: int) -> tuple[Environment, ResetResult] | None:
    environment = factory.open()
    if not checker.note(
        "open() gives reset, step, terminate, close", isinstance(environment, Environment), "a method is missing"
    ):
        return None
    reset = await checker.call("reset()", environment.reset(job_for(task_id)))
    if not checker.note("reset() returns a ResetResult", isinstance(reset, ResetResult), str(type(reset))):
        await checker.call("close() after a failed reset", environment.close())
        return None
    _check_observation(checker, reset.observation)
    return environment, reset


def _check_observation(checker: _Checker, observation: Observation) -> None:
    checker.note("the observation has text", bool(observation.text.strip()), "it is empty")
    checker.note("the observation names its version", bool(observation.version), "version is empty")
    problems = [problem for tool in observation.tools if (problem := tool_problem(tool))]
    checker.note("tools are OpenAI function tools", not problems, "; ".join(problems[:3]))
    checker.note("at least one tool before the end", bool(observation.tools), "there are none")


def tool_problem(tool: JsonDict) -> str:
    """Why a tool is no OpenAI function tool, or an empty string."""
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict) or not function.get("name"):
        return f"{tool!r:.80} is no function tool"
    try:
        jsonschema.Draft202012Validator.check_schema(function.get("parameters", {}))
    except jsonschema.SchemaError as error:
        return f"{function['name']}: parameters are no JSON Schema: {error.message}"
    return ""


def example_call(tools: list[JsonDict], index: int) -> ToolCall:
    """A legal call, another tool each turn: enum values first, else plain strings and numbers."""
    tool = tools[index % len(tools)]["function"]
    arguments: JsonDict = {}
    properties = tool.get("parameters", {}).get("properties", {})
    for name in tool.get("parameters", {}).get("required", []):
        schema = properties.get(name, {})
        if schema.get("enum"):
            arguments[name] = schema["enum"][index % len(schema["enum"])]
        else:
            arguments[name] = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}.get(
                str(schema.get("type")), "check"
            )
    return ToolCall(id=f"check-{index}", name=tool["name"], arguments=arguments)


async def _play(checker: _Checker, environment: Environment, reset: ResetResult, max_steps: int) -> None:
    observation, done = reset.observation, False
    for index in range(max_steps):
        if not observation.tools:
            break
        result = await checker.call("step()", environment.step(example_call(observation.tools, index), seed=index))
        if not isinstance(result, StepResult):
            checker.note("step() returns a StepResult", False, str(type(result)))
            break
        observation, done = result.observation, result.done
        if done:
            break
    else:
        checker.note(f"a legal call works {max_steps} times", True)
    if done:
        checker.note("a done step has a finite reward", math.isfinite(result.reward), f"reward is {result.reward}")
    await checker.call("close()", environment.close())
    await checker.call("close() twice", environment.close())


async def _again(checker: _Checker, factory: Any, task_id: int, reset: ResetResult) -> None:
    second = await _reset(_Checker(), factory, task_id)
    if second is None:
        checker.note("reset() works again after close()", False, "the second reset failed")
        return
    environment, again = second
    same = again.observation.text == reset.observation.text and again.instruction == reset.instruction
    checker.note("the same job gives the same first observation", same, "seeded runs could not be reproduced")
    await checker.call("close()", environment.close())


async def _terminate(checker: _Checker, factory: Any, task_id: int) -> None:
    opened = await _reset(_Checker(), factory, task_id)
    if opened is None:
        return
    environment, _ = opened
    result = await checker.call("terminate()", environment.terminate("action_limit"))
    if isinstance(result, StepResult):
        checker.note("terminate() ends the episode", result.done, "done is false")
    await checker.call("close() after terminate()", environment.close())


async def _isolated(checker: _Checker, factory: Any, task_id: int) -> None:
    pairs = [await _reset(_Checker(), factory, task_id) for _ in range(2)]
    opened = [pair for pair in pairs if pair is not None]
    checker.note("two episodes can be open at once", len(opened) == 2, "the second reset failed")
    if len(opened) == 2:
        (a, first), (b, _) = opened
        await checker.call("step()", a.step(example_call(first.observation.tools, 0), seed=0))
        result = await checker.call("step()", b.terminate("action_limit"))
        checker.note("episodes do not end each other", isinstance(result, StepResult) and result.done, "they do")
    for environment, _ in opened:
        await checker.call("close()", environment.close())


async def check_model(model: Any, *, tools: list[JsonDict]) -> list[Finding]:
    """The model contract: one normalised outcome per call, concurrent calls, idempotent aclose."""
    checker = _Checker()
    if not checker.note("offers identity, generate, aclose", isinstance(model, ChatModel), "a method is missing"):
        return checker.findings
    check_identity(checker, model)
    messages = [
        {"role": "system", "content": "You call exactly one tool per turn."},
        {"role": "user", "content": "Task: look for a blue mug.\nObservation:\n页面：搜索首页\n"},
    ]
    try:
        output = await checker.call("generate()", model.generate(messages, tools, seed=1))
        _check_output(checker, output, tools)
        calls = [model.generate(messages, tools, seed=n) for n in range(4)]
        several = await checker.call("four calls at once", asyncio.gather(*calls, return_exceptions=True))
        if several is not None:
            bad = [item for item in several if not isinstance(item, ModelOutput)]
            checker.note("four calls at once", not bad, f"{bad[:1]}")
    finally:
        await checker.call("aclose()", model.aclose())
        await checker.call("aclose() twice", model.aclose())
    return checker.findings


def _check_output(checker: _Checker, output: Any, tools: list[JsonDict]) -> None:
    if not checker.note("generate() returns a ModelOutput", isinstance(output, ModelOutput), str(type(output))):
        return
    outcomes = (output.protocol_error is not None) + (output.policy_failure is not None)
    legal = outcomes == 1 or (outcomes == 0 and len(output.tool_calls) == 1)
    checker.note(
        "exactly one of: one tool call, protocol_error, policy_failure",
        legal,
        f"{len(output.tool_calls)} calls, {output.protocol_error}, {output.policy_failure}",
    )
    names = {tool["function"]["name"] for tool in tools}
    if outcomes == 0 and output.tool_calls:
        checker.note("the call names an offered tool", output.tool_calls[0].name in names, output.tool_calls[0].name)


async def check_skills(provider: Any) -> list[Finding]:
    """The provider contract: pure selection, skills with content, repeatable."""
    checker = _Checker()
    if not checker.note("offers identity and select", isinstance(provider, SkillProvider), "a method is missing"):
        return checker.findings
    check_identity(checker, provider)
    context = PublicContext(
        job=job_for(0),
        instruction="Buy a blue mug below 20.",
        persona={},
        observation_state={"page_type": "search_home"},
    )
    skills = await checker.call("select()", provider.select(context))
    good = isinstance(skills, list) and all(isinstance(item, Skill) for item in skills)
    checker.note("select() returns a list of Skill", good, f"{type(skills).__name__}")
    if good:
        again = await checker.call("select()", provider.select(context))
        checker.note("the same context selects the same skills", again == skills, "the selection changed")
        ids = [skill.skill_id for skill in skills]
        checker.note("skill ids are unique within a selection", len(set(ids)) == len(ids), f"{ids}")
        checker.note("every skill has content", all(skill.content.strip() for skill in skills), "one is empty")
    return checker.findings


CheckFunction = Callable[..., Awaitable[list[Finding]]]
