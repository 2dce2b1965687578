"""The trained gate as a SkillProvider: the skill bank is the memory, the instruction is the question.

What was learned flows back into rollouts: the gate decides whether this episode gets skills at all, and how many.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from rayrl.errors import ConfigError, DataError
from rayrl.retrieval.gate import GateMode, RetrievalGate
from rayrl.retrieval.pools import Memory, MemoryPool, Question
from rayrl.schemas import PublicContext, Skill, sha256_hex


class GateSkillProvider:
    """Chooses skills with a :class:`RetrievalGate` trained on the bank (memory ids are skill ids).

    In ``shadow`` mode nothing is injected; what would have been is kept in :attr:`shadowed`, newest last.
    """

    def __init__(self, gate: str | Path, bank: Sequence[Skill] | str | Path, *, mode: GateMode = "enforce") -> None:
        """Load.

        Args:
            gate: gate folder.
            bank: skills, or a JSONL file of them.
            mode: off, shadow or enforce.

        Raises:
            ConfigError: the bank lacks skills the gate was trained with.
        """
        self._gate = RetrievalGate(Path(gate), mode=mode)
        skills = read_bank(Path(bank)) if isinstance(bank, str | Path) else list(bank)
        self._skills: Mapping[str, Skill] = {s.skill_id: s for s in skills}
        known = [m.id for m in self._gate.index.memories if m.domain != "distractor"]
        missing = [i for i in known if i not in self._skills]
        if missing:
            raise ConfigError(f"the gate knows skills that the bank does not hold: {', '.join(missing[:5])}")
        self._identity = {
            "provider": "retrieval_gate",
            "mode": mode,
            "policy": self._gate.meta["policy_checksum"],
            "bank": sha256_hex("".join(f"{s.skill_id}:{s.version}:{s.content_sha256}" for s in skills)),
        }
        self.shadowed: list[tuple[str, tuple[str, ...]]] = []

    def identity(self) -> dict[str, Any]:
        """See :class:`rayrl.skills.base.SkillProvider`."""
        return self._identity

    async def select(self, context: PublicContext) -> list[Skill]:
        """Skills for this episode, nearest first; the encoder runs in a thread."""
        decision = await asyncio.to_thread(self._gate.decide, context.instruction)
        chosen = tuple(m.id for m in decision.memories if m.id in self._skills)
        if not decision.act:
            self.shadowed.append((context.job.episode_id, chosen))
            return []
        return [self._skills[i] for i in chosen]


def read_bank(path: Path) -> list[Skill]:
    """Skills from JSONL.

    Raises:
        DataError: missing file or a line that is no skill.
    """
    if not path.is_file():
        raise DataError(f"skill bank {path} does not exist")
    skills = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if line.strip():
            try:
                skills.append(Skill.model_validate(orjson.loads(line)))
            except ValueError as error:
                raise DataError(f"{path}:{number}: not a skill ({type(error).__name__})") from None
    return skills


def bank_as_pool(name: str, skills: Sequence[Skill], questions: Sequence[tuple[str, Sequence[str]]]) -> MemoryPool:
    """A skill bank as a memory pool to train a gate on.

    Args:
        name: of the pool.
        skills: the bank.
        questions: instructions with the ids of the skills that helped (none: no skill helped).
    """
    memories = tuple(
        Memory(id=s.skill_id, text=s.content, category=str(s.metadata.get("category", "")), domain=name) for s in skills
    )
    asked = tuple(
        Question(id=f"q{i}", text=text, answer_ids=tuple(ids), domain=name) for i, (text, ids) in enumerate(questions)
    )
    return MemoryPool(name=name, memories=memories, questions=asked).check()
