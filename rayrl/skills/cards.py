"""Cards: what one episode teaches. Success and failure cards share a form; a failure card also has a private half.

A card has a ``deployable`` half, the only one that can ever become a skill, and for failures a ``privileged_audit``
half that may speak of the gold answer and never leaves the build directory. The firewall looks at the whole deployable
half before a card is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field

from rayrl.evaluation.view import EpisodeView
from rayrl.schemas import Frozen, JsonDict, canonical_json, sha256_hex
from rayrl.skills.bank import Builder, EvidenceRef
from rayrl.skills.firewall import Inspection, Protected, inspect, protected_values

CARD_SCHEMA: Literal["rayrl-card-v1"] = "rayrl-card-v1"


class Deployable(Frozen):
    """Procedural knowledge without any trace of the answer."""

    mechanism: str = Field(min_length=1, max_length=60)
    """Short name of what is going on, e.g. ``exact_variant``."""
    title: str = Field(min_length=1, max_length=120)
    applicable_when: str = Field(min_length=1, max_length=300)
    behaviour: str = Field(min_length=1, max_length=300)
    """The decisive behaviour: what was done (success) or was missing (failure)."""
    procedure: list[str] = Field(min_length=1, max_length=8)
    verify: str = Field(default="", max_length=300)
    avoid: str = Field(default="", max_length=300)

    def text(self) -> str:
        """All of it, for the firewall and for clustering."""
        parts = (self.title, self.applicable_when, self.behaviour, *self.procedure, self.verify, self.avoid)
        return "\n".join(part for part in (self.mechanism.replace("_", " "), *parts) if part)


class Card(Frozen):
    """One lesson of one episode."""

    schema_: Literal["rayrl-card-v1"] = Field(default=CARD_SCHEMA, alias="schema")
    card_id: str
    kind: Literal["success", "failure"]
    source: EvidenceRef
    observed: list[str] = []
    """Public evidence: labels and behaviours with their steps."""
    deployable: Deployable
    privileged_audit: JsonDict | None = None
    confidence: float = Field(ge=0, le=1)
    builder: Builder


def card_id(source: EvidenceRef, mechanism: str, builder: Builder) -> str:
    """Stable id: same episode, mechanism and builder, same card."""
    digest = sha256_hex(canonical_json([source.model_dump(), mechanism, builder.model_dump()]))
    return f"card-{digest[:16]}"


def make_card(
    kind: Literal["success", "failure"],
    source: EvidenceRef,
    deployable: Deployable,
    builder: Builder,
    *,
    observed: Iterable[str] = (),
    confidence: float = 0.5,
    privileged_audit: JsonDict | None = None,
) -> Card:
    """A card with its id."""
    return Card(
        schema=CARD_SCHEMA,
        card_id=card_id(source, deployable.mechanism, builder),
        kind=kind,
        source=source,
        observed=list(observed),
        deployable=deployable,
        privileged_audit=privileged_audit,
        confidence=confidence,
        builder=builder,
    )


def episode_values(view: EpisodeView) -> Protected:
    """All values an episode could leak: its goal, every product it was shown, what was bought."""
    seen: list[JsonDict] = []
    for _, state in view.states():
        seen += [p for p in state.get("products") or () if isinstance(p, dict)]
        product = state.get("product")
        if isinstance(product, dict):
            seen.append({**product, "option_values": _axis_values(state)})
    if view.purchase:
        seen.append(view.purchase)
    return protected_values(view.goal, seen)


def _axis_values(state: JsonDict) -> list[Any]:
    """Values of the option axes of a product page, whatever their exact layout."""
    found: list[Any] = []
    for key in ("option_axes", "options", "selected_options"):
        value = state.get(key)
        items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
        for item in items:
            found.append(item.get("values") or item.get("selected") if isinstance(item, dict) else item)
    return found


def screen(card: Card, protected: Protected) -> Inspection:
    """Firewall over the whole deployable half; what is split over its fields closes up there."""
    return inspect(card.deployable.text(), protected)
