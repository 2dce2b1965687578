"""The OpenAPI document is complete, and nothing it allows ends in a server error."""

import pytest
from hypothesis import HealthCheck, given, settings

schemathesis = pytest.importorskip("schemathesis")

from rayrl.studio.app import create_app  # noqa: E402
from rayrl.studio.config import StudioConfig  # noqa: E402
from rayrl.workbench.samples import SKILL, skill_folder  # noqa: E402
from rayrl.workbench.workbench import Workbench  # noqa: E402
from tests.workbench.conftest import drive, sample_experiment  # noqa: E402

REAL: dict[str, object] = {"wait_s": 0}
"""Ids of things that are there: with random ones nearly every answer would be 404."""

SEED_ROUTES = [
    ("post", "/api/evaluations/datasets"),
    ("post", "/api/evaluations/datasets/{upload_id}/mapping"),
    ("post", "/api/evaluations/skill-snapshots"),
    ("get", "/api/evaluations/skill-snapshots"),
    ("post", "/api/evaluations"),
    ("get", "/api/evaluations/{experiment_id}"),
    *(
        ("post", f"/api/evaluations/{{experiment_id}}/{word}")
        for word in ("start", "pause", "resume", "cancel", "retry", "reviews")
    ),
    ("get", "/api/evaluations/{experiment_id}/results"),
    ("get", "/api/evaluations/{experiment_id}/export"),
    ("post", "/api/evaluations/compare"),
    ("get", "/api/models"),
    ("post", "/api/sessions"),
    ("post", "/api/gate"),
]


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    root = tmp_path_factory.mktemp("store")
    bench = Workbench(root)
    made = sample_experiment(bench, 12)
    drive(bench, made["id"])
    upload = bench.datasets.get(made["dataset_id"])["upload_sha256"]
    REAL.update(experiment_id=made["id"], dataset_id=made["dataset_id"], snapshot_id=made["snapshot_id"])
    REAL.update(upload_id=upload, a=made["id"], b=made["id"], model="reader", name="reader")
    yield create_app(bench, StudioConfig(root=str(root), skills={SKILL: str(skill_folder(1))}))
    bench.close()


@pytest.fixture
def schema(app):
    return schemathesis.openapi.from_asgi("/api/openapi.json", app, headers={"host": "localhost"})


def test_document_has_every_route_with_words(app):
    document = app.openapi()
    for method, path in SEED_ROUTES:
        operation = document["paths"][path][method]
        assert operation["summary"] and operation["description"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation.get("description"), f"{method} {path} says nothing"
            assert "422" in operation["responses"]


@pytest.mark.slow
def test_nothing_ends_in_a_server_error(schema):
    operations, seen = [found.ok() for found in schema.get_all_operations()], {}
    for operation in operations:

        @settings(max_examples=12, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def ask(case):
            for part in (case.path_parameters, case.query, case.body):
                if isinstance(part, dict):
                    part.update({key: REAL[key] for key in part if key in REAL})
            if case.path.endswith("/events"):
                case.query = {**(case.query or {}), "follow": "false"}
            answer = case.call(headers={"host": "localhost"})
            assert answer.status_code < 500, f"{case.method} {case.formatted_path}: {answer.text[:500]}"
            if answer.status_code >= 400:
                assert set(answer.json()) == {"error"}
            seen[answer.status_code] = seen.get(answer.status_code, 0) + 1

        ask()
    assert len(operations) >= 40 and sum(seen.values()) >= 12 * len(operations) / 2
    print(f"{len(operations)} operations, answers by status: {dict(sorted(seen.items()))}")
