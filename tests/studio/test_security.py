"""What the application refuses, and what it stays alive through."""

import csv
import io
import json
import zipfile

import pytest
from starlette.testclient import TestClient

from rayrl.errors import ConfigError
from rayrl.studio.app import create_app
from rayrl.studio.config import StudioConfig
from rayrl.workbench.samples import SKILL
from rayrl.workbench.workbench import Workbench
from tests.studio.conftest import experiment, snapshot, upload, wait
from tests.workbench.files import HEAD, cell, sheet, workbook


def post(client, name, data):
    return client.post("/api/evaluations/datasets", files={"file": (name, data)})


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """An application without a supervisor, for requests that run nothing."""
    root = tmp_path_factory.mktemp("store")
    bench = Workbench(root)
    with TestClient(create_app(bench, StudioConfig(root=str(root))), base_url="http://localhost:8765") as client:
        yield client
    bench.close()


# --- trap files through the API: an answer each time, and the application still answers


def bomb():
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as package:
        package.writestr("xl/workbook.xml", b"\0" * 100_000_000)
    return out.getvalue()


TRAPS = {
    "far cell": (workbook(("S", sheet([HEAD, (1048576, [cell("XFD1048576", "x")])]))), 201, ""),
    "zip bomb": (bomb(), 422, "zip bomb"),
    "formula": (workbook(("S", sheet([HEAD, (2, ['<c r="B2"><f>1</f></c>'])]))), 422, "cell S!B2"),
    "open quote": (b'id,q\n1,"x\n' + b"2,y\n" * 100, 422, "line 2: the CSV quoting"),
    "not text": (b"\x00\x01\x02\xff" * 100, 422, "neither UTF-8 nor GB18030"),
    "empty": (b"", 422, "the file is empty"),
    "header only": (b"id,q\n", 422, "no data rows"),
    "deep json": (b'{"a":' * 50_000, 422, "line 1"),
    "half zip": (b"PK\x03\x04" + b"x" * 50, 422, "no XLSX file"),
}


@pytest.mark.parametrize("name", TRAPS)
def test_trap_files_get_a_clear_answer(plain, name):
    data, status, message = TRAPS[name]
    answer = post(plain, "f.csv" if not data.startswith(b"{") else "f.jsonl", data)
    assert answer.status_code == status and message in answer.text
    assert plain.get("/api/health").json()["status"] == "ok"


@pytest.mark.parametrize(
    "name", ["../../../../tmp/evil.csv", "/etc/passwd", "..\\..\\x.csv", "a\x00b.csv", "<script>.csv", "x" * 500]
)
def test_file_names_are_only_shown(plain, name, tmp_path):
    answer = post(plain, name, b"id,q\n1,x\n")
    assert answer.status_code == 201
    stored = plain.app.state.context.bench.store
    assert stored.blob(answer.json()["upload_id"]).read_bytes() == b"id,q\n1,x\n"
    assert len(answer.json()["file_name"]) <= 200 and "\x00" not in answer.json()["file_name"]


def test_too_large_uploads_and_bodies_are_cut_off(tmp_path):
    bench = Workbench(tmp_path)
    config = StudioConfig(root=str(tmp_path), max_upload_mb=1)
    with TestClient(create_app(bench, config), base_url="http://127.0.0.1") as client:
        assert post(client, "x.csv", b"q\n" + b"x\n" * 2_000_000).status_code == 413

        def stream():
            for _ in range(80):
                yield b" " * 100_000

        assert client.post("/api/evaluations/compare", content=stream()).status_code == 413
        assert client.get("/api/health").status_code == 200


# --- paths


@pytest.mark.parametrize(
    "path", ["../../../etc/passwd", "/etc/passwd", "knowledge/../../../x", "..%2f..%2fetc", "tree/SKILL.md"]
)
def test_no_path_leads_out_of_a_snapshot(studio, path):
    found = snapshot(studio)["id"]
    for route in ("file", "raw"):
        assert studio.get(f"/api/evaluations/skill-snapshots/{found}/{route}", params={"path": path}).status_code == 404
    assert studio.get(f"/api/evaluations/skill-snapshots/{found}/passage", params={"ref": path}).status_code == 404


def test_snapshots_are_taken_only_below_configured_folders(studio, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "SKILL.md").write_text("---\nname: outside\n---\n# x\n")
    for body in ({"folder": str(outside)}, {"folder": "/"}, {"repository": "/", "ref": "HEAD"}, {"folder": "a\x00b"}):
        answer = studio.post("/api/evaluations/skill-snapshots", json=body)
        assert answer.status_code == 422 and "outside" not in answer.json()["error"]["message"]


