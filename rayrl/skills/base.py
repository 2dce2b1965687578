"""The SkillProvider protocol: which skills a given episode gets."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from rayrl.schemas import PublicContext, Skill


@runtime_checkable
class SkillProvider(Protocol):
    """Chooses skills from public information alone."""

    def identity(self) -> dict[str, Any]:
        """What enters the fingerprint: bank hash, index, model, prompt. Pure."""
        ...

    async def select(self, context: PublicContext) -> list[Skill]:
        """The skills for this episode, in prompt order."""
        ...
