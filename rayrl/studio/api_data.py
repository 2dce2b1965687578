"""Routes of data sets, mapping profiles, Skill snapshots and model profiles."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, File, Query, Response, UploadFile
from fastapi import Path as PathPart

from rayrl.errors import DataError
from rayrl.schemas import JsonDict
from rayrl.skills.diff import FileChange, diff_skills
from rayrl.skills.snapshot import file_bytes
from rayrl.studio.context import Ctx, Key
from rayrl.studio.requests import (
    DatasetId,
    MappingRequest,
    ModelRequest,
    PreviewRequest,
    ProfileRequest,
    SnapshotId,
    SnapshotRequest,
)
from rayrl.studio.responses import Dataset, ModelProfile, PreviewAnswer, Profile, Snapshot, UploadAnswer
from rayrl.workbench.mapping import MappingProfile
from rayrl.workbench.readers.rows import Options
from rayrl.workbench.store import MissingError

router = APIRouter(prefix="/api/evaluations", tags=["data"])
UploadId = Annotated[str, PathPart(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of the upload")]


@router.post("/datasets", response_model=UploadAnswer, status_code=201)
def upload_file(ctx: Ctx, file: Annotated[UploadFile, File(description="CSV, XLSX or JSONL")]) -> JsonDict:
    """Upload a file. The same bytes again are the same upload. Nothing is mapped yet."""
    limit = ctx.config.max_upload_mb * 1024 * 1024
    data = file.file.read(limit + 1)
    upload = ctx.bench.uploads.add(file.filename or "upload", data)
    preview = ctx.bench.uploads.preview(upload["sha256"], Options(), None)
    return {"upload_id": upload["sha256"], "file_name": upload["file_name"], "size": upload["size"], **preview}


@router.get("/datasets", response_model=list[Dataset])
def list_datasets(ctx: Ctx) -> list[JsonDict]:
    """All data sets, newest first."""
    return ctx.bench.datasets.all()


@router.post("/datasets/{upload_id}/preview", response_model=PreviewAnswer)
def preview(ctx: Ctx, upload_id: UploadId, body: PreviewRequest) -> JsonDict:
    """What the file holds and what a mapping makes of it, with the errors of rows; nothing is saved."""
    profile, known = body.profile, None
    if profile is None and body.profile_name is not None:
        profile, saved = ctx.bench.datasets.profile(body.profile_name, body.profile_version)
        known = saved["columns"]
    return ctx.bench.uploads.preview(upload_id, body.options.options(), profile, known=known, rows=body.rows)


@router.post("/datasets/{upload_id}/mapping", response_model=Dataset, status_code=201)
def map_dataset(ctx: Ctx, upload_id: UploadId, body: MappingRequest, key: Key = None) -> JsonDict:
    """Freeze a data set from an upload under a mapping profile."""

    def make() -> JsonDict:
        version = body.profile_version
        options = body.options.options()
        if body.profile is not None:
            columns = ctx.bench.uploads.read(upload_id, options, keep=0).columns
            version = ctx.bench.datasets.save_profile(body.profile_name, body.profile, columns)["version"]
        return ctx.bench.datasets.create(
            name=body.name,
            upload=upload_id,
            options=options,
            profile_name=body.profile_name,
            profile_version=version,
            skip_errors=body.skip_errors,
        )

    return ctx.once(key, f"mapping {upload_id}", body.model_dump(), make)


@router.get("/datasets/{dataset_id}", response_model=Dataset)
def get_dataset(ctx: Ctx, dataset_id: DatasetId) -> JsonDict:
    """One data set."""
    return ctx.bench.datasets.get(dataset_id)


@router.get("/datasets/{dataset_id}/cases")
def list_cases(
    ctx: Ctx,
    dataset_id: DatasetId,
    start: Annotated[int, Query(ge=0, le=10**9)] = 0,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
) -> dict[str, Any]:
    """Cases in order, from position ``start``."""
    dataset = ctx.bench.datasets.get(dataset_id)
    found = ctx.bench.datasets.cases(dataset_id, start=start, limit=limit)
    following = start + len(found)
    return {
        "items": [case.model_dump() for case in found],
        "next": following if following < dataset["n_cases"] and found else None,
    }


@router.get("/mapping-profiles", response_model=list[Profile], tags=["profiles"])
def list_profiles(ctx: Ctx) -> list[JsonDict]:
    """Every version of every mapping profile."""
    return ctx.bench.datasets.profiles()


@router.post("/mapping-profiles", response_model=Profile, status_code=201, tags=["profiles"])
def save_profile(ctx: Ctx, body: ProfileRequest) -> JsonDict:
    """Save a mapping profile; a changed one becomes the next version."""
    return ctx.bench.datasets.save_profile(body.name, body.profile, body.columns)


@router.get("/mapping-profiles/schema", tags=["profiles"])
def profile_schema() -> dict[str, Any]:
    """JSON schema of a mapping profile."""
    return MappingProfile.model_json_schema()


@router.post("/skill-snapshots", response_model=Snapshot, status_code=201, tags=["skills"])
def take_snapshot(ctx: Ctx, body: SnapshotRequest, key: Key = None) -> JsonDict:
    """Freeze a Skill: deployed (``skill``), a folder, or ``repository`` + ``ref`` + ``path``."""
    given = [body.skill is not None, body.folder is not None, body.repository is not None]
    if sum(given) != 1 or (body.repository is not None) != (body.ref is not None):
        raise DataError("give exactly one of skill, folder, or repository together with ref")

    def make() -> JsonDict:
        if body.skill is not None:
            return ctx.bench.snapshots.add_folder(ctx.config.skill_folder(body.skill))
        if body.folder is not None:
            return ctx.bench.snapshots.add_folder(ctx.config.permitted(body.folder))
        repository = ctx.config.permitted(body.repository or "")
        return ctx.bench.snapshots.add_git(Path(repository), body.ref or "", body.path)

    return ctx.once(key, "snapshot", body.model_dump(), make)


@router.get("/skill-snapshots", response_model=list[Snapshot], tags=["skills"])
def list_snapshots(ctx: Ctx) -> list[JsonDict]:
    """All snapshots, newest first."""
    return ctx.bench.snapshots.all()


@router.get("/skill-snapshots/diff", response_model=list[FileChange], tags=["skills"])
def diff_snapshots(ctx: Ctx, a: SnapshotId, b: SnapshotId) -> list[FileChange]:
    """What changed between two snapshots, by file and section."""
    return diff_skills(ctx.bench.snapshots.load(a), ctx.bench.snapshots.load(b))


@router.get("/skill-snapshots/{snapshot_id}", response_model=Snapshot, tags=["skills"])
def get_snapshot(ctx: Ctx, snapshot_id: SnapshotId) -> JsonDict:
    """One snapshot with its list of files."""
    row = ctx.bench.snapshots.get(snapshot_id)
    skill = ctx.bench.snapshots.load(snapshot_id)
    return {**row, "files": [entry.model_dump() for entry in skill.manifest.files]}


@router.get("/skill-snapshots/{snapshot_id}/verify", tags=["skills"])
def verify_snapshot(ctx: Ctx, snapshot_id: SnapshotId) -> dict[str, Any]:
    """Compare the stored files with the hashes taken when they were frozen; an error names the file that differs."""
    manifest = ctx.bench.snapshots.verify(snapshot_id)
    return {"intact": True, "content_sha256": manifest["content_sha256"], "files": len(manifest["files"])}


@router.get("/skill-snapshots/{snapshot_id}/passage", tags=["skills"])
def passage(
    ctx: Ctx, snapshot_id: SnapshotId, ref: Annotated[str, Query(min_length=1, max_length=1000)]
) -> dict[str, Any]:
    """The text a reference (``file.md#heading``, ``file.md#L3-L9``) leads to."""
    return ctx.bench.snapshots.passage(snapshot_id, ref)


@router.get("/skill-snapshots/{snapshot_id}/file", tags=["skills"])
def snapshot_file(
    ctx: Ctx, snapshot_id: SnapshotId, path: Annotated[str, Query(min_length=1, max_length=1000)]
) -> dict[str, Any]:
    """A file as text and safe HTML, with its headings."""
    return ctx.bench.snapshots.file(snapshot_id, path)


@router.get("/skill-snapshots/{snapshot_id}/raw", response_class=Response, tags=["skills"])
def snapshot_raw(
    ctx: Ctx, snapshot_id: SnapshotId, path: Annotated[str, Query(min_length=1, max_length=1000)]
) -> Response:
    """A file as it is, always as an attachment."""
    data = file_bytes(ctx.bench.snapshots.load(snapshot_id), path)
    if data is None:
        raise MissingError(f"the snapshot has no file {path!r}")
    return Response(data, media_type="application/octet-stream", headers={"content-disposition": "attachment"})


models = APIRouter(prefix="/api/models", tags=["models"])


@models.get("", response_model=list[ModelProfile])
def list_models(ctx: Ctx) -> list[JsonDict]:
    """Every version of every model profile."""
    return ctx.bench.models.all()


@models.post("", response_model=ModelProfile, status_code=201)
def save_model(ctx: Ctx, body: ModelRequest) -> JsonDict:
    """Save a model profile; a changed one becomes the next version. Profiles that name code are added by command."""
    return ctx.bench.models.save(body.name, body.model)


@models.get("/{name}", response_model=ModelProfile)
def get_model(
    ctx: Ctx,
    name: Annotated[str, PathPart(min_length=1, max_length=200)],
    version: Annotated[int | None, Query(ge=1, le=10**9)] = None,
) -> JsonDict:
    """One model profile, its newest version unless one is named."""
    return ctx.bench.models.get(name, version)
