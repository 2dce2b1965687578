"""The ChatModel protocol: what a policy must offer to be rolled out."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from rayrl.schemas import ModelOutput


@runtime_checkable
class ChatModel(Protocol):
    """A policy behind a chat interface. One instance is shared by all concurrent episodes of an actor.

    ``generate`` returns a :class:`ModelOutput` for everything the *model* does, right or wrong, and raises only
    :class:`~rayrl.errors.ModelTransportError` (no completion could be had) or
    :class:`~rayrl.errors.ContextOverflowError` (the conversation does not fit). It must not retry a completion it got.
    """

    def identity(self) -> dict[str, Any]:
        """What makes this model this model; enters the fingerprint. No address, no key. Pure, no I/O on the network."""
        ...

    async def generate(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], *, seed: int) -> ModelOutput:
        """One completion for OpenAI-style ``messages`` with exactly one call out of ``tools`` expected."""
        ...

    async def aclose(self) -> None:
        """Release connections. Idempotent."""
        ...
