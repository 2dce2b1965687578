"""The acceptance lines of the workbench, one after another, over HTTP with the whole sample of 600 cases.

One road is walked once (``road``): a repository with the Skill at a tag, at a later commit and as a draft; the data in
three formats; a batch with one model call that crashes, interactive sessions beside it; the same batch with the changed
Skill. Each test looks at one line. Lines that other modules show in more depth are named in ``docs/workbench.md``.
"""

import json
import os
import shutil
import subprocess
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
from starlette.testclient import TestClient

from rayrl.studio.app import create_app
from rayrl.studio.config import StudioConfig
from rayrl.workbench.driver import BATCH_PRIORITY
from rayrl.workbench.launcher import ProcessDriver, Supervisor
from rayrl.workbench.samples import SKILL, sample_file, sample_profile, skill_folder
from rayrl.workbench.samples.generate import generate
from rayrl.workbench.workbench import Workbench
from tests.studio.conftest import ThreadDriver, upload, wait

N = 600


def git(folder, *words):
    environment = {**os.environ, "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a"}
    environment |= {"GIT_COMMITTER_EMAIL": "a@b", "GIT_CONFIG_GLOBAL": "/dev/null"}
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, check=True, env=environment)
    return done.stdout.decode().strip()


def make_repository(root):
    """The Skill: version 1 tagged, version 2 committed after it, and an uncommitted edit on top."""
    live = root / "skills" / SKILL
    commits = []
    git(root, "init", "-q", "-b", "main")
    for version in (1, 2):
        shutil.rmtree(live, ignore_errors=True)
        shutil.copytree(skill_folder(version), live)
        git(root, "add", "-A")
        git(root, "commit", "-qm", f"version {version}")
        commits.append(git(root, "rev-parse", "HEAD"))
        if version == 1:
            git(root, "tag", "v1.0")
    with (live / "SKILL.md").open("a", encoding="utf-8") as main:
        main.write("\n## 草稿\n\n还没有提交。\n")
    return live, commits


def snap(client, **body):
    answer = client.post("/api/evaluations/skill-snapshots", json=body)
    assert answer.status_code == 201, answer.text
    return answer.json()


def run_batch(client, dataset, snapshot, **more):
    body = {"name": "batch", "dataset_id": dataset["id"], "snapshot_id": snapshot["id"], "model": "one-crash"}
    params = {"max_attempts": 1}
    answer = client.post("/api/evaluations", json={**body, "params": params, "start": True, **more})
    assert answer.status_code == 201, answer.text
    return answer.json()["id"]


def talk(client):
    """Create a session, say something, stop a turn, go on with it; everything that was answered."""
    out = SimpleNamespace()
    one = client.post("/api/sessions", json={"skill": SKILL, "model": "reader"}).json()
    out.first = client.post(f"/api/sessions/{one['id']}/messages", json={"text": "到公司电量够不够"}).json()
    two = client.post("/api/sessions", json={"skill": SKILL, "model": "slow-reader"}).json()
    url = f"/api/sessions/{two['id']}"
    sender = threading.Thread(target=client.post, args=(f"{url}/messages",), kwargs={"json": {"text": "导航去公司"}})
    sender.start()
    while client.get(url).json()["state"] != "running":
        pass
    out.stopped = client.post(f"{url}/stop").json()
    sender.join(30)
    out.went_on = client.post(f"{url}/continue").json()
    out.ids = {one["id"], two["id"]}
    return out


@pytest.fixture(scope="module")
def road(tmp_path_factory):
    repository, root = tmp_path_factory.mktemp("repository"), tmp_path_factory.mktemp("store")
    live, commits = make_repository(repository)
    bench = Workbench(root)
    crash = generate(N)[7]["query"]
    kind, slow = "tests.workbench.test_driver:Moody", "rayrl.workbench.reader:ScriptedReader"
    options = {"rules": {json.dumps(crash, ensure_ascii=False): "crash"}, "latency_ms": 5}
    bench.models.save("one-crash", {"kind": kind, "options": options}, trusted=True)
    bench.models.save("slow-reader", {"kind": slow, "options": {"latency_ms": 200}})
    deployed = shutil.copytree(skill_folder(1), tmp_path_factory.mktemp("deployed") / SKILL)  # no checkout around it
    config = StudioConfig(root=str(root), skills={SKILL: str(deployed)}, skill_roots=[str(repository)])
    supervisor = Supervisor(bench.store, lambda e: ThreadDriver(root, e), poll_s=0.1)
    with TestClient(create_app(bench, config, supervisor=supervisor), base_url="http://127.0.0.1") as client:
        r = SimpleNamespace(client=client, bench=bench, live=live, commits=commits, crash=crash)
        r.datasets = {kind: upload(client, kind, N, name=kind) for kind in ("csv", "xlsx", "jsonl")}
        at = {"repository": str(repository), "path": f"skills/{SKILL}"}
        r.tagged, r.committed = snap(client, **at, ref="v1.0"), snap(client, **at, ref=commits[1])
        r.old_commit, r.deployed = snap(client, **at, ref=commits[0]), snap(client, skill=SKILL)
        r.draft = snap(client, folder=str(live))

        r.a = run_batch(client, r.datasets["csv"], r.tagged, concurrency=1)
        r.talk = talk(client)
        r.during = client.get(f"/api/evaluations/{r.a}").json()
        r.sessions = client.get("/api/sessions").json()
        assert client.patch(f"/api/evaluations/{r.a}", json={"concurrency": 32}).status_code == 200
        wait(client, r.a, timeout_s=120)

        shutil.rmtree(live)  # the working copy is gone; the experiment must not care
        r.b = run_batch(client, r.datasets["csv"], r.committed, concurrency=32)
        wait(client, r.b, timeout_s=120)
        yield r
    bench.close()


