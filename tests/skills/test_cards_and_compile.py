from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from rayrl.errors import ModelTransportError
from rayrl.evaluation.view import EpisodeView, StepView
from rayrl.models.scripted_skills import COMPETENCES, taught
from rayrl.schemas import ModelOutput, PolicyFailure, ProtocolError, ToolCall
from rayrl.skills.bank import BankEntry, Builder, EvidenceRef, make_bank
from rayrl.skills.cards import Card, Deployable, episode_values, make_card, screen
from rayrl.skills.compile import candidate_bank, cluster_cards, compile_chunks, hashed_encoder, render
from rayrl.skills.firewall import Protected, inspect
from rayrl.skills.llm_analyst import analyse, prompt_sha256
from rayrl.skills.rules_analyst import _LESSONS, HABITS, rules_cards

GOAL = {
    "asin": "700000017094",
    "name": "Aster desk lamp A83",
    "attributes": ["clip-on", "Aster"],
    "goal_options": ["white"],
    "instruction_simple": "Looking for a desk lamp",
    "price_upper": 100,
    "user_persona": {"brand": ["Aster"]},
}


def step(index: int, tool: str, value: str, **state: Any) -> StepView:
    key = "query" if tool == "search" else "value"
    return StepView(index, state, tool, {key: value}, f"{tool}[{value}]", True, None, None, None)


def failed_episode() -> EpisodeView:
    listed = {"page_type": "search_results", "products": [{"asin": "700000000001"}, {"asin": "700000000002"}]}
    return EpisodeView(
        episode_id="task-000001__sample-000",
        steps=[
            step(0, "search", "desk lamp", page_type="home"),
            step(1, "click", "700000000001", **listed),
            step(2, "click", "buy now", page_type="product_detail", product={"asin": "700000000001"}),
        ],
        last_state={"page_type": "terminal"},
        reward=0.2,
        detail={"r_success": 0, "r_price": 0},
        purchase={"asin": "700000000001", "name": "Velum lamp", "price": 120, "options": {}},
        termination="purchase",
        goal=GOAL,
    )


def card(mechanism: str, *, episode: str = "e", kind: Any = "failure", **changes: Any) -> Card:
    d = Deployable(
        mechanism=mechanism,
        title=changes.pop("title", f"Title of {mechanism}"),
        applicable_when="something happens",
        behaviour="something was missing",
        procedure=changes.pop("procedure", [f"Do the {mechanism} thing first."]),
    )
    return make_card(kind, EvidenceRef(episode_id=episode), d, Builder(kind="rules"), **changes)


def test_a_failed_episode_gives_cards_with_evidence_and_two_halves():
    cards = {c.deployable.mechanism: c for c in rules_cards(failed_episode(), run="r")}
    assert {"search_terms", "respect_budget", "compare_candidates", "hidden_wishes"} <= set(cards)
    budget = cards["respect_budget"]
    assert budget.kind == "failure" and budget.source == EvidenceRef(
        run="r", episode_id="task-000001__sample-000", steps=[2]
    )
    assert budget.observed == ["over_budget"] and budget.privileged_audit["goal"] == GOAL
    assert all("Aster" not in c.deployable.text() for c in cards.values())


def test_a_successful_episode_gives_habits_and_no_privileged_half():
    good = replace(failed_episode(), detail={"r_success": 1}, reward=1.0)
    cards = rules_cards(good)
    assert cards and all(c.kind == "success" and c.privileged_audit is None for c in cards)
    assert not rules_cards(replace(good, steps=[]))


def test_every_text_the_rules_can_write_passes_the_firewall():
    for lesson in [*_LESSONS.values(), *(h.lesson for h in HABITS)]:
        assert inspect(lesson.text(), Protected()).reasons == []


def test_rules_texts_teach_by_meaning_and_never_unteach():
    taught_by = {m: taught(render(d)) for m, d in _LESSONS.items()}
    assert not any(off for _, off in taught_by.values())
    on = set().union(*(on for on, _ in taught_by.values()))
    assert (
        {"query_formulation", "attribute_check", "option_matching", "budget_check", "pagination"}
        <= on
        <= set(COMPETENCES)
    )
    assert not taught_by["break_loops"][0] and not taught_by["valid_calls"][0]


def test_the_firewall_sees_the_whole_deployable_half():
    protected = episode_values(failed_episode())
    clean = card("search_terms")
    assert screen(clean, protected).passed
    leaky = card("search_terms", procedure=["The maker is As", "ter, always."])
    assert not screen(leaky, protected).passed
    assert not screen(card("x", title="Product 700000000002"), protected).passed


def test_every_card_is_used_exactly_once_whatever_the_order():
    cards = [card(m, episode=str(i)) for i in range(20) for m in ("search_terms", "exact_variant", "leave_loops")]
    clusters = cluster_cards(cards)
    used = [c for cluster in clusters for c in cluster.cards]
    assert sorted(used) == sorted(c.card_id for c in cards)
    assert clusters == cluster_cards(list(reversed(cards)))
    assert len(clusters) == 3


