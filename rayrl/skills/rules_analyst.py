"""The analyst that needs no model: from labels and behaviours of an episode to cards, by rules.

Failures are explained by the diagnosis labels (:mod:`rayrl.evaluation.diagnosis`); successes by behaviours that can be
read off the steps. What a rule writes are general procedures; only the evidence is the episode's. Rules may look at
the private goal to decide, never to write.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rayrl.evaluation.diagnosis import RULES, Finding
from rayrl.evaluation.view import EpisodeView, plain
from rayrl.skills.bank import Builder, EvidenceRef
from rayrl.skills.cards import Card, Deployable, make_card

RULES_BUILDER = Builder(kind="rules", model={"analyst": "rules", "version": "1"})

_LESSONS: dict[str, Deployable] = {
    d.mechanism: d
    for d in (
        Deployable(
            mechanism="search_terms",
            title="Search with catalogue words",
            applicable_when="the results do not show what the task describes",
            behaviour="the search text left out what the task requires",
            procedure=[
                "Name the product type in the search query.",
                "Add the required features and, where one is wanted, the brand.",
                "Search once more with fewer words when nothing fits.",
            ],
            verify="The query holds the product type and at least one required feature.",
            avoid="Typing the opening words of the task into the search box.",
        ),
        Deployable(
            mechanism="inspect_requirements",
            title="Compare results with the list of requirements",
            applicable_when="several results look alike",
            behaviour="a product was taken that misses something the task asks for",
            procedure=[
                "List every attribute the task asks for.",
                "Compare the key attributes of each result with this list.",
                "Open the result that covers all of them.",
            ],
            verify="The product page confirms each requirement.",
            avoid="Opening the first result because it comes first.",
        ),
        Deployable(
            mechanism="exact_variant",
            title="Take the variant that was asked for",
            applicable_when="the product comes in several colours, sizes or models",
            behaviour="the right product was bought in another variant",
            procedure=[
                "Read which colour, size or model the task names.",
                "Select exactly the named value on every axis.",
            ],
            verify="The selected options correspond to the task.",
            avoid="Leaving the preselected variant in place.",
        ),
        Deployable(
            mechanism="complete_axes",
            title="Finish the product page before paying",
            applicable_when="the purchase button is refused",
            behaviour="paying was tried while something on the page was still open",
            procedure=["Look for axes that have no value yet.", "Give each of them a value, then press the button."],
            verify="No axis on the page is left open.",
            avoid="Pressing the button a second time in the same state.",
        ),
        Deployable(
            mechanism="respect_budget",
            title="Keep within the spending limit",
            applicable_when="the task names an amount",
            behaviour="the price was above the limit, or was never settled",
            procedure=[
                "Read the final price on the product page.",
                "Compare it with the budget of the task.",
                "When it is above the limit, look for something cheaper.",
            ],
            verify="The final price is within the budget.",
            avoid="Trusting the price shown in the list.",
        ),
        Deployable(
            mechanism="compare_candidates",
            title="Look at more than one candidate",
            applicable_when="only one product was opened so far",
            behaviour="the first product opened was bought although others were listed",
            procedure=[
                "If the open product misses something, go back to the results.",
                "Open another candidate, and turn to the next page when none is left.",
            ],
            verify="At least two candidates were seen, or the first one fits in everything.",
            avoid="Settling at once.",
        ),
        Deployable(
            mechanism="break_loops",
            title="Leave a loop",
            applicable_when="the same page comes up after the same action",
            behaviour="the same action was repeated without any change",
            procedure=["Notice that nothing changed.", "Do something that has not been done in this place."],
            verify="The new page differs from the last two.",
            avoid="Repeating an action in the hope of another outcome.",
        ),
        Deployable(
            mechanism="finish_in_time",
            title="Finish before the actions run out",
            applicable_when="two thirds of the actions are used",
            behaviour="the episode ended without a purchase",
            procedure=["Count the actions used so far.", "Settle for the best candidate seen and purchase it."],
            verify="Five actions are left when the purchase begins.",
            avoid="Exploring until the very end.",
        ),
        Deployable(
            mechanism="valid_calls",
            title="Make well-formed calls",
            applicable_when="a reply was refused",
            behaviour="replies broke the form of a call",
            procedure=["Answer with one call each turn.", "Copy the clickable value as it is listed."],
            verify="The last reply was accepted.",
            avoid="Explaining in prose what should be done.",
        ),
        Deployable(
            mechanism="hidden_wishes",
            title="Read the wishes between the lines",
            applicable_when="a persona comes with the task",
            behaviour="something the persona prefers was missing from what was bought",
            procedure=[
                "Read the persona before the first search.",
                "Take its favourite makers and recent interests as further wishes.",
                "Prefer what fits the profile when the task leaves room.",
            ],
            verify="The choice fits the persona.",
            avoid="Treating the short text of the task as everything there is.",
        ),
    )
}
_FROM_LABEL = {
    "never_searched": "search_terms",
    "target_never_surfaced": "search_terms",
    "surfaced_not_opened": "inspect_requirements",
    "wrong_product": "inspect_requirements",
    "wrong_variant": "exact_variant",
    "option_axis_missed": "complete_axes",
    "over_budget": "respect_budget",
    "price_not_verified": "respect_budget",
    "bought_without_inspection": "compare_candidates",
    "loop": "break_loops",
    "repeated_query": "break_loops",
    "invalid_action_streak": "break_loops",
    "action_limit": "finish_in_time",
    "protocol_error_streak": "valid_calls",
    "generation_length": "valid_calls",
    "context_overflow": "valid_calls",
}


@dataclass(frozen=True)
class Habit:
    """A behaviour of successful episodes: where it shows, and what to write about it."""

    show: Callable[[EpisodeView], list[int]]
    lesson: Deployable


def _rich_query(e: EpisodeView) -> list[int]:
    return [s.index for s in e.steps if s.query is not None and len(s.query.split()) >= 3][:1]


def _went_on(e: EpisodeView) -> list[int]:
    leaving = ("next >", "< prev", "back to search")
    return [s.index for s in e.steps if s.clicked is not None and plain(s.clicked) in leaving]


def _chose_variant(e: EpisodeView) -> list[int]:
    return [s.index for s in e.steps if s.clicked and "=" in s.clicked and s.product == e.bought]


def _short_road(e: EpisodeView) -> list[int]:
    return [e.steps[-1].index] if e.steps and len(e.steps) <= 4 else []


def _from_persona(e: EpisodeView) -> list[int]:
    wishes = [w for w in persona_wishes(e) if w]
    return [s.index for s in e.steps if s.query is not None and any(w in s.query for w in wishes)][:1]


HABITS: tuple[Habit, ...] = (
    Habit(
        _rich_query,
        Deployable(
            mechanism="keyword_query",
            title="Turn the wish into keywords",
            applicable_when="starting out",
            behaviour="the search named category and features together",
            procedure=["Write keywords: category first, then specific features, then the maker's name."],
            verify="Every keyword comes from the request.",
            avoid="Whole sentences.",
        ),
    ),
    Habit(
        _went_on,
        Deployable(
            mechanism="walk_away",
            title="Walk away from a poor match",
            applicable_when="a product or a page of results disappoints",
            behaviour="unfit candidates were left behind",
            procedure=["When a product fails the request, return to the results and try a different one."],
            verify="The product bought was not the first compromise.",
            avoid="Hoping that a poor match is good enough.",
        ),
    ),
    Habit(
        _chose_variant,
        Deployable(
            mechanism="set_options",
            title="Set the options deliberately",
            applicable_when="a product page is open",
            behaviour="each option was set to what was requested",
            procedure=["For every option choose the value that was requested."],
            verify="Nothing is left at its default by accident.",
            avoid="Hurrying to the button.",
        ),
    ),
    Habit(
        _short_road,
        Deployable(
            mechanism="short_road",
            title="Keep the road short",
            applicable_when="things go well",
            behaviour="few steps were needed",
            procedure=["Decide as soon as the page shows enough.", "Keep the number of steps small."],
            verify="Each step had a purpose.",
            avoid="Wandering.",
        ),
    ),
    Habit(
        _from_persona,
        Deployable(
            mechanism="profile_first",
            title="Use what is known about the user",
            applicable_when="a profile is given",
            behaviour="what the user likes went into the search",
            procedure=["Follow the user's preferences wherever the request is silent."],
            verify="The profile explains the choice.",
            avoid="A choice that anybody could have made.",
        ),
    ),
)


def persona_wishes(e: EpisodeView) -> list[str]:
    """Wishes of the goal that the instruction does not say: they can only come from the persona. Private."""
    goal = e.goal or {}
    said = plain(goal.get("instruction_simple") or goal.get("instruction_text") or "")
    values: list[Any] = [*(goal.get("attributes") or []), *(goal.get("goal_options") or [])]
    return [w for w in (plain(v) for v in values if isinstance(v, str)) if w and w not in said]


def _missed_wishes(e: EpisodeView) -> Finding | None:
    """A failed purchase that lacks something only the persona says."""
    if e.success or e.bought is None or not (e.goal or {}).get("user_persona"):
        return None
    has = plain(" ".join(str(e.purchase.get(key) or "") for key in ("name", "title", "brand", "attributes", "options")))
    missed = [w for w in persona_wishes(e) if w not in has]
    return Finding([e.steps[-1].index] if e.steps else [], {"missed": len(missed)}) if missed else None


def rules_cards(view: EpisodeView, *, run: str = "") -> list[Card]:
    """Cards of one complete episode; none when nothing is to be learned from it."""
    cards: list[Card] = []
    if view.success:
        for habit in HABITS:
            steps = habit.show(view)
            if steps:
                cards.append(_card("success", view, habit.lesson, steps, [habit.lesson.behaviour], run, 0.4, None))
        return cards
    found: dict[str, tuple[list[int], list[str]]] = {}
    for label, rule in RULES.items():
        finding = rule(view)
        mechanism = _FROM_LABEL.get(label)
        if finding is not None and mechanism is not None:
            steps, labels = found.setdefault(mechanism, ([], []))
            steps.extend(finding.steps)
            labels.append(label)
    missed = _missed_wishes(view)
    if missed is not None:
        found["hidden_wishes"] = (missed.steps, ["persona_wish_missed"])
    for mechanism, (steps, labels) in found.items():
        audit = {"labels": labels, "goal": view.goal, "bought": view.bought, "reward": view.reward}
        # a failure with one explanation says more than one with five
        confidence = round(0.9 / (1 + 0.25 * (len(found) - 1)), 3)
        cards.append(_card("failure", view, _LESSONS[mechanism], steps, labels, run, confidence, audit))
    return cards


def _card(
    kind: Any,
    view: EpisodeView,
    lesson: Deployable,
    steps: list[int],
    observed: list[str],
    run: str,
    confidence: float,
    audit: dict[str, Any] | None,
) -> Card:
    source = EvidenceRef(run=run, episode_id=view.episode_id, steps=sorted(set(steps)))
    return make_card(
        kind, source, lesson, RULES_BUILDER, observed=observed, confidence=confidence, privileged_audit=audit
    )