def everything(road, experiment, **filters):
    """All pages of a list of results."""
    out, cursor = [], None
    while True:
        query = {"limit": 500, **filters} | ({"cursor": cursor} if cursor else {})
        page = road.client.get(f"/api/evaluations/{experiment}/results", params=query).json()
        out += page["items"]
        cursor = page["next"]
        if cursor is None:
            return out


def test_1_sessions_are_created_stopped_and_continued_while_a_batch_runs(road):
    assert road.during["state"] == "running" and road.during["counts"]["pending"] > 0
    assert road.talk.first["verdict"]["prediction"] == "fast"
    assert road.talk.stopped["state"] == "stopped" and road.talk.went_on["verdict"]["prediction"] == "fast"


def test_2_no_case_of_600_appears_among_the_sessions(road):
    assert {session["id"] for session in road.sessions} == road.talk.ids
    assert {session["id"] for session in road.client.get("/api/sessions").json()} == road.talk.ids
    ids = {row["session_id"] for row in everything(road, road.a)}
    assert len(ids) == N and all(text.startswith(f"eval/{road.a}/") for text in ids)


def test_3_three_formats_become_the_same_cases(road):
    facts = [(d["content_sha256"], d["n_cases"], d["n_labelled"], d["n_rejected"]) for d in road.datasets.values()]
    assert facts[0] == facts[1] == facts[2] and facts[0][1:] == (N, N, 0)
    made = generate(N)
    for dataset in road.datasets.values():
        cases = road.bench.datasets.cases(dataset["id"])
        assert [case.query for case in cases] == [row["query"] for row in made]
        assert [case.gold_route for case in cases] == [row["label"] for row in made]
        assert all(case.source_row and case.source_place for case in cases)


def test_3_the_same_file_again_is_the_same_upload_and_data_set(road):
    assert upload(road.client, "csv", N, name="csv")["id"] == road.datasets["csv"]["id"]
    other = upload(road.client, "csv", N, name="other name")
    assert other["id"] != road.datasets["csv"]["id"]
    assert other["content_sha256"] == road.datasets["csv"]["content_sha256"]


def test_4_every_experiment_names_its_commit_tag_or_content_hash(road):
    get = road.client.get
    seen = get(f"/api/evaluations/skill-snapshots/{get(f'/api/evaluations/{road.a}').json()['snapshot_id']}").json()
    assert (seen["git_tag"], seen["git_commit"], seen["status"]) == ("v1.0", road.commits[0], "committed")
    other = get(f"/api/evaluations/skill-snapshots/{get(f'/api/evaluations/{road.b}').json()['snapshot_id']}").json()
    assert (other["git_tag"], other["git_commit"]) == (None, road.commits[1])
    assert road.old_commit["content_sha256"] == road.tagged["content_sha256"] == road.deployed["content_sha256"]
    assert road.deployed["status"] == "deployed" and len({s["id"] for s in (road.tagged, road.deployed)}) == 2
    assert road.draft["status"] == "draft" and road.draft["content_sha256"] != road.committed["content_sha256"]


def test_5_old_experiment_reads_its_snapshot_and_repeats_its_configuration(road):
    assert not road.live.exists()
    base = f"/api/evaluations/skill-snapshots/{road.tagged['id']}"
    assert road.client.get(f"{base}/verify").json()["intact"]
    for file in skill_folder(1).rglob("*.md"):
        path = file.relative_to(skill_folder(1)).as_posix()
        assert road.client.get(f"{base}/raw", params={"path": path}).content == file.read_bytes()
    assert (
        "还没有提交"
        in road.client.get(
            f"/api/evaluations/skill-snapshots/{road.draft['id']}/file", params={"path": "SKILL.md"}
        ).json()["text"]
    )
    old = road.client.get(f"/api/evaluations/{road.a}").json()
    copy = road.client.post(f"/api/evaluations/{road.a}/clone", json={}).json()
    assert copy["fingerprint"] == old["fingerprint"] and copy["cloned_from"] == road.a
    assert copy["fingerprint"] != road.client.get(f"/api/evaluations/{road.b}").json()["fingerprint"]


@pytest.mark.slow
def test_5_old_experiment_gives_the_same_600_results_again(road):
    copy = road.client.post(f"/api/evaluations/{road.a}/clone", json={"concurrency": 32}).json()
    road.client.post(f"/api/evaluations/{copy['id']}/start")
    wait(road.client, copy["id"], timeout_s=120)
    keys = ("case_id", "state", "prediction", "reason", "confidence", "evidence", "evidence_refs")
    one, two = ([{k: row[k] for k in keys} for row in everything(road, e)] for e in (road.a, copy["id"]))
    assert one == two


