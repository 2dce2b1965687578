"""Who is to blame: one taxonomy for every failure the system can meet.

Two families:

* ``UserError`` and its children: something the person who typed the command can mend. The message names the file, line
  or key and says what to do; the command line prints it without a traceback.
* ``EpisodeError`` and its children: an attempt at an episode ended without a scorable result. Each carries a ``Blame``,
  the ``stage`` it happened in and a machine-readable ``code``. Only these make a trace ``failed``; what the *policy*
  does wrong (a bad tool call, running out of tokens) is scored, never raised.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any


class Blame(StrEnum):
    """The one party answerable for an outcome."""

    MODEL_TRANSPORT = "model_transport"
    """The model endpoint could not be reached, refused, or answered with something that is no completion."""
    MODEL_PROTOCOL = "model_protocol"
    """HTTP 200 with a completion that breaks the one-call rule; recorded in the step, never raised."""
    POLICY = "policy"
    """The model's own decision ended the episode (token limit, context overflow); scored zero, never raised."""
    ENVIRONMENT = "environment"
    """The environment server failed, lost the lease, or answered against its protocol."""
    INFRASTRUCTURE = "infrastructure"
    """Deadline, a dead worker, a full disk: nothing the policy or the environment did."""


class RayrlError(Exception):
    """Base of every error rayrl raises on purpose."""


class UserError(RayrlError):
    """The caller can mend this; printed without a traceback. ``exit_code`` is what the command returns."""

    exit_code = 2


class ConfigError(UserError):
    """A config file or override is wrong. The message names file and key."""


class DataError(UserError):
    """An input file is wrong. The message names file and line or row."""


class RunConflictError(UserError):
    """The run directory belongs to another experiment, or another process is working in it."""

    exit_code = 3


class GuardError(UserError):
    """The test-split guard refused."""

    exit_code = 4


class ConformanceError(UserError):
    """A user's own environment, model or provider does not keep the protocol."""

    exit_code = 5


class RunIncompleteError(RayrlError):
    """A run stopped before every job had a result; it can be resumed."""

    exit_code = 6


class LedgerError(RayrlError):
    """The ledger does not close: some admitted attempt produced no terminal record. Always a bug, always loud."""

    exit_code = 7


class EpisodeError(RayrlError):
    """An attempt ended without a scorable result.

    Args:
        message: what happened, without secrets.
        code: machine-readable, snake_case.
        stage: ``select_skills``, ``reset``, ``model``, ``step``, ``terminate``, ``close``, ``worker``.
        detail: JSON-able facts (status, attempts, ...); it enters the trace, so no secrets.
    """

    blame: Blame = Blame.INFRASTRUCTURE
    exit_code = 6
    """Where one reaches the command line (the environment was not there at the start): try again later."""

    def __init__(self, message: str, *, code: str, stage: str = "", detail: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.stage = stage
        self.detail = detail or {}

    def __reduce__(self) -> tuple[Any, ...]:
        # keyword-only arguments do not survive default exception pickling between Ray workers
        return _rebuild_episode_error, (type(self), str(self), self.code, self.stage, self.detail)


def _rebuild_episode_error(
    cls: type[EpisodeError], message: str, code: str, stage: str, detail: dict[str, Any]
) -> EpisodeError:
    return cls(message, code=code, stage=stage, detail=detail)


class ModelTransportError(EpisodeError):
    """Retries within the adapter are spent (or the status is not retryable)."""

    blame = Blame.MODEL_TRANSPORT


class ContextOverflowError(EpisodeError):
    """The conversation no longer fits the model. The runtime turns it into a scored policy failure."""

    blame = Blame.POLICY


class EnvironmentFaultError(EpisodeError):
    """The environment failed, or broke its protocol."""

    blame = Blame.ENVIRONMENT


class LeaseLostError(EnvironmentFaultError):
    """The lease expired or was taken away; the episode cannot go on."""


class DeadlineExceededError(EpisodeError):
    """The wall-clock deadline of the episode passed."""


class WorkerDiedError(EpisodeError):
    """The actor or node that ran the attempt is gone."""


class BudgetExhaustedError(RayrlError):
    """The spending cap is reached: no new episodes start."""


def did_you_mean(word: str, known: list[str]) -> str:
    """`` (did you mean 'x'?)`` for a near miss among ``known``, else an empty string."""
    import difflib

    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""
