"""The first schema of the store. Written out, so that later changes of the tables do not change this step."""

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

STATEMENTS = [
    """
    CREATE TABLE uploads (
        sha256 VARCHAR NOT NULL,
        file_name TEXT NOT NULL,
        size INTEGER NOT NULL,
        format VARCHAR NOT NULL,
        created_at VARCHAR NOT NULL,
        PRIMARY KEY (sha256)
    )
    """,
    """
    CREATE TABLE dataset_mapping_profiles (
        name VARCHAR NOT NULL,
        version INTEGER NOT NULL,
        body JSON NOT NULL,
        columns JSON NOT NULL,
        sha256 VARCHAR NOT NULL,
        created_at VARCHAR NOT NULL,
        PRIMARY KEY (name, version)
    )
    """,
    """
    CREATE TABLE evaluation_datasets (
        id VARCHAR NOT NULL,
        name VARCHAR NOT NULL,
        version INTEGER NOT NULL,
        parent_id VARCHAR,
        upload_sha256 VARCHAR NOT NULL,
        options JSON NOT NULL,
        profile_name VARCHAR NOT NULL,
        profile_version INTEGER NOT NULL,
        content_sha256 VARCHAR NOT NULL,
        n_cases INTEGER NOT NULL,
        n_labelled INTEGER NOT NULL,
        n_rejected INTEGER NOT NULL,
        classes JSON NOT NULL,
        warnings JSON NOT NULL,
        notes TEXT NOT NULL,
        created_at VARCHAR NOT NULL,
        PRIMARY KEY (id),
        UNIQUE (name, version)
    )
    """,
    """
    CREATE TABLE skill_snapshots (
        id VARCHAR NOT NULL,
        name VARCHAR NOT NULL,
        content_sha256 VARCHAR NOT NULL,
        status VARCHAR NOT NULL,
        source TEXT NOT NULL,
        repository TEXT,
        git_commit VARCHAR,
        git_tag VARCHAR,
        path TEXT NOT NULL,
        n_files INTEGER NOT NULL,
        findings JSON NOT NULL,
        created_at VARCHAR NOT NULL,
        PRIMARY KEY (id)
    )
    """,
    """
    CREATE TABLE model_profiles (
        name VARCHAR NOT NULL,
        version INTEGER NOT NULL,
        body JSON NOT NULL,
        sha256 VARCHAR NOT NULL,
        created_at VARCHAR NOT NULL,
        PRIMARY KEY (name, version)
    )
    """,
    """
    CREATE TABLE evaluation_case_runs (
        id INTEGER NOT NULL,
        experiment_id VARCHAR NOT NULL,
        ordinal INTEGER NOT NULL,
        repeat INTEGER NOT NULL,
        attempt INTEGER NOT NULL,
        token INTEGER NOT NULL,
        owner VARCHAR NOT NULL,
        state VARCHAR NOT NULL,
        failure VARCHAR,
        prediction VARCHAR,
        code VARCHAR,
        message TEXT,
        model_calls INTEGER,
        trace TEXT,
        trace_sha256 VARCHAR,
        started_at VARCHAR NOT NULL,
        ended_at VARCHAR,
        PRIMARY KEY (id)
    )
    """,
    """
    CREATE TABLE evaluation_reviews (
        id INTEGER NOT NULL,
        experiment_id VARCHAR NOT NULL,
        ordinal INTEGER NOT NULL,
        case_id VARCHAR NOT NULL,
        version INTEGER NOT NULL,
        verdict VARCHAR NOT NULL,
        note TEXT NOT NULL,
        reviewer VARCHAR NOT NULL,
        created_at VARCHAR NOT NULL,
        PRIMARY KEY (id),
        UNIQUE (experiment_id, ordinal, version)
    )
    """,
    """
    CREATE TABLE events (
        id INTEGER NOT NULL,
        experiment_id VARCHAR NOT NULL,
        kind VARCHAR NOT NULL,
        data JSON NOT NULL,
        created_at VARCHAR NOT NULL,
        PRIMARY KEY (id)
    )
    """,
    """
    CREATE TABLE idempotency_keys (
        "key" VARCHAR NOT NULL,
        request_sha256 VARCHAR NOT NULL,
        response JSON,
        created_at VARCHAR NOT NULL,
        PRIMARY KEY ("key")
    )
    """,
    """
    CREATE TABLE evaluation_cases (
        dataset_id VARCHAR NOT NULL,
        ordinal INTEGER NOT NULL,
        case_id VARCHAR NOT NULL,
        "query" TEXT NOT NULL,
        gold VARCHAR,
        domain VARCHAR NOT NULL,
        request_id VARCHAR NOT NULL,
        input_sha256 VARCHAR NOT NULL,
        body JSON NOT NULL,
        PRIMARY KEY (dataset_id, ordinal),
        UNIQUE (dataset_id, case_id),
        FOREIGN KEY(dataset_id) REFERENCES evaluation_datasets (id)
    )
    """,
    """
    CREATE TABLE evaluation_experiments (
        id VARCHAR NOT NULL,
        name TEXT NOT NULL,
        dataset_id VARCHAR NOT NULL,
        snapshot_id VARCHAR NOT NULL,
        model_name VARCHAR NOT NULL,
        model_version INTEGER NOT NULL,
        model JSON NOT NULL,
        params JSON NOT NULL,
        fingerprint VARCHAR NOT NULL,
        state VARCHAR NOT NULL,
        reason TEXT NOT NULL,
        concurrency INTEGER NOT NULL,
        n_cases INTEGER NOT NULL,
        cloned_from VARCHAR,
        driver VARCHAR,
        driver_until FLOAT,
        created_at VARCHAR NOT NULL,
        started_at VARCHAR,
        ended_at VARCHAR,
        PRIMARY KEY (id),
        FOREIGN KEY(dataset_id) REFERENCES evaluation_datasets (id),
        FOREIGN KEY(snapshot_id) REFERENCES skill_snapshots (id)
    )
    """,
    """
    CREATE TABLE evaluation_results (
        experiment_id VARCHAR NOT NULL,
        ordinal INTEGER NOT NULL,
        repeat INTEGER NOT NULL,
        case_id VARCHAR NOT NULL,
        domain VARCHAR NOT NULL,
        gold VARCHAR,
        state VARCHAR NOT NULL,
        failure VARCHAR,
        token INTEGER NOT NULL,
        owner VARCHAR,
        lease_until FLOAT,
        attempts INTEGER NOT NULL,
        prediction VARCHAR,
        reason TEXT,
        confidence FLOAT,
        evidence VARCHAR,
        agrees INTEGER,
        detail JSON,
        session_id VARCHAR,
        model_calls INTEGER,
        prompt_tokens INTEGER,
        completion_tokens INTEGER,
        duration_s FLOAT,
        updated_at VARCHAR,
        PRIMARY KEY (experiment_id, ordinal, repeat),
        FOREIGN KEY(experiment_id) REFERENCES evaluation_experiments (id)
    )
     WITHOUT ROWID
    """,
    """
    CREATE INDEX case_runs_by_case ON evaluation_case_runs (experiment_id, ordinal, repeat, attempt)
    """,
    """
    CREATE INDEX events_by_experiment ON events (experiment_id, id)
    """,
    """
    CREATE INDEX results_by_confidence ON evaluation_results (experiment_id, confidence, ordinal, repeat)
    """,
    """
    CREATE INDEX results_by_agreement ON evaluation_results (experiment_id, agrees, ordinal, repeat)
    """,
    """
    CREATE INDEX results_by_state ON evaluation_results (experiment_id, state, ordinal, repeat)
    """,
    """
    CREATE INDEX results_by_domain ON evaluation_results (experiment_id, domain, ordinal, repeat)
    """,
    """
    CREATE INDEX results_by_evidence ON evaluation_results (experiment_id, evidence, ordinal, repeat)
    """,
    """
    CREATE INDEX results_by_prediction ON evaluation_results (experiment_id, prediction, ordinal, repeat)
    """,
]
TABLES = [
    "uploads",
    "dataset_mapping_profiles",
    "evaluation_datasets",
    "skill_snapshots",
    "model_profiles",
    "evaluation_case_runs",
    "evaluation_reviews",
    "events",
    "idempotency_keys",
    "evaluation_cases",
    "evaluation_experiments",
    "evaluation_results",
]


def upgrade() -> None:
    """Create every table."""
    for statement in STATEMENTS:
        op.execute(statement)


def downgrade() -> None:
    """Drop every table."""
    for name in reversed(TABLES):
        op.execute(f"DROP TABLE {name}")