def test_code_is_not_named_over_http(studio):
    body = {"name": "evil", "model": {"kind": "os:system", "options": {"command": "touch /tmp/x"}}}
    answer = studio.post("/api/models", json=body)
    assert answer.status_code == 422 and "names code" in answer.text
    dataset = upload(studio, n=3)
    body = {"name": "e", "dataset_id": dataset["id"], "snapshot_id": snapshot(studio)["id"], "model": "reader"}
    answer = studio.post("/api/evaluations", json={**body, "params": {"tools": ["os:system"]}})
    assert answer.status_code == 422 and "not known here" in answer.text
    key = {"name": "k", "model": {"kind": "openai", "base_url": "http://x/v1", "extra_body": {"api_key": "s3cret"}}}
    answer = studio.post("/api/models", json=key)
    assert answer.status_code == 422 and "s3cret" not in answer.text


# --- stored scripts


def test_scripts_in_cases_reasons_and_skills_stay_data(studio, tmp_path):
    evil = "<script>alert(1)</script>"
    line = json.dumps({"query": f"导航去{evil}", "label": "fast", "domain": evil})
    answer = post(studio, "x.jsonl", line.encode())
    profile = {
        "fields": {
            "query": {"sources": ["query"]},
            "gold_route": {"sources": ["label"]},
            "domain": {"sources": ["domain"]},
        }
    }
    body = {"name": evil, "profile_name": "p", "profile": profile}
    dataset = studio.post(f"/api/evaluations/datasets/{answer.json()['upload_id']}/mapping", json=body).json()
    made = experiment(studio, dataset)
    wait(studio, made)
    for path in (f"/{made}/results", f"/{made}/cases/0", f"/{made}", f"/{made}/metrics", "/datasets"):
        answer = studio.get(f"/api/evaluations{path}")
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "script-src 'self'" in answer.headers["content-security-policy"]
    detail = studio.get(f"/api/evaluations/{made}/cases/0").json()
    assert evil in detail["case"]["query"]
    assert all(evil not in (p["passage"] or {}).get("html", "") for p in detail["passages"])
    for answer in (
        studio.get(f"/api/evaluations/{made}/export"),
        studio.get(f"/api/evaluations/{made}/bundle"),
        studio.get(f"/api/evaluations/skill-snapshots/{snapshot(studio)['id']}/raw", params={"path": "SKILL.md"}),
    ):
        assert answer.headers["content-disposition"].startswith("attachment")


def test_scripts_and_formulas_in_reasons_and_skill_files_stay_data(studio, tmp_path):
    evil, formula = "<img src=x onerror=alert(1)><script>alert(2)</script>", '=HYPERLINK("http://x.y","z")'
    bench = studio.app.state.context.bench
    folder = tmp_path / "evil"
    (folder / "knowledge").mkdir(parents=True)
    main = f"---\nname: evil\ndescription: '{evil}'\n---\n# {evil}\n\n[x](javascript:alert(3)) {evil}\n"
    (folder / "SKILL.md").write_text(main)
    (folder / "knowledge" / "<b>.md").write_text(f"## {evil}\n\n<svg/onload=alert(4)>\n")
    skill = bench.snapshots.add_folder(folder)["id"]
    dataset = upload(studio, n=3)
    body = {"name": "e", "dataset_id": dataset["id"], "snapshot_id": skill, "model": "reader"}
    made = studio.post("/api/evaluations", json=body).json()["id"]
    with bench.store.write() as connection:
        connection.exec_driver_sql(
            "UPDATE evaluation_results SET state='completed', reason=?, prediction=? WHERE experiment_id=?",
            (formula + evil, evil, made),
        )
    for ordinal in range(3):
        review = {"ordinal": ordinal, "verdict": "ambiguous", "note": formula, "reviewer": evil}
        assert studio.post(f"/api/evaluations/{made}/reviews", json=review).status_code == 201

    base = f"/api/evaluations/skill-snapshots/{skill}"
    for path in ("SKILL.md", "knowledge/<b>.md"):
        answer = studio.get(f"{base}/file", params={"path": path})
        shown = answer.json()["html"].lower()
        assert answer.headers["content-type"] == "application/json" and "alert" in answer.json()["text"]
        for tag in ("<script", "<img", "<svg", 'href="javascript'):
            assert tag not in shown
        raw = studio.get(f"{base}/raw", params={"path": path})
        assert raw.headers["content-type"] == "application/octet-stream"
        assert raw.headers["content-disposition"].startswith("attachment")
    for path in ("results", "metrics", "cases/0", "reviews"):
        answer = studio.get(f"/api/evaluations/{made}/{path}")
        assert answer.headers["content-type"] == "application/json" and "script-src 'self'" in str(answer.headers)
    for kind, column in (("results", "reason"), ("reviews", "note")):
        answer = studio.get(f"/api/evaluations/{made}/export", params={"kind": kind})
        rows = list(csv.DictReader(io.StringIO(answer.content.decode("utf-8-sig"), newline="")))
        assert len(rows) == 3 and all(row[column].startswith("'=HYPERLINK") for row in rows)
        book = studio.get(f"/api/evaluations/{made}/export", params={"kind": kind, "format": "xlsx"}).content
        with zipfile.ZipFile(io.BytesIO(book)) as package:
            xml = package.read("xl/worksheets/sheet1.xml").decode()
        assert "<f>" not in xml and "hyperlink" not in xml


