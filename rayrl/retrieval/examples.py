"""A question that a trained gate answers from its memory, found by asking the gate itself."""

from __future__ import annotations

import re

from rayrl.retrieval.gate import RetrievalGate

LONGEST = 160


def suggest(gate: RetrievalGate, tried: int = 12) -> str | None:
    """The opening sentence of the memory for which the gate most probably retrieves, of ``tried`` spread over it.

    ``None`` where it retrieves for none of them.
    """
    memories = gate.index.memories
    spread = memories[:: max(1, len(memories) // tried)][:tried]
    found: list[tuple[float, str]] = []
    for memory in spread:
        text = re.split(r"(?<=[.!?。！？])\s*", memory.text.strip(), maxsplit=1)[0][:LONGEST]
        decision = gate.decide(text) if text else None
        if decision is not None and decision.retrieve:
            found.append((decision.probability, text))
    return max(found)[1] if found else None
