"""The way to an experiment: upload a file, map its columns, look at the preview, freeze, configure, run."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, File, Request, Response, UploadFile
from fastapi import Path as PathPart
from pydantic import ValidationError
from starlette.datastructures import FormData, QueryParams

from rayrl.errors import DataError, UserError
from rayrl.schemas import JsonDict
from rayrl.studio.context import Context, Ctx
from rayrl.studio.pages.shell import back, page, texts
from rayrl.studio.pages.workbench.common import concurrency_of, field, form_of, made_once, url, whole
from rayrl.studio.pages.workbench.said import said
from rayrl.workbench.experiments import Params
from rayrl.workbench.mapping import DEFAULT_LABELS, TARGETS, FieldRule, MappingProfile
from rayrl.workbench.readers.rows import Options
from rayrl.workbench.snapshots import distinct_contents, snapshot_label

router = APIRouter(include_in_schema=False)
UploadId = Annotated[str, PathPart(pattern=r"^[0-9a-f]{64}$")]
ENCODINGS = ("utf-8", "gb18030", "utf-16", "big5", "latin-1")
AS_JSON = ("history", "context")
Fields = FormData | QueryParams
Form = Annotated[FormData, Depends(form_of)]


@router.get("/workbench/new")
def new(request: Request, ctx: Ctx) -> Response:
    """Where it begins: a file, or a data set that is there."""
    return page(
        request,
        "workbench/new.html",
        datasets=ctx.bench.datasets.all()[:20],
        limit=ctx.config.max_upload_mb,
        problem="",
    )


@router.post("/workbench/datasets")
def upload(request: Request, ctx: Ctx, file: Annotated[UploadFile | str | None, File()] = None) -> Response:
    """Keep a file; nothing is mapped yet."""
    try:
        if file is None or isinstance(file, str) or not file.filename:
            raise DataError(texts(request)("workbench.no_file"))
        data = file.file.read(ctx.config.max_upload_mb * 1024 * 1024 + 1)
        kept = ctx.bench.uploads.add(file.filename, data)
    except DataError as error:
        rows = ctx.bench.datasets.all()[:20]
        facts: JsonDict = {"datasets": rows, "limit": ctx.config.max_upload_mb, "problem": str(error)}
        return page(request, "workbench/new.html", status=422, **facts)
    return back(f"/workbench/uploads/{kept['sha256']}")


def options_of(fields: Fields) -> Options:
    """How the file is read, as chosen in the form."""
    given = {name: str(fields.get(name) or "").strip() for name in ("encoding", "sheet", "delimiter", "format")}
    delimiter = {"tab": "\t", "comma": ",", "semicolon": ";"}.get(given["delimiter"])
    return Options(
        format=given["format"] or None,
        encoding=given["encoding"][:40] or None,
        delimiter=delimiter,
        sheet=given["sheet"][:100] or None,
        fill_merged=bool(fields.get("fill_merged")),
    )


def profile_of(fields: Fields) -> MappingProfile | None:
    """The mapping in a form; ``None`` where the form was not filled in yet.

    Raises:
        DataError: it is not possible; names the field.
    """
    if fields.get("m.query") is None:
        return None
    rules: dict[str, FieldRule] = {}
    for target in TARGETS:
        sources = [part.strip() for part in str(fields.get(f"m.{target}") or "").split(" + ") if part.strip()]
        if sources:
            steps: list[Any] = ["json"] if fields.get(f"json.{target}") else ["strip"]
            rules[target] = FieldRule(sources=sources, transforms=steps)
    labels: dict[str, list[str]] = {}
    for line in str(fields.get("labels") or "").splitlines():
        name, _, rest = line.partition("=")
        if name.strip():
            labels[name.strip()] = [part.strip() for part in rest.split(",") if part.strip()]
    try:
        return MappingProfile(fields=rules, labels=labels)
    except ValueError as error:
        raise DataError(first_message(error)) from None


@router.get("/workbench/uploads/{upload_id}")
def mapping(request: Request, ctx: Ctx, upload_id: UploadId, profile: str = "") -> Response:
    """Map the columns of an upload, with a preview of what comes out. Nothing is saved: the form is in the address."""
    return show_mapping(request, ctx, upload_id, request.query_params, saved_profile=profile)


def show_mapping(
    request: Request, ctx: Context, upload_id: str, fields: Fields, *, saved_profile: str = "", problem: str = ""
) -> Response:
    """The form with the preview of what is in it."""
    bench = ctx.bench
    kept = bench.uploads.get(upload_id)
    options = options_of(fields)
    facts: JsonDict = {"upload": kept, "options": options, "encodings": ENCODINGS, "targets": TARGETS}
    facts["said"] = partial(said, texts(request))
    facts |= {"profiles": sorted({row["name"] for row in bench.datasets.profiles()}), "drift": None}
    facts["name"] = str(fields.get("name") or "") or kept["file_name"].rsplit(".", 1)[0]
    facts["profile_name"] = str(fields.get("profile_name") or "") or saved_profile
    known, preview = None, None
    try:
        chosen = profile_of(fields)
        if chosen is None and saved_profile:
            chosen, saved = bench.datasets.profile(saved_profile)
            known = saved["columns"] or None
        if chosen is None:
            preview = bench.uploads.preview(upload_id, options, None, rows=8)
            chosen = suggested(preview["suggested"], preview.get("suggested_labels"))
        if chosen is not None:
            preview = bench.uploads.preview(upload_id, options, chosen, known=known, rows=8)
            own = preview.get("suggested_labels")
            # the default classes stand in the form only until somebody chooses a column with other values
            if request.method == "GET" and known is None and own and chosen.labels == DEFAULT_LABELS != own:
                chosen = chosen.model_copy(update={"labels": own})
                preview = bench.uploads.preview(upload_id, options, chosen, known=known, rows=8)
    except UserError as error:
        problem = problem or str(error)
        chosen = None
        if preview is None:
            try:
                preview = bench.uploads.preview(upload_id, options, None, rows=8)
            except UserError as worse:
                problem = str(worse)
    status = 422 if problem else 200
    form = form_values(fields, chosen, (preview or {}).get("suggested", {}))
    return page(request, "workbench/mapping.html", status=status, preview=preview, form=form, problem=problem, **facts)


def suggested(found: dict[str, str], labels: dict[str, list[str]] | None = None) -> MappingProfile | None:
    """A mapping out of the suggestions for each field, if there is one for the query."""
    if "query" not in found:
        return None
    rules = {t: FieldRule(sources=[s], transforms=["json"] if t in AS_JSON else ["strip"]) for t, s in found.items()}
    return MappingProfile(fields=rules, labels=labels or DEFAULT_LABELS)


def form_values(fields: Fields, profile: MappingProfile | None, found: dict[str, str]) -> JsonDict:
    """What stands in the fields of the form."""
    if profile is not None:
        sources = {t: " + ".join(rule.sources) for t, rule in profile.fields.items()}
        as_json = {t: "json" in rule.transforms for t, rule in profile.fields.items()}
        labels = "\n".join(f"{name} = {', '.join(spellings)}" for name, spellings in profile.labels.items())
    else:
        sources = {t: str(fields.get(f"m.{t}") or found.get(t, "")) for t in TARGETS}
        as_json = {t: bool(fields.get(f"json.{t}")) for t in TARGETS}
        default = "\n".join(f"{name} = {', '.join(spellings)}" for name, spellings in DEFAULT_LABELS.items())
        labels = str(fields.get("labels") or default)
    return {"sources": sources, "as_json": as_json, "labels": labels}


@router.post("/workbench/uploads/{upload_id}")
def save_mapping(
    request: Request, ctx: Ctx, upload_id: UploadId, form: Annotated[FormData, Depends(form_of)]
) -> Response:
    """Freeze a data set from the mapping in the form, and go on to configure."""
    try:
        profile = profile_of(form)
        if profile is None:
            raise DataError("the mapping is empty")
        name = field(form, "name")[:200] or "data"
        profile_name = field(form, "profile_name")[:200] or name
        columns = ctx.bench.uploads.read(upload_id, options_of(form)).columns
        ctx.bench.datasets.save_profile(profile_name, profile, columns)
        made = ctx.bench.datasets.create(
            name=name,
            upload=upload_id,
            options=options_of(form),
            profile_name=profile_name,
            skip_errors=bool(form.get("skip_errors")),
        )
    except DataError as error:
        return show_mapping(request, ctx, upload_id, form, problem=str(error))
    return back(f"/workbench/configure?dataset={made['id']}", "dataset_saved")


@router.get("/workbench/configure")
def configure(request: Request, ctx: Ctx) -> Response:
    """Choose Skill, model and parameters."""
    given, t, problem = dict(request.query_params), texts(request), ""
    there = {"dataset": {row["id"] for row in ctx.bench.datasets.all()}}
    there["snapshot"] = {row["id"] for row in ctx.bench.snapshots.all()} | {f"deployed:{n}" for n in ctx.config.skills}
    for name, known in there.items():
        if given.get(name) and given[name] not in known:
            problem = problem or t(f"workbench.not_known.{name}", id=given[name][:60])
    return show_configure(request, ctx, given, problem)


def show_configure(request: Request, ctx: Context, given: dict[str, str], problem: str = "") -> Response:
    """The form of an experiment."""
    bench = ctx.bench
    snapshots = [
        {**row, "label": snapshot_label(row)}
        for row in distinct_contents(bench.snapshots.all(), given.get("snapshot", ""))
    ]
    return page(
        request,
        "workbench/configure.html",
        status=422 if problem else 200,
        given=given,
        datasets=bench.datasets.all(),
        snapshots=snapshots,
        deployed=sorted(ctx.config.skills),
        models=sorted({row["name"] for row in bench.models.all()}),
        defaults=Params(),
        concurrency=ctx.config.batch_concurrency,
        problem=problem,
    )


@router.post("/workbench/experiments")
def create(request: Request, ctx: Ctx, form: Annotated[FormData, Depends(form_of)]) -> Response:
    """Create an experiment; started at once unless it was asked not to be."""
    try:
        snapshot_id = field(form, "snapshot")
        if snapshot_id.startswith("deployed:"):
            folder = ctx.config.skill_folder(snapshot_id.removeprefix("deployed:"))
            snapshot_id = ctx.bench.snapshots.add_folder(folder)["id"]
        snapshot = ctx.bench.snapshots.get(snapshot_id)
        model = field(form, "model")
        facts: JsonDict = {
            "name": field(form, "name")[:200] or f"{snapshot_label(snapshot)} · {model}",
            "dataset_id": field(form, "dataset"),
            "snapshot_id": snapshot_id,
            "model": model,
            "params": params_of(form),
            "concurrency": concurrency_of(request, form, ctx.config.batch_concurrency),
        }
        start = form.get("start", "1") == "1"

        def make() -> str:
            made = ctx.bench.experiments.create(**facts)
            if start:
                ctx.bench.experiments.move(made["id"], "start")
            return str(made["id"])

        experiment_id = made_once(ctx, form, "create", make)
    except UserError as error:
        given = {name: value for name, value in form.items() if isinstance(value, str)}
        return show_configure(request, ctx, given, str(error))
    ctx.wake()
    return back(url(experiment_id), "created")


def params_of(form: FormData) -> Params:
    """Parameters in a form.

    Raises:
        DataError: a value that is not possible.
    """
    base = Params()
    try:
        return Params(
            repeats=whole(form, "repeats", base.repeats),
            max_actions=whole(form, "max_actions", base.max_actions),
            seed=whole(form, "seed", base.seed),
            low_confidence=float(field(form, "low_confidence") or base.low_confidence),
        )
    except ValueError as error:
        raise DataError(first_message(error)) from None


def first_message(error: ValueError) -> str:
    """The first thing a model of fields complains about, with its field."""
    if not isinstance(error, ValidationError):
        return str(error)
    found = error.errors()[0]
    field_name = ".".join(str(part) for part in found["loc"])
    message = found["msg"].removeprefix("Value error, ")
    return f"{field_name}: {message}" if field_name else message