# --- who may ask


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "127.0.0.1:8765"}, 200),
        ({"host": "[::1]:8765"}, 200),
        ({"host": "evil.example"}, 421),
        ({"host": "127.0.0.1.evil.example"}, 421),
        ({"host": "127.0.0.1:8765@evil"}, 421),
        ({"host": "a:b:c"}, 421),
    ],
)
def test_host_names(plain, headers, status):
    assert plain.get("/api/health", headers=headers).status_code == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://localhost:8765"}, 404),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://localhost:9999"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-origin"}, 404),
        ({}, 404),
    ],
)
def test_changes_come_from_our_own_origin(plain, headers, status):
    assert plain.post("/api/evaluations/ex_0000000000000000/start", headers=headers).status_code == status


def test_token_is_needed_beyond_loopback_and_where_set(tmp_path):
    bench = Workbench(tmp_path)
    with pytest.raises(ConfigError, match="set a token in"):
        create_app(bench, StudioConfig(root=str(tmp_path), host="0.0.0.0"))
    config = StudioConfig(root=str(tmp_path), host="0.0.0.0", allowed_hosts=["studio.lan"])
    app = create_app(bench, config, token="s3cret")
    with TestClient(app, base_url="http://studio.lan") as client:
        assert client.get("/api/health").status_code == 401
        assert client.get("/api/health", headers={"authorization": "Bearer wrong"}).status_code == 401
        assert client.get("/api/health", headers={"authorization": "Bearer s3cret"}).status_code == 200
        assert client.get("/api/health", cookies={"rayrl_token": "s3cret"}).status_code == 200
        assert "s3cret" not in client.get("/api/openapi.json", headers={"authorization": "Bearer s3cret"}).text


def test_reviews_over_http_use_etags(studio):
    made = experiment(studio, upload(studio, n=3))
    wait(studio, made)
    tag = studio.get(f"/api/evaluations/{made}/cases/0").headers["etag"]
    body = {"ordinal": 0, "verdict": "ambiguous"}
    url = f"/api/evaluations/{made}/reviews"
    first = studio.post(url, json=body, headers={"if-match": tag})
    assert first.status_code == 201 and first.headers["etag"] == '"1"'
    assert studio.post(url, json=body, headers={"if-match": tag}).status_code == 412
    assert studio.post(url, json=body, headers={"if-match": '"1"'}).status_code == 201
    assert [r["version"] for r in studio.get(url, params={"history": True}).json()] == [1, 2]


def test_interactive_sessions_live_apart_from_the_batch(studio):
    made = experiment(studio, upload(studio, n=10))
    one = studio.post("/api/sessions", json={"skill": SKILL, "model": "reader"}).json()
    turn = studio.post(f"/api/sessions/{one['id']}/messages", json={"text": "到公司电量够不够"}).json()
    assert turn["verdict"]["prediction"] == "fast" and [c["name"] for c in turn["calls"]][0] == "list_files"
    again = studio.post(f"/api/sessions/{one['id']}/messages", json={"text": "帮我规划一下周末行程"}).json()
    assert again["verdict"]["prediction"] == "slow"
    wait(studio, made)
    assert [s["id"] for s in studio.get("/api/sessions").json()] == [one["id"]]
    assert studio.get(f"/api/sessions/{one['id']}").json()["turns"] == 2
    assert studio.post(f"/api/sessions/{one['id']}/continue").status_code == 409
    assert studio.delete(f"/api/sessions/{one['id']}").status_code == 204
    assert studio.get(f"/api/sessions/{one['id']}").status_code == 404


def test_a_turn_can_be_stopped_and_continued(studio):
    import threading
    import time

    body = {"name": "slow", "model": {"kind": "rayrl.workbench.reader:ScriptedReader", "options": {"latency_ms": 300}}}
    assert studio.post("/api/models", json=body).status_code == 201
    one = studio.post("/api/sessions", json={"skill": SKILL, "model": "slow"}).json()["id"]
    answers = []
    send = threading.Thread(
        target=lambda: answers.append(
            studio.post(f"/api/sessions/{one}/messages", json={"text": "到公司电量够不够"}).json()
        )
    )
    send.start()
    until = time.monotonic() + 10
    while studio.get(f"/api/sessions/{one}").json()["state"] != "running" and time.monotonic() < until:
        time.sleep(0.02)
    assert studio.post(f"/api/sessions/{one}/messages", json={"text": "x"}).status_code == 409
    assert studio.post(f"/api/sessions/{one}/stop").json()["state"] == "stopped"
    send.join(10)
    assert answers[0]["state"] == "stopped"
    assert studio.post(f"/api/sessions/{one}/continue").json()["verdict"]["prediction"] == "fast"


def test_gate_says_when_there_is_none(plain):
    assert plain.post("/api/gate", json={"question": "x"}).status_code == 404
