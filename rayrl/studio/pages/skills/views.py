"""Routes of the section Skills."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Path, Query, Request, Response

from rayrl.errors import DataError
from rayrl.skills.bank import diff_banks
from rayrl.studio.context import Ctx
from rayrl.studio.pages.charts import intervals
from rayrl.studio.pages.places import guarded, read_object, resolve, walk
from rayrl.studio.pages.runs.episodes import episode_url
from rayrl.studio.pages.runs.facts import runs_root
from rayrl.studio.pages.shell import page, texts
from rayrl.studio.pages.skills import banks as of

router = APIRouter(include_in_schema=False)
Sha = Annotated[str, Query(max_length=64, pattern=r"^[0-9a-f]*$")]


@router.get("/skills")
def index(request: Request, ctx: Ctx) -> Response:
    """Banks and gates."""
    places = walk(runs_root(ctx))
    found, damaged = of.banks(places)
    known = {one["sha"] for one in found}
    # the pair somebody most likely wants to compare: a bank and what was made from it
    pair = next(((one["bank"].parent, one["sha"]) for one in found if one["bank"].parent in known), ("", ""))
    return page(
        request,
        "skills/index.html",
        pair=pair,
        banks=found,
        known=known,
        damaged=damaged,
        gates=of.gates(places),
        root=str(runs_root(ctx)),
        quote=quote,
    )


@router.get("/skills/banks/{sha}")
def bank(request: Request, ctx: Ctx, sha: Annotated[str, Path(pattern=r"^[0-9a-f]{8,64}$")]) -> Response:
    """A bank: its chunks, their measured effects, reviews and evidence."""
    found, every, places = of.bank_of(ctx, sha)
    links = of.run_links(places)
    bank = found["bank"]
    chunks = []
    for skill in bank.skills:
        record = bank.record(skill.skill_id)
        gate = record.gate
        evidence = [("against", ref) for ref in record.evidence_against] + [("for", ref) for ref in record.evidence_for]
        chunks.append(
            {
                "skill": skill,
                "record": record,
                "rate": {"value": gate.effect, "low": gate.low, "high": gate.high} if gate else None,
                "evidence": [
                    {
                        "side": side,
                        "ref": ref,
                        "href": episode_url(
                            links[ref.run].removeprefix("/runs/"),
                            ref.episode_id,
                            "",
                            ref.steps[0] if ref.steps else None,
                        )
                        if ref.run in links
                        else None,
                    }
                    for side, ref in evidence[:12]
                ],
                "n_evidence": len(evidence),
            }
        )
    measured = [c for c in chunks if c["rate"]]
    t = texts(request)
    chart = None
    if measured:
        ordered = sorted(measured, key=lambda c: -float(c["rate"]["value"]))
        names = [c["skill"].skill_id for c in ordered]
        chart = intervals(names, [c["rate"] for c in ordered], x=t("skills.effect_axis"), percent=False)
    parent = next((one for one in every if one["sha"] == bank.parent), None)
    children = [one for one in every if one["bank"].parent == found["sha"]]
    return page(
        request,
        "skills/bank.html",
        found=found,
        bank=bank,
        chunks=chunks,
        chart=chart,
        parent=parent,
        children=children,
        every=[(one["sha"][:12], f"{one['bank'].bank_version} · {one['sha'][:12]}") for one in every],
    )


@router.get("/skills/banks/{sha}/cards/{skill_id:path}")
def cards(
    request: Request, ctx: Ctx, sha: Annotated[str, Path(pattern=r"^[0-9a-f]{8,64}$")], skill_id: str
) -> Response:
    """The cards one chunk was compiled from."""
    found, _, places = of.bank_of(ctx, sha)
    skill = found["bank"].entry(skill_id)
    record = found["bank"].record(skill_id)
    shown = of.cards_of(places, set(record.cards), most=60)
    return page(
        request,
        "skills/cards.html",
        found=found,
        skill=skill,
        record=record,
        cards=shown,
        links=of.run_links(places),
        episode_url=episode_url,
    )


@router.get("/skills/gates/{slug}")
def gate(
    request: Request,
    ctx: Ctx,
    slug: Annotated[str, Path(max_length=1000)],
    metric: Annotated[str, Query(max_length=100)] = "reward",
) -> Response:
    """A gate: what each chunk was measured to do."""
    t = texts(request)
    path = resolve(runs_root(ctx), slug)
    facts = read_object(path / of.GATE)
    if facts.get("schema") != of.GATE_SCHEMA:
        raise DataError(f"{slug.replace('~', '/')}: its {of.GATE} is no gate over skills")
    rows, problem = guarded(lambda: of.effects(path, metric))
    found, _ = guarded(lambda: read_object(path / of.CONTRIBUTIONS))
    looks = (found or {}).get("looks") or []
    every, _ = of.banks(walk(runs_root(ctx)))
    known = {one["sha"] for one in every}
    chart = None
    if rows:
        chart = intervals(
            [row["skill"] for row in rows], [row["rate"] for row in rows], x=t("skills.effect_axis"), percent=False
        )
    return page(
        request,
        "skills/gate.html",
        name=slug.replace("~", "/"),
        gate=facts,
        rows=rows or [],
        problem=problem,
        chart=chart,
        metric=metric,
        metrics=["reward", *sorted((found or {}).get("metrics") or {})],
        looks=looks,
        accepted=of.accepted_at(looks) if len(looks) > 1 else {},
        # the other rule tests nothing: it has no p value
        tested=any(one.get("adjusted_p") is not None for one in (found or {}).get("contributions") or []),
        stability=(found or {}).get("stability") or {},
        confirmation=(found or {}).get("confirmation"),
        known=known,
    )


@router.get("/skills/diff")
def diff(request: Request, ctx: Ctx, old: Sha = "", new: Sha = "") -> Response:
    """Two banks compared, chunk by chunk."""
    every, _ = of.banks(walk(runs_root(ctx)))
    choices = [(one["sha"][:12], f"{one['bank'].bank_version} · {one['sha'][:12]}") for one in every]
    values: dict[str, Any] = {
        "choices": choices,
        "old": old[:12],
        "new": new[:12],
        "found": None,
        "before": None,
        "after": None,
    }
    if old and new:
        before, after = of.bank_of(ctx, old)[0]["bank"], of.bank_of(ctx, new)[0]["bank"]
        values |= {"found": diff_banks(before, after), "before": before, "after": after}
    return page(request, "skills/diff.html", **values)
