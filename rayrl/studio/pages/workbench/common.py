"""What the pages of the workbench share: the parts of an experiment by name, filters in the query string, tabs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import Path as PathPart
from fastapi import Request
from pydantic import ValidationError
from starlette.datastructures import FormData

from rayrl.errors import DataError
from rayrl.schemas import JsonDict, canonical_json, sha256_hex
from rayrl.studio.context import Context
from rayrl.studio.pages.language import Translate
from rayrl.studio.pages.shell import texts
from rayrl.studio.pages.workbench.analysis import tab_counts
from rayrl.workbench.experiments import MAX_CONCURRENCY
from rayrl.workbench.results import Filter
from rayrl.workbench.snapshots import snapshot_label

ExperimentId = Annotated[str, PathPart(pattern=r"^ex_[0-9a-f]{16}$")]
Ordinal = Annotated[int, PathPart(ge=0, le=10**9)]
FILTERS = (
    "search", "gold", "prediction", "domain", "evidence", "state", "failure", "review", "agrees", "max_confidence",
)  # fmt: skip
AGREES = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
LISTS = ("disagreements", "cases")
AGAIN_S = 10.0
"""How long a form sent twice waits for what its first sending makes."""


async def form_of(request: Request) -> FormData:
    """The fields of a form (at most 2,000, text only)."""
    return await request.form(max_fields=2000)


def made_once(ctx: Context, form: FormData, what: str, make: Callable[[], str]) -> str:
    """The id of what a form makes. The same form with the same contents again, as it was shown: the first one's.

    A form without the hidden field ``once`` makes something each time.
    """
    body = {name: value for name, value in form.items() if isinstance(value, str)}
    key = sha256_hex(canonical_json([what, body])) if field(form, "once") else None
    return str(ctx.once(key, what, body, lambda: {"id": make()}, wait_s=AGAIN_S)["id"])


def field(form: FormData, name: str, default: str = "") -> str:
    """A text field, trimmed."""
    value = form.get(name, default)
    return value.strip() if isinstance(value, str) else default


def whole(form: FormData, name: str, default: int) -> int:
    """A field with a whole number.

    Raises:
        DataError: it is none.
    """
    value = field(form, name)
    try:
        return int(value) if value else default
    except ValueError:
        raise DataError(f"{name}: {value[:40]!r} is no whole number") from None


def concurrency_of(request: Request, form: FormData, default: int | None = None) -> int:
    """How many cases run at once, from a form.

    Raises:
        DataError: empty, no whole number, or out of bounds, which it names. Without the field it is ``default``.
    """
    if form.get("concurrency") is None and default is not None:
        return default
    value = field(form, "concurrency")
    if not (value.isascii() and value.isdigit() and len(value) < 10 and 1 <= int(value) <= MAX_CONCURRENCY):
        raise DataError(texts(request)("workbench.concurrency_bounds", most=MAX_CONCURRENCY, given=value[:40] or "''"))
    return int(value)


def url(experiment_id: str, rest: str = "", **query: Any) -> str:
    """The address of a page of an experiment."""
    kept = {k: v for k, v in query.items() if v not in (None, "")}
    return f"/workbench/experiments/{experiment_id}{rest}" + (f"?{urlencode(kept)}" if kept else "")


def filters_of(request: Request, only: str) -> tuple[Filter, dict[str, str]]:
    """Filters of a list (``disagreements`` or ``cases``) out of the query string, and the fields as they were given.

    Raises:
        DataError: a value that is not possible.
    """
    given = {name: value for name in FILTERS if (value := request.query_params.get(name, "").strip())}
    facts: dict[str, Any] = dict(given)
    if "agrees" in facts:
        # what is neither stays as it is, and is refused below
        facts["agrees"] = AGREES.get(facts["agrees"].lower(), facts["agrees"])
    if request.query_params.get("sort") == "confidence":
        facts["sort"] = given["sort"] = "confidence"
    try:
        found = Filter.model_validate({**facts, "repeat": 0, "disagreements": only == "disagreements"}, strict=False)
    except ValidationError as error:
        names = {str(item["loc"][0]): str(item["input"])[:60] for item in error.errors() if item["loc"]}
        shown = ", ".join(f"{name} = {value!r}" for name, value in names.items())
        raise DataError(texts(request)("workbench.filter_impossible", what=shown)) from None
    return found, given


def parts(ctx: Context, experiment: JsonDict) -> JsonDict:
    """The data set and the Skill of an experiment."""
    dataset = ctx.bench.datasets.get(experiment["dataset_id"])
    snapshot = ctx.bench.snapshots.get(experiment["snapshot_id"])
    shown = {**snapshot, "status": shown_status(ctx, snapshot)}
    return {"dataset": dataset, "snapshot": shown, "skill_label": snapshot_label(snapshot)}


def shown_status(ctx: Context, snapshot: JsonDict) -> str:
    """Its status; ``folder`` for one of a folder outside any checkout that is not the folder of a deployed Skill."""
    status, source = str(snapshot["status"]), snapshot["source"]
    if status != "deployed" or not source:
        return status
    folders = {Path(folder).expanduser().resolve() for folder in ctx.config.skills.values()}
    return status if Path(source).resolve() in folders else "folder"


def head(ctx: Context, t: Translate, experiment_id: str, current: str) -> JsonDict:
    """What every page of an experiment shows above its content."""
    experiment = ctx.bench.experiments.get(experiment_id)
    numbers = tab_counts(ctx, experiment)
    base = url(experiment_id)
    names = {"overview": "", "disagreements": "/disagreements", "cases": "/cases", "versions": "/versions"}
    counts = {"disagreements": (numbers or {}).get("to_look"), "cases": experiment["n_cases"]}
    keys = {"overview": "o", "disagreements": "d", "cases": "a", "versions": "v"}
    tabs: list[JsonDict] = []
    for name, path in names.items():
        label = t(f"workbench.tab.{name}")
        one = {"label": label, "href": base + path, "current": name == current, "n": counts.get(name)}
        tabs.append(one | {"key": keys[name]})
    return {"experiment": experiment, "tabs": tabs, "numbers": numbers, "base": base, **parts(ctx, experiment)}


def day(row: JsonDict) -> str:
    """Day and minute something was created, to tell equals apart."""
    return str(row["created_at"][5:16]).replace("T", " ")


def file_url(snapshot_id: str, ref: str) -> str:
    """Where a reference of a Skill is shown: the file, its passage marked and in view."""
    path, _, anchor = ref.strip().removeprefix("./").partition("#")
    query = {"path": path} | ({"at": anchor} if anchor else {})
    return f"/workbench/skills/{snapshot_id}/file?{urlencode(query)}" + ("#cited" if anchor else "")