def test_near_duplicates_under_other_names_are_merged():
    steps = ["Read the final price of the product page.", "Compare it with the budget of the request."]
    a = card("budget", title="Keep the limit", procedure=steps, confidence=0.9)
    b = card("spending", title="Keep the limit", procedure=steps, episode="other", confidence=0.4)
    (cluster,) = cluster_cards([a, b])
    assert cluster.lead == a.card_id and len(cluster.cards) == 2 and cluster.merged


def test_at_most_sixteen_chunks_and_the_heaviest_first():
    cards = [
        card(f"mechanism {'abcdefghijklmnopqrstuvwxyz'[i]}{i}", episode=str(j)) for i in range(20) for j in range(i + 1)
    ]
    candidates = compile_chunks(cluster_cards(cards), cards)
    assert len(candidates) == 16
    assert len(candidates[0].record.cards) == 20
    assert len({c.skill_id for c in candidates}) == 16


def test_a_chunk_near_one_of_the_bank_is_a_rewrite_in_its_family():
    old = make_bank([BankEntry(skill_id="budget", content=render(_LESSONS["respect_budget"]).replace("final", "last"))])
    lesson = _LESSONS["respect_budget"]
    made = make_card("failure", EvidenceRef(episode_id="e"), lesson, Builder(kind="rules"))
    (candidate,) = compile_chunks(cluster_cards([made]), [made], bank=old)
    assert (candidate.action, candidate.rewrites, candidate.version) == ("REWRITE", "budget", "2")
    bank = candidate_bank([candidate], old)
    assert bank.families() == {"budget": "budget", candidate.skill_id: "budget"} and bank.parent == old.sha256
    same = make_bank([BankEntry(skill_id="budget", content=render(lesson))])
    assert compile_chunks(cluster_cards([made]), [made], bank=same) == []


def test_the_encoder_is_deterministic_and_of_unit_length():
    a, b = hashed_encoder(["check the price", "翻页"]), hashed_encoder(["check the price", "翻页"])
    assert (a == b).all() and (a**2).sum(axis=1) == pytest.approx([1, 1])
    assert hashed_encoder([""]).sum() == 0


def test_cards_without_a_procedure_are_impossible():
    with pytest.raises(ValidationError):
        card("x", procedure=[])


class Analyst:
    """A model that answers what it is told to."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: list[list[dict[str, Any]]] = []

    def identity(self) -> dict[str, Any]:
        return {"kind": "test"}

    async def generate(self, messages, tools, *, seed):
        self.asked.append(messages)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def aclose(self) -> None:
        pass


ARGUMENTS = {
    "mechanism": "budget",
    "title": "Mind the budget",
    "applicable_when": "a limit is given",
    "behaviour": "the price was not compared",
    "procedure": ["Compare the price with the budget.", "Compare the price with the budget.", "ok"],
    "verify": "",
    "avoid": "",
    "confidence": 0.7,
}


def call(**changes: Any) -> ModelOutput:
    name = changes.pop("tool", "write_card")
    return ModelOutput(tool_calls=[ToolCall(id="c", name=name, arguments={**ARGUMENTS, **changes})])


def test_a_model_writes_a_card_and_sees_the_gold_only_for_failures():
    model = Analyst(call())
    found = asyncio.run(analyse(model, failed_episode(), run="r", replayed={"repeats": True}))
    assert found.card is not None and found.card.deployable.procedure == ["Compare the price with the budget."]
    assert found.card.builder.prompt_sha256 == prompt_sha256() and found.card.builder.model == {"kind": "test"}
    assert "700000017094" in model.asked[0][1]["content"] and "repeats" in model.asked[0][1]["content"]
    success = replace(failed_episode(), detail={"r_success": 1}, reward=1.0)
    asyncio.run(analyse(model, success))
    assert "700000017094" not in model.asked[1][1]["content"] and "Privileged" not in model.asked[1][1]["content"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (call(procedure=[]), "card: procedure"),
        (call(procedure=["short"]), "card: procedure"),
        (call(title=""), "card: title"),
        (call(confidence=7), "card: confidence"),
        (call(confidence="high"), "card: ValueError"),
        (call(extra="x"), "card: extra"),
        (call(tool="search"), "model: unknown_tool"),
        (ModelOutput(protocol_error=ProtocolError(code="no_tool_call", message="")), "model: no_tool_call"),
        (ModelOutput(policy_failure=PolicyFailure(code="generation_length", message="")), "model: generation_length"),
        (ModelTransportError("down", code="unreachable"), "model: unreachable"),
    ],
)
def test_unusable_output_is_named_and_gives_no_card(answer, reason):
    found = asyncio.run(analyse(Analyst(answer), failed_episode()))
    assert found.card is None and found.reason == reason
