"""Bodies of requests. All strict: an unknown field is an error that names it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rayrl.workbench.experiments import Params
from rayrl.workbench.mapping import MappingProfile
from rayrl.workbench.readers.rows import Options
from rayrl.workbench.results import Filter

ExperimentId = Annotated[str, Field(pattern=r"^ex_[0-9a-f]{16}$")]
DatasetId = Annotated[str, Field(pattern=r"^ds_[0-9a-f]{16}$")]
SnapshotId = Annotated[str, Field(pattern=r"^sk_[0-9a-f]{16}$")]
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
Concurrency = Annotated[int, Field(ge=1, le=256)]


class Body(BaseModel):
    """Base of request bodies."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ReadOptions(Body):
    """How a file is to be read; what is left out is found out."""

    format: Literal["csv", "xlsx", "jsonl"] | None = None
    encoding: str | None = Field(None, max_length=40, pattern=r"^[A-Za-z0-9_.:-]+$")
    delimiter: str | None = Field(None, min_length=1, max_length=1)
    sheet: str | None = Field(None, max_length=100)
    fill_merged: bool = False

    def options(self) -> Options:
        """The reader's own form."""
        return Options(**self.model_dump())


class PreviewRequest(Body):
    """What to preview: a mapping in the making, or a saved profile (then with a drift report)."""

    options: ReadOptions = ReadOptions()
    profile: MappingProfile | None = None
    profile_name: Name | None = None
    profile_version: int | None = Field(None, ge=1, le=10**9)
    rows: int = Field(20, ge=1, le=200)


class MappingRequest(Body):
    """Freeze a data set under a profile given here (saved under ``profile_name``) or saved before."""

    name: Name
    options: ReadOptions = ReadOptions()
    profile: MappingProfile | None = None
    profile_name: Name
    profile_version: int | None = Field(None, ge=1, le=10**9)
    skip_errors: bool = False


class ProfileRequest(Body):
    """A mapping profile to save."""

    name: Name
    profile: MappingProfile
    columns: list[Annotated[str, Field(max_length=300)]] = Field([], max_length=1000)


class SnapshotRequest(Body):
    """Which Skill to freeze: a deployed one by name, a folder, or a path at a commit or tag of a repository."""

    skill: Name | None = None
    folder: str | None = Field(None, max_length=1000)
    repository: str | None = Field(None, max_length=1000)
    ref: str | None = Field(None, max_length=200)
    path: str = Field("", max_length=500)


class ExperimentRequest(Body):
    """An experiment to create."""

    name: Name
    dataset_id: DatasetId
    snapshot_id: SnapshotId
    model: Name
    model_version: int | None = Field(None, ge=1, le=10**9)
    params: Params = Params()
    concurrency: Concurrency | None = None
    start: bool = False


class CloneRequest(Body):
    """What differs in the copy."""

    name: Name | None = None
    dataset_id: DatasetId | None = None
    snapshot_id: SnapshotId | None = None
    model: Name | None = None
    model_version: int | None = Field(None, ge=1, le=10**9)
    params: dict[str, Any] | None = None
    concurrency: Concurrency | None = None


class MatrixRequest(Body):
    """Skills times models on one data set."""

    name: Name
    dataset_id: DatasetId
    snapshot_ids: list[SnapshotId] = Field(min_length=1, max_length=64)
    models: list[Name] = Field(min_length=1, max_length=64)
    params: Params = Params()
    concurrency: Concurrency | None = None
    start: bool = False


class SingleRequest(Body):
    """One input, run at once."""

    snapshot_id: SnapshotId
    model: Name
    query: str = Field(min_length=1, max_length=100_000)
    history: list[Any] = Field([], max_length=1000)
    context: dict[str, Any] = {}
    classes: list[Name] = Field(["fast", "slow"], min_length=2, max_length=50)
    wait_s: float = Field(0.0, ge=0, le=120)


class PatchRequest(Body):
    """What can change while an experiment runs."""

    concurrency: Concurrency


class RetryRequest(Body):
    """Which cases run again."""

    which: Literal["failed", "disagreements", "cancelled", "cases"]
    cases: list[Annotated[str, Field(max_length=200)]] = Field([], max_length=10_000)


class ReviewRequest(Body):
    """A review of one case."""

    ordinal: int = Field(ge=0, le=10**9)
    verdict: Literal["gold_right", "model_right", "ambiguous", "capability_missing", "undecided"]
    note: str = Field("", max_length=10_000)
    reviewer: str = Field("", max_length=200)


class RepairRequest(Body):
    """How reviews become a data set version."""

    drop_ambiguous: bool = False


class CompareRequest(Body):
    """Two experiments."""

    a: ExperimentId
    b: ExperimentId
    reason_threshold: float = Field(0.6, ge=0, le=1)
    examples: int = Field(200, ge=0, le=100_000)


class ModelRequest(Body):
    """A model profile: a name and a ``model`` section."""

    name: Name
    model: dict[str, Any]


class SessionRequest(Body):
    """A new interactive session with a deployed Skill."""

    skill: Name
    model: Name
    classes: list[Name] = Field(["fast", "slow"], min_length=2, max_length=50)


class MessageRequest(Body):
    """What the user says."""

    text: str = Field(min_length=1, max_length=100_000)


class ResultQuery(Filter):
    """Filters and page of a list of results."""

    limit: int = Field(50, ge=1, le=500)
    cursor: str | None = Field(None, max_length=100)


class GateRequest(Body):
    """A question for the retrieval gate."""

    question: str = Field(min_length=1, max_length=10_000)
