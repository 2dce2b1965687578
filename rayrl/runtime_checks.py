"""What the runtime accepts from the parts it drives, and how it describes what went wrong. Pure."""

from __future__ import annotations

import math
import traceback
from typing import Any, TypeVar

from rayrl.errors import Blame, EnvironmentFaultError, EpisodeError
from rayrl.schemas import JsonDict, ModelOutput, ProtocolError, StepResult

T = TypeVar("T")


def of_type(value: object, kind: type[T], stage: str) -> T:
    """``value``, which an environment returned in ``stage``.

    Raises:
        EnvironmentFaultError: it is of another type.
    """
    if not isinstance(value, kind):
        raise EnvironmentFaultError(
            f"{stage}() returned a {type(value).__name__}, not a {kind.__name__}", code="protocol", stage=stage
        )
    return value


def step_result(value: object, stage: str) -> StepResult:
    """As :func:`of_type`, with a finite reward: NaN would poison every mean it enters."""
    result = of_type(value, StepResult, stage)
    if not math.isfinite(result.reward):
        raise EnvironmentFaultError(f"the reward is {result.reward}", code="bad_reward", stage=stage)
    return result


def one_call(output: ModelOutput, tools: list[JsonDict]) -> ModelOutput:
    """The one-call rule for adapters that do not check it themselves: a call too many, none, or an unknown tool."""
    if output.protocol_error is not None or output.policy_failure is not None:
        return output
    names = {tool["function"]["name"] for tool in tools}
    if len(output.tool_calls) == 1 and output.tool_calls[0].name in names:
        return output
    if not output.tool_calls:
        error = ProtocolError(code="no_tool_call", message="the reply holds no tool call.")
    elif len(output.tool_calls) > 1:
        error = ProtocolError(code="multiple_tool_calls", message=f"the reply holds {len(output.tool_calls)} calls.")
    else:
        error = ProtocolError(code="unknown_tool", message=f"there is no tool {output.tool_calls[0].name!r} here.")
    return output.model_copy(update={"protocol_error": error})


def describe_error(error: BaseException, *, stage: str) -> dict[str, Any]:
    """The ``error`` object of a failed record. An unexpected exception is an infrastructure failure with its
    traceback."""
    if isinstance(error, EpisodeError):
        described: dict[str, Any] = {
            "class": error.blame.value,
            "code": error.code,
            "stage": error.stage or stage,
            "type": type(error).__name__,
            "message": str(error),
        }
        if error.detail:
            described["detail"] = error.detail
        return described
    return {
        "class": Blame.INFRASTRUCTURE.value,
        "code": "unexpected",
        "stage": stage,
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error))[-8000:],
    }
