"""The whole road over HTTP: upload, mapping, snapshot, experiment, results, metrics, comparison, export."""

import csv
import io
import json

import pytest

from tests.studio.conftest import experiment, snapshot, upload, wait


def test_the_road_from_file_to_comparison(studio):
    dataset = upload(studio, "csv", 30)
    assert (dataset["n_cases"], dataset["n_labelled"], dataset["classes"]) == (30, 30, ["fast", "slow"])
    a, b = experiment(studio, dataset), experiment(studio, dataset, "v2")
    found = wait(studio, a)
    wait(studio, b)
    assert found["counts"] == {"pending": 0, "running": 0, "completed": 30, "failed": 0, "cancelled": 0}

    page = studio.get(f"/api/evaluations/{a}/results", params={"limit": 20}).json()
    rest = studio.get(f"/api/evaluations/{a}/results", params={"limit": 20, "cursor": page["next"]}).json()
    ids = [row["case_id"] for row in page["items"] + rest["items"]]
    assert ids == [f"{n:04d}" for n in range(1, 31)] and rest["next"] is None

    metrics = studio.get(f"/api/evaluations/{a}/metrics").json()
    right = sum(row["agrees"] for row in page["items"] + rest["items"])
    assert metrics["overall"]["accuracy"]["successes"] == right and metrics["denominators"]["scored"] == 30

    compared = studio.get("/api/evaluations/compare", params={"a": a, "b": b}).json()
    assert compared["denominators"]["common"] == 30
    posted = studio.post("/api/evaluations/compare", json={"a": a, "b": b}).json()
    assert posted == compared
    assert [c["path"] for c in compared["skill_diff"]] == ["knowledge/地图能力.md"]

    exported = studio.get(f"/api/evaluations/{a}/export", params={"format": "csv"})
    assert exported.content.startswith(b"\xef\xbb\xbf")
    assert "attachment" in exported.headers["content-disposition"]
    rows = list(csv.DictReader(io.StringIO(exported.content.decode("utf-8-sig"))))
    assert [row["case_id"] for row in rows] == ids
    lines = studio.get(f"/api/evaluations/{a}/export", params={"format": "jsonl"}).text.splitlines()
    assert [json.loads(line)["prediction"] for line in lines] == [
        row["prediction"] for row in page["items"] + rest["items"]
    ]


@pytest.mark.parametrize("kind", ["csv", "xlsx", "jsonl"])
def test_three_formats_give_the_same_cases(studio, kind):
    assert upload(studio, kind, 25)["content_sha256"] == upload(studio, "jsonl", 25)["content_sha256"]


def test_a_case_shows_source_verdict_evidence_passages_and_trace(studio):
    dataset = upload(studio, n=30)
    a = experiment(studio, dataset)
    wait(studio, a)
    supported = studio.get(f"/api/evaluations/{a}/results", params={"evidence": "supported"}).json()["items"]
    detail = studio.get(f"/api/evaluations/{a}/cases/{supported[0]['ordinal']}").json()
    cited = detail["passages"][0]
    assert cited["exists"] and cited["read"] == "file"
    assert cited["passage"]["text"].startswith("## ") and "<h2>" in cited["passage"]["html"]
    assert detail["case"]["source_row"]["data"]["query"] == detail["case"]["query"]
    record = studio.get(f"/api/evaluations/{a}/cases/{supported[0]['ordinal']}/trace").json()
    assert record["status"] == "completed" and record["steps"][0]["model"]["tool_calls"][0]["name"] == "list_files"
    gold = detail["case"]["gold_route"]
    assert gold and "gold" not in json.dumps({"reset": record["reset"], "conversation": record["conversation"]})


def test_single_run_uses_the_same_road(studio):
    body = {"snapshot_id": snapshot(studio)["id"], "model": "reader", "query": "到目的地电量够不够", "wait_s": 30}
    answer = studio.post("/api/evaluations/run", json=body).json()
    assert answer["state"] == "completed" and answer["result"]["prediction"] == "fast"
    assert answer["result"]["evidence"]["cited"][0]["ref"] == "knowledge/地图能力.md#到达电量预估"


def test_events_tell_the_story_and_resume_after_an_id(studio):
    a = experiment(studio, upload(studio, n=5))
    wait(studio, a)
    text = studio.get(f"/api/evaluations/{a}/events").text
    kinds = [line.split(": ")[1] for line in text.splitlines() if line.startswith("event: ")]
    assert kinds[:2] == ["created", "running"] and "completed" in kinds and kinds[-1] == "end"
    first = next(line.split(": ")[1] for line in text.splitlines() if line.startswith("id: "))
    again = studio.get(f"/api/evaluations/{a}/events", headers={"Last-Event-ID": first}).text
    assert "event: created" not in again and "event: completed" in again


def test_idempotency_key_makes_one_experiment(studio):
    dataset = upload(studio, n=3)
    body = {"name": "e", "dataset_id": dataset["id"], "snapshot_id": snapshot(studio)["id"], "model": "reader"}
    made = [studio.post("/api/evaluations", json=body, headers={"Idempotency-Key": "k"}).json()["id"] for _ in range(2)]
    assert made[0] == made[1] and len(studio.get("/api/evaluations").json()) == 1
    other = studio.post("/api/evaluations", json={**body, "name": "x"}, headers={"Idempotency-Key": "k"})
    assert other.status_code == 409


def test_matrix_is_one_call(studio):
    dataset = upload(studio, n=8)
    ids = [snapshot(studio)["id"], snapshot(studio, "v2")["id"]]
    body = {"name": "m", "dataset_id": dataset["id"], "snapshot_ids": ids, "models": ["reader", "shaky-reader"]}
    made = studio.post("/api/evaluations/matrix", json={**body, "start": True}).json()
    assert len(made) == 4
    for one in made:
        wait(studio, one["id"])
    rows = studio.get("/api/evaluations/matrix", params={"id": [one["id"] for one in made]}).json()
    assert {(row["snapshot_id"], row["model"]) for row in rows} == {
        (s, m) for s in ids for m in ("reader v1", "shaky-reader v1")
    }
    assert all(row["scored"] == 8 for row in rows)