def test_6_one_failure_stops_nothing(road):
    found = road.client.get(f"/api/evaluations/{road.a}").json()
    assert found["state"] == "completed"
    same = sum(row["query"] == road.crash for row in generate(N))
    assert (found["counts"]["failed"], found["counts"]["completed"]) == (same, N - same) and same >= 1
    failed = everything(road, road.a, state="failed")
    assert {row["query"] for row in failed} == {road.crash}
    assert {row["failure"] for row in failed} == {"infrastructure"} and "boom" in failed[0]["error"]["message"]
    metrics = road.client.get(f"/api/evaluations/{road.a}/metrics").json()
    assert metrics["denominators"]["infrastructure_failures"] == same
    assert metrics["denominators"]["scored"] == N - same


def test_7_disagreements_come_with_reason_and_resolved_references(road):
    rows = everything(road, road.a, agrees=False)
    assert len(rows) > 50 and all(row["gold"] != row["prediction"] and row["reason"] for row in rows)
    wider = everything(road, road.a, disagreements=True)
    assert {row["ordinal"] for row in rows} < {row["ordinal"] for row in wider}
    for row in wider:
        assert row["agrees"] is False or row["evidence"] == "none" or row["confidence"] < 0.6
    cited = [row for row in rows if row["evidence_refs"]]
    for row in cited[:20]:
        detail = road.client.get(f"/api/evaluations/{road.a}/cases/{row['ordinal']}").json()
        assert [p["ref"] for p in detail["passages"]] == row["evidence_refs"]
        for passage in detail["passages"]:
            assert passage["exists"] and passage["read"] == "file"
            keyword = row["reason"].split("“")[1].split("”")[0]
            assert keyword in passage["passage"]["text"] and "<h2>" in passage["passage"]["html"]
    none = everything(road, road.a, evidence="none")
    assert none and all(row["evidence_refs"] == [] for row in none)


def test_8_comparison_names_what_was_fixed_and_what_regressed(road):
    found = road.client.get("/api/evaluations/compare", params={"a": road.a, "b": road.b, "examples": 1000}).json()
    left = {row["case_id"]: row for row in everything(road, road.a)}
    right = {row["case_id"]: row for row in everything(road, road.b)}
    fixed = [c for c in left if left[c]["agrees"] is False and right[c]["agrees"] is True]
    regressed = [c for c in left if left[c]["agrees"] is True and right[c]["agrees"] is False]
    assert (found["groups"]["fixed"], found["groups"]["regressed"]) == (fixed, regressed)
    assert fixed and regressed
    lost = sum(row["failure"] == "infrastructure" for row in left.values())
    assert found["denominators"] | {"not_ended": lost, "common": N - lost, "a": N, "b": N} == found["denominators"]
    (change,) = found["skill_diff"]
    assert change["sections"] == ["knowledge/地图能力.md#到达电量预估"] and set(change["fixed"]) <= set(fixed)
    assert found["overall"]["sentence"] and sum(d["n"] for d in found["by_domain"].values()) == N - lost


def test_9_a_batch_is_a_process_of_its_own_at_low_priority(tmp_path):
    handle = ProcessDriver(["sleep"], "60", tmp_path / "log")
    try:
        process, until = psutil.Process(handle._process.pid), time.monotonic() + 30
        while process.name() != "sleep" and time.monotonic() < until:  # `nice` comes first
            time.sleep(0.01)
        assert process.nice() > psutil.Process().nice() and os.getsid(process.pid) != os.getsid(0)
        assert BATCH_PRIORITY < 0
    finally:
        handle.stop(5)
    assert not handle.alive()


def test_pages_by_confidence_give_every_case_once(road):
    rows = everything(road, road.a, sort="confidence")
    whole = [row for row in everything(road, road.a) if row["confidence"] is not None]
    assert [row["ordinal"] for row in rows] == [
        row["ordinal"] for row in sorted(whole, key=lambda r: (r["confidence"], r["ordinal"]))
    ]


@pytest.mark.parametrize("text", ["周末", "YESTERDAY", "0007", "%", "_", "'", "这句话没有"])
def test_search_finds_what_a_plain_look_finds(road, text):
    rows = everything(road, road.a, search=text)
    expected = [
        row["ordinal"]
        for row in everything(road, road.a)
        if text.lower() in row["query"].lower() or text in row["case_id"]
    ]
    assert [row["ordinal"] for row in rows] == expected


@pytest.mark.parametrize("kind", ["csv", "xlsx", "jsonl"])
def test_suggested_mapping_of_the_sample_is_the_one_that_ships(road, kind):
    name, data = sample_file(kind, 5)
    suggested = road.client.post("/api/evaluations/datasets", files={"file": (name, data)}).json()["suggested"]
    shipped = {target: rule.sources for target, rule in sample_profile(kind).fields.items()}
    assert {target: [suggested.get(target)] for target in shipped} == shipped
