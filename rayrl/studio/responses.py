"""Bodies of answers, as the OpenAPI document describes them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """Base of answers: named fields are always there, more may come."""

    model_config = ConfigDict(extra="allow")


class ErrorBody(BaseModel):
    """What went wrong."""

    type: str
    message: str
    detail: Any = None


class ErrorAnswer(BaseModel):
    """Every error has this form."""

    error: ErrorBody


class UploadAnswer(Answer):
    """A stored file and what it seems to hold."""

    upload_id: str
    file_name: str
    size: int
    format: str
    columns: list[str]
    n_rows: int
    rows: list[dict[str, Any]]
    suggested: dict[str, str]
    warnings: list[str]


class PreviewAnswer(Answer):
    """A file, and with a mapping the first cases and the errors of rows."""

    columns: list[str]
    n_rows: int
    rows: list[dict[str, Any]]
    suggested: dict[str, str]
    cases: list[dict[str, Any]] | None = None
    n_errors: int | None = None
    errors: list[dict[str, Any]] | None = None
    drift: dict[str, Any] | None = None


class Dataset(Answer):
    """A data set version."""

    id: str
    name: str
    version: int
    n_cases: int
    n_labelled: int
    classes: list[str]
    content_sha256: str
    profile_name: str
    profile_version: int


class Profile(Answer):
    """A version of a mapping profile."""

    name: str
    version: int
    body: dict[str, Any]
    sha256: str


class Snapshot(Answer):
    """A frozen Skill. ``status`` is ``committed``, ``draft`` (uncommitted) or ``deployed``."""

    id: str
    name: str
    content_sha256: str
    status: str
    git_commit: str | None
    git_tag: str | None
    repository: str | None
    n_files: int
    findings: list[dict[str, Any]]


class ModelProfile(Answer):
    """A version of a model profile."""

    name: str
    version: int
    body: dict[str, Any]
    sha256: str


class Experiment(Answer):
    """An experiment and the states of its cases."""

    id: str
    name: str
    state: str
    reason: str
    dataset_id: str
    snapshot_id: str
    model_name: str
    model_version: int
    params: dict[str, Any]
    fingerprint: str
    concurrency: int
    n_cases: int
    counts: dict[str, int]


class ResultPage(Answer):
    """A page of results; ``next`` is the cursor of the following one."""

    items: list[dict[str, Any]]
    next: str | None


class CaseDetail(Answer):
    """Everything about one case."""

    experiment_id: str
    case: dict[str, Any]
    result: dict[str, Any]
    passages: list[dict[str, Any]]
    attempts: list[dict[str, Any]]
    reviews: list[dict[str, Any]]


class Review(Answer):
    """One version of a review."""

    ordinal: int
    case_id: str
    version: int
    verdict: str
    note: str
    reviewer: str
    created_at: str


class Metrics(Answer):
    """Figures under one view of the labels, with their denominators."""

    view: str
    denominators: dict[str, int]
    overall: dict[str, Any]
    by_domain: dict[str, Any]


class Comparison(Answer):
    """Experiment ``b`` compared with ``a``."""

    a: dict[str, Any]
    b: dict[str, Any]
    denominators: dict[str, int]
    overall: dict[str, Any]
    by_domain: dict[str, Any]
    counts: dict[str, int]
    groups: dict[str, list[str]]
    skill_diff: list[dict[str, Any]]


class Session(Answer):
    """An interactive session."""

    id: str
    skill: str
    model: str
    state: str
    turns: int
