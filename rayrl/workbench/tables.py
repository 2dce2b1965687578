"""The tables of the workbench store (SQLAlchemy Core). Migrations under ``migrations/`` bring a database here.

Statuses are text; times are ISO text in UTC except lease times, which are seconds since the epoch so that they compare
as numbers. Large bodies lie on disk with their digest here.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

metadata = MetaData()

uploads = Table(
    "uploads",
    metadata,
    Column("sha256", String, primary_key=True),
    Column("file_name", Text, nullable=False),
    Column("size", Integer, nullable=False),
    Column("format", String, nullable=False),
    Column("created_at", String, nullable=False),
)

mapping_profiles = Table(
    "dataset_mapping_profiles",
    metadata,
    Column("name", String, primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("body", JSON, nullable=False),
    Column("columns", JSON, nullable=False),
    Column("sha256", String, nullable=False),
    Column("created_at", String, nullable=False),
)

datasets = Table(
    "evaluation_datasets",
    metadata,
    Column("id", String, primary_key=True),
    Column("name", String, nullable=False),
    Column("version", Integer, nullable=False),
    Column("parent_id", String),
    Column("upload_sha256", String, nullable=False),
    Column("options", JSON, nullable=False),
    Column("profile_name", String, nullable=False),
    Column("profile_version", Integer, nullable=False),
    Column("content_sha256", String, nullable=False),
    Column("n_cases", Integer, nullable=False),
    Column("n_labelled", Integer, nullable=False),
    Column("n_rejected", Integer, nullable=False),
    Column("classes", JSON, nullable=False),
    Column("warnings", JSON, nullable=False),
    Column("notes", Text, nullable=False),
    Column("created_at", String, nullable=False),
    UniqueConstraint("name", "version"),
)

cases = Table(
    "evaluation_cases",
    metadata,
    Column("dataset_id", String, ForeignKey("evaluation_datasets.id"), primary_key=True),
    Column("ordinal", Integer, primary_key=True),
    Column("case_id", String, nullable=False),
    Column("query", Text, nullable=False),
    Column("gold", String),
    Column("domain", String, nullable=False),
    Column("request_id", String, nullable=False),
    Column("input_sha256", String, nullable=False),
    Column("body", JSON, nullable=False),
    UniqueConstraint("dataset_id", "case_id"),
    Index("cases_by_text", "dataset_id", "ordinal", "case_id", "query"),
)

snapshots = Table(
    "skill_snapshots",
    metadata,
    Column("id", String, primary_key=True),
    Column("name", String, nullable=False),
    Column("content_sha256", String, nullable=False),
    Column("status", String, nullable=False),
    Column("source", Text, nullable=False),
    Column("repository", Text),
    Column("git_commit", String),
    Column("git_tag", String),
    Column("path", Text, nullable=False),
    Column("n_files", Integer, nullable=False),
    Column("findings", JSON, nullable=False),
    Column("created_at", String, nullable=False),
)

model_profiles = Table(
    "model_profiles",
    metadata,
    Column("name", String, primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("body", JSON, nullable=False),
    Column("sha256", String, nullable=False),
    Column("created_at", String, nullable=False),
)

experiments = Table(
    "evaluation_experiments",
    metadata,
    Column("id", String, primary_key=True),
    Column("name", Text, nullable=False),
    Column("dataset_id", String, ForeignKey("evaluation_datasets.id"), nullable=False),
    Column("snapshot_id", String, ForeignKey("skill_snapshots.id"), nullable=False),
    Column("model_name", String, nullable=False),
    Column("model_version", Integer, nullable=False),
    Column("model", JSON, nullable=False),
    Column("params", JSON, nullable=False),
    Column("fingerprint", String, nullable=False),
    Column("state", String, nullable=False),
    Column("reason", Text, nullable=False),
    Column("concurrency", Integer, nullable=False),
    Column("n_cases", Integer, nullable=False),
    Column("cloned_from", String),
    Column("driver", String),
    Column("driver_until", Float),
    Column("created_at", String, nullable=False),
    Column("started_at", String),
    Column("ended_at", String),
)

results = Table(
    "evaluation_results",
    metadata,
    Column("experiment_id", String, ForeignKey("evaluation_experiments.id"), primary_key=True),
    Column("ordinal", Integer, primary_key=True),
    Column("repeat", Integer, primary_key=True),
    Column("case_id", String, nullable=False),
    Column("domain", String, nullable=False),
    Column("gold", String),
    Column("state", String, nullable=False),
    Column("failure", String),
    Column("token", Integer, nullable=False),
    Column("owner", String),
    Column("lease_until", Float),
    Column("attempts", Integer, nullable=False),
    Column("prediction", String),
    Column("reason", Text),
    Column("confidence", Float),
    Column("evidence", String),
    Column("agrees", Integer),
    Column("detail", JSON),
    Column("session_id", String),
    Column("model_calls", Integer),
    Column("prompt_tokens", Integer),
    Column("completion_tokens", Integer),
    Column("duration_s", Float),
    Column("updated_at", String),
    Index("results_by_state", "experiment_id", "state", "ordinal", "repeat"),
    Index("results_by_agreement", "experiment_id", "agrees", "ordinal", "repeat"),
    Index("results_by_domain", "experiment_id", "domain", "ordinal", "repeat"),
    Index("results_by_evidence", "experiment_id", "evidence", "ordinal", "repeat"),
    Index("results_by_prediction", "experiment_id", "prediction", "ordinal", "repeat"),
    Index("results_by_confidence", "experiment_id", "confidence", "ordinal", "repeat"),
    sqlite_with_rowid=False,
)

case_runs = Table(
    "evaluation_case_runs",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("experiment_id", String, nullable=False),
    Column("ordinal", Integer, nullable=False),
    Column("repeat", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("token", Integer, nullable=False),
    Column("owner", String, nullable=False),
    Column("state", String, nullable=False),
    Column("failure", String),
    Column("prediction", String),
    Column("code", String),
    Column("message", Text),
    Column("model_calls", Integer),
    Column("trace", Text),
    Column("trace_sha256", String),
    Column("started_at", String, nullable=False),
    Column("ended_at", String),
    Index("case_runs_by_case", "experiment_id", "ordinal", "repeat", "attempt"),
)

reviews = Table(
    "evaluation_reviews",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("experiment_id", String, nullable=False),
    Column("ordinal", Integer, nullable=False),
    Column("case_id", String, nullable=False),
    Column("version", Integer, nullable=False),
    Column("verdict", String, nullable=False),
    Column("note", Text, nullable=False),
    Column("reviewer", String, nullable=False),
    Column("created_at", String, nullable=False),
    UniqueConstraint("experiment_id", "ordinal", "version"),
)

events = Table(
    "events",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("experiment_id", String, nullable=False),
    Column("kind", String, nullable=False),
    Column("data", JSON, nullable=False),
    Column("created_at", String, nullable=False),
    Index("events_by_experiment", "experiment_id", "id"),
)

idempotency = Table(
    "idempotency_keys",
    metadata,
    Column("key", String, primary_key=True),
    Column("request_sha256", String, nullable=False),
    Column("response", JSON),
    Column("created_at", String, nullable=False),
)
