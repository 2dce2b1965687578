"""Small hand-written environments and models: each does one thing, so that a test says what it provokes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from rayrl.environments.base import Environment
from rayrl.schemas import (
    EpisodeJob,
    ModelOutput,
    Observation,
    ResetResult,
    StepResult,
    TokenTrace,
    ToolCall,
    Usage,
    episode_seed,
)

JsonDict = dict[str, Any]


def tool(name: str, argument: str = "value", *values: str) -> JsonDict:
    schema: JsonDict = {"type": "string", **({"enum": list(values)} if values else {})}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": name,
            "parameters": {
                "type": "object",
                "properties": {argument: schema},
                "required": [argument],
                "additionalProperties": False,
            },
        },
    }


TOOLS = [tool("search", "query"), tool("click", "value", "a", "b")]


def job(task_id: int = 3, sample_id: int = 0, *, seed: int = 0, split: str = "train") -> EpisodeJob:
    return EpisodeJob(task_id=task_id, sample_id=sample_id, seed=episode_seed(seed, task_id, sample_id), split=split)


def page(text: str = "page", **more: Any) -> Observation:
    return Observation(**{"text": text, "state": {"page": text}, "version": "v1", "tools": TOOLS, **more})


def reset_result(**more: Any) -> ResetResult:
    return ResetResult(
        **{"instruction": "buy a mug", "observation": page("start"), "environment_version": "fake-1", **more}
    )


def answer(text: str = "page", *, done: bool = False, reward: float = 0.0, **more: Any) -> StepResult:
    return StepResult(**{"action": text, "observation": page(text), "done": done, "reward": reward, **more})


class FakeEnvironment:
    """Ends with reward 1 after ``steps`` steps; every hook can be replaced."""

    def __init__(self, factory: FakeFactory) -> None:
        self.factory = factory
        self.calls: list[ToolCall] = []
        self.seeds: list[int] = []
        self.terminated: list[str] = []
        self.closes = 0

    async def reset(self, job: EpisodeJob) -> ResetResult:
        self.factory.open_leases += 1
        return await _maybe(self.factory.on_reset, self, job) or reset_result(private={"goal": {"asin": "SECRET"}})

    async def step(self, call: ToolCall, *, seed: int) -> StepResult:
        self.calls.append(call)
        self.seeds.append(seed)
        result = await _maybe(self.factory.on_step, self, call)
        if result is not None:
            return result
        done = len(self.calls) >= self.factory.steps
        return answer(
            f"{call.name}[{next(iter(call.arguments.values()), '')}]",
            done=done,
            reward=float(done),
            reward_detail={"r_success": 1} if done else {},
            feedback={"action": call.name, "valid": True, "reason": "executed", "message": ""},
            termination_reason="finished" if done else None,
        )

    async def terminate(self, reason: str) -> StepResult:
        self.terminated.append(reason)
        result = await _maybe(self.factory.on_terminate, self, reason)
        return result or answer(reason, done=True, termination_reason=reason)

    async def close(self) -> None:
        self.closes += 1
        if self.closes == 1:
            self.factory.open_leases -= 1
        await _maybe(self.factory.on_close, self)


class FakeFactory:
    def __init__(
        self,
        steps: int = 3,
        *,
        on_reset: Callable[..., Any] | None = None,
        on_step: Callable[..., Any] | None = None,
        on_terminate: Callable[..., Any] | None = None,
        on_close: Callable[..., Any] | None = None,
    ) -> None:
        self.steps = steps
        self.on_reset, self.on_step, self.on_terminate, self.on_close = on_reset, on_step, on_terminate, on_close
        self.opened: list[FakeEnvironment] = []
        self.open_leases = 0

    @property
    def leases_open(self) -> int:
        return self.open_leases

    def identity(self) -> JsonDict:
        return {"kind": "fake", "version": "fake-1", "steps": self.steps}

    async def start(self) -> None:
        pass

    def open(self) -> Environment:
        self.opened.append(FakeEnvironment(self))
        return self.opened[-1]

    async def aclose(self) -> None:
        pass


class FakeModel:
    """Answers with ``outputs`` in order (exceptions are raised, callables called), then with clicks for ever."""

    def __init__(self, *outputs: Any) -> None:
        self.outputs = list(outputs)
        self.asked: list[tuple[list[JsonDict], list[JsonDict], int]] = []

    def identity(self) -> JsonDict:
        return {"kind": "fake"}

    async def generate(self, messages: list[JsonDict], tools: list[JsonDict], *, seed: int) -> ModelOutput:
        self.asked.append(([dict(m) for m in messages], tools, seed))
        output = self.outputs.pop(0) if self.outputs else call("click", value="a")
        if callable(output):
            output = await _maybe(output)
        if isinstance(output, BaseException):
            raise output
        return output

    async def aclose(self) -> None:
        pass


_COUNT = iter(range(10**9))


def call(
    name: str, *, usage: tuple[int, int] = (10, 2), tokens: TokenTrace | None = None, **arguments: Any
) -> ModelOutput:
    made = ToolCall(id=f"c{next(_COUNT)}", name=name, arguments=arguments)
    return ModelOutput(
        tool_calls=[made],
        usage=Usage(prompt_tokens=usage[0], completion_tokens=usage[1]),
        tokens=tokens,
        finish_reason="tool_calls",
    )


async def hang(*_: Any) -> None:
    await asyncio.Event().wait()


def raising(error: BaseException) -> Callable[..., Any]:
    def hook(*_: Any) -> None:
        raise error

    return hook


async def _maybe(hook: Callable[..., Any] | None, *args: Any) -> Any:
    if hook is None:
        return None
    result = hook(*args)
    return await result if isinstance(result, Awaitable) else result


class OptionModel(FakeModel):
    """A model of somebody's own, made from options."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def identity(self) -> JsonDict:
        return {"kind": "own", **self.options}


class OptionSkills:
    """A skill provider of somebody's own."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def identity(self) -> JsonDict:
        return {"kind": "own", **self.options}

    async def select(self, context: Any) -> list[Any]:
        return []


class OtherFactory(FakeFactory):
    """Another environment than :class:`FakeFactory`, made from options."""

    def __init__(self, **options: Any) -> None:
        super().__init__(steps=int(options.get("steps", 2)))
        self.options = options

    def identity(self) -> JsonDict:
        return {"kind": "other", **self.options}
