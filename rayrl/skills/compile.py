"""From many cards to a few chunks: cluster by mechanism, merge near-duplicates, compile to at most 16 candidates.

Deterministic, and independent of the order of cards: they are sorted by id first. Every card ends up in exactly one
cluster. Clusters that say nearly the same are merged, whatever their mechanism is called.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np

from rayrl.errors import DataError
from rayrl.schemas import Frozen, canonical_json, sha256_hex
from rayrl.skills.bank import (
    EvidenceRef,
    LeakCheck,
    SkillBank,
    SkillRecord,
    make_bank,
    next_version,
)
from rayrl.skills.cards import Card, Deployable
from rayrl.skills.estimators import FloatArray
from rayrl.skills.providers import BankEntry

MAX_CHUNKS = 16
SAME_MECHANISM = 0.35
"""Cosine from which two cards of one mechanism are one cluster."""
NEAR_DUPLICATE = 0.82
"""Cosine from which two clusters are one, whatever they are called."""
REWRITE = 0.5
"""Cosine from which a chunk is a rewrite of one in the bank rather than a new one."""
MAX_REFS = 50
DIMENSIONS = 1024

Encoder = Callable[[Sequence[str]], FloatArray]
_WORD = re.compile(r"[a-z0-9]+|[\u3400-\u9fff]")


def hashed_encoder(texts: Sequence[str]) -> FloatArray:
    """Unit vectors of words and word pairs, hashed: no model, no download, the same everywhere. Shape (n, 1024)."""
    out = np.zeros((len(texts), DIMENSIONS))
    for row, text in enumerate(texts):
        words = _WORD.findall(text.casefold())
        for gram in [*words, *(f"{a} {b}" for a, b in pairwise(words))]:
            value = int(sha256_hex(gram)[:8], 16)
            out[row, value % DIMENSIONS] += 1.0 if value & 0x80000000 else -1.0
    norms = np.linalg.norm(out, axis=1, keepdims=True)
    unit: FloatArray = out / np.where(norms > 0, norms, 1.0)
    return unit


class Cluster(Frozen):
    """Cards that say the same. ``lead`` is the card whose words are used."""

    cluster_id: str
    mechanism: str
    cards: list[str]
    lead: str
    weight: float
    """Sum of confidences: how much evidence there is."""
    merged: list[str] = []
    """Ids of clusters that were taken in as near-duplicates."""


def cluster_cards(cards: Sequence[Card], encode: Encoder = hashed_encoder) -> list[Cluster]:
    """Clusters, heaviest first; see the module docstring.

    Raises:
        DataError: two cards share an id.
    """
    ordered = sorted(cards, key=lambda c: c.card_id)
    if len({c.card_id for c in ordered}) != len(ordered):
        raise DataError("two cards share an id")
    if not ordered:
        return []
    # equal texts are encoded once: rules analysts write the same words many times
    texts = sorted({c.deployable.text() for c in ordered})
    vectors = dict(zip(texts, encode(texts), strict=True))
    groups: list[list[Card]] = []
    leaders: dict[str, list[tuple[FloatArray, list[Card]]]] = defaultdict(list)
    for card in ordered:
        vector = vectors[card.deployable.text()]
        near = [(float(vector @ v), members) for v, members in leaders[card.deployable.mechanism]]
        score, members = max(near, key=lambda item: item[0], default=(-1.0, []))
        if score >= SAME_MECHANISM:
            members.append(card)
        else:
            members = [card]
            leaders[card.deployable.mechanism].append((vector, members))
            groups.append(members)
    return _merge([_cluster(group) for group in groups], {c.card_id: c for c in ordered}, vectors)


def _cluster(members: list[Card], merged: Sequence[str] = ()) -> Cluster:
    ids = sorted(c.card_id for c in members)
    lead = min(members, key=lambda c: (-c.confidence, c.card_id))
    return Cluster(
        cluster_id=f"cluster-{sha256_hex(canonical_json(ids))[:12]}",
        mechanism=lead.deployable.mechanism,
        cards=ids,
        lead=lead.card_id,
        weight=round(sum(c.confidence for c in members), 6),
        merged=sorted(merged),
    )


def _merge(clusters: list[Cluster], by_id: dict[str, Card], vectors: dict[str, FloatArray]) -> list[Cluster]:
    """Take near-duplicates into the heavier cluster."""
    kept: list[Cluster] = []
    for cluster in sorted(clusters, key=lambda c: (-c.weight, c.cluster_id)):
        vector = vectors[by_id[cluster.lead].deployable.text()]
        for place, other in enumerate(kept):
            if float(vector @ vectors[by_id[other.lead].deployable.text()]) >= NEAR_DUPLICATE:
                members = [by_id[i] for i in (*other.cards, *cluster.cards)]
                joined = _cluster(members, [*other.merged, cluster.cluster_id])
                kept[place] = joined.model_copy(update={"lead": other.lead, "mechanism": other.mechanism})
                break
        else:
            kept.append(cluster)
    return sorted(kept, key=lambda c: (-c.weight, c.cluster_id))


class Candidate(Frozen):
    """A chunk proposed for the bank."""

    skill_id: str
    action: Literal["ADD", "REWRITE"]
    rewrites: str | None = None
    version: str = "1"
    content: str
    record: SkillRecord


def render(chunk: Deployable) -> str:
    """The text of a chunk as it enters a prompt: title, when, procedure, verify, avoid."""
    steps = " ".join(f"({i}) {step}" for i, step in enumerate(chunk.procedure, 1))
    parts = [f"{chunk.title}.", f"When: {chunk.applicable_when}.", f"Procedure: {steps}"]
    parts += [f"Verify: {chunk.verify}"] if chunk.verify else []
    parts += [f"Avoid: {chunk.avoid}"] if chunk.avoid else []
    return "\n".join(parts)


def compile_chunks(
    clusters: Sequence[Cluster],
    cards: Sequence[Card],
    *,
    bank: SkillBank | None = None,
    encode: Encoder = hashed_encoder,
    limit: int = MAX_CHUNKS,
) -> list[Candidate]:
    """At most ``limit`` candidates from the heaviest clusters; a chunk near one of ``bank`` is a rewrite of it."""
    by_id = {c.card_id: c for c in cards}
    taken: dict[str, int] = defaultdict(int)
    existing = list(bank.active()) if bank is not None else []
    old = encode([s.content for s in existing]) if existing else None
    out: list[Candidate] = []
    for cluster in clusters[:limit]:
        members = [by_id[i] for i in cluster.cards]
        chunk = by_id[cluster.lead].deployable
        content = render(chunk)
        target: BankEntry | None = None
        if old is not None:
            scores = old @ encode([content])[0]
            best = int(np.argmax(scores))
            target = existing[best] if scores[best] >= REWRITE else None
        if target is not None and target.content == content:
            continue  # the bank says it already
        name = re.sub(r"[^a-z0-9]+", "-", chunk.mechanism.casefold()).strip("-") or "chunk"
        taken[name] += 1
        name = name if taken[name] == 1 else f"{name}-{taken[name]}"
        record = SkillRecord(
            title=chunk.title,
            mechanism=chunk.mechanism,
            evidence_for=_refs(members, "success"),
            evidence_against=_refs(members, "failure"),
            builder=by_id[cluster.lead].builder,
            cluster=cluster.cluster_id,
            cards=cluster.cards[:MAX_REFS],
            leak_check=LeakCheck(checked=True, passed=True),
        )
        if target is None:
            out.append(Candidate(skill_id=_fresh(name, existing), action="ADD", content=content, record=record))
            continue
        family = (bank.record(target.skill_id).family if bank is not None else None) or target.skill_id
        version = next_version(target.version)
        out.append(
            Candidate(
                skill_id=_fresh(f"{target.skill_id}-v{version}", existing),
                action="REWRITE",
                rewrites=target.skill_id,
                version=version,
                content=content,
                record=record.model_copy(update={"family": family}),
            )
        )
    return out


def _fresh(name: str, existing: list[BankEntry]) -> str:
    """A name the bank does not have yet."""
    known = {s.skill_id for s in existing}
    number, found = 2, name
    while found in known:
        found, number = f"{name}-{number}", number + 1
    return found


def _refs(cards: list[Card], kind: str) -> list[EvidenceRef]:
    """Episodes where the mechanism helped (success) or its absence hurt (failure); most confident first, bounded."""
    chosen = sorted((c for c in cards if c.kind == kind), key=lambda c: (-c.confidence, c.card_id))
    return [c.source for c in chosen[:MAX_REFS]]


def candidate_bank(candidates: Sequence[Candidate], bank: SkillBank | None = None) -> SkillBank:
    """A snapshot of the bank (if any) with the candidates added; a rewrite joins the family of what it rewrites."""
    skills = list(bank.skills) if bank is not None else []
    records = dict(bank.records) if bank is not None else {}
    for candidate in candidates:
        skills.append(
            BankEntry(
                skill_id=candidate.skill_id,
                version=candidate.version,
                content=candidate.content,
                metadata={"title": candidate.record.title, "mechanism": candidate.record.mechanism},
            )
        )
        records[candidate.skill_id] = candidate.record
        if candidate.rewrites is not None and bank is not None:
            old = records.get(candidate.rewrites, SkillRecord())
            records[candidate.rewrites] = old.model_copy(update={"family": candidate.record.family})
    return make_bank(skills, records, bank_version="candidates", parent=bank)
