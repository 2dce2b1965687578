"""The OpenAPI document is complete, and nothing it allows ends in a server error."""

import pytest
from hypothesis import HealthCheck, settings

schemathesis = pytest.importorskip("schemathesis")

from rayrl.studio.app import create_app  # noqa: E402
from rayrl.studio.config import StudioConfig  # noqa: E402
from rayrl.workbench.samples import SKILL, skill_folder  # noqa: E402
from rayrl.workbench.workbench import Workbench  # noqa: E402

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
    yield create_app(bench, StudioConfig(root=str(root), skills={SKILL: str(skill_folder(1))}))
    bench.close()


@pytest.fixture
def schema(app):
    return schemathesis.openapi.from_asgi("/api/openapi.json", app, headers={"host": "localhost"})


lazy = schemathesis.pytest.from_fixture("schema")


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
@lazy.parametrize()
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_nothing_ends_in_a_server_error(case):
    if case.path.endswith("/events"):
        case.query = {**(case.query or {}), "follow": "false"}
    answer = case.call(headers={"host": "localhost"})
    assert answer.status_code < 500, f"{case.method} {case.formatted_path}: {answer.text[:500]}"
    if answer.status_code >= 400:
        assert set(answer.json()) == {"error"}
