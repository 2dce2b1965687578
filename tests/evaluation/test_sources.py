"""Reading: byte ranges of any size, torn tails, foreign lines, globs, Parquet, S3."""

import json

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrl.errors import DataError
from rayrl.evaluation.compact import compact, verify
from rayrl.evaluation.pipeline import SUMMARY_COLUMNS
from rayrl.evaluation.sources import (
    Chunk,
    Source,
    expected_jobs,
    find_sources,
    iter_records,
    load_goals,
    manifest_of,
    plan_chunks,
    read_lines,
    read_rows,
    split_unusable,
)
from rayrl.evaluation.summary import summarize
from rayrl.traces.schema import interned
from rayrl.traces.store import RunReader


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.binary(max_size=30).map(lambda b: b.replace(b"\n", b"")), max_size=20),
    st.integers(1, 64),
    st.booleans(),
)
def test_every_line_belongs_to_exactly_one_range(tmp_path_factory, lines, size, ended):
    path = tmp_path_factory.mktemp("ranges") / "f.jsonl"
    data = b"\n".join(lines) + (b"\n" if ended and lines else b"")
    path.write_bytes(data)
    source = Source("r", str(path), str(path), len(data), "jsonl")
    found = [item for chunk in plan_chunks([source], size) for item in read_lines(chunk)]
    assert [line for _, line, _ in found] == [line for line in data.split(b"\n") if line]
    assert all(data[offset : offset + len(line)] == line for offset, line, _ in found)
    assert all(flag for _, _, flag in found[:-1])


def test_a_line_longer_than_many_ranges(tmp_path):
    path = tmp_path / "f.jsonl"
    long = b"x" * 3_000_000
    path.write_bytes(b"a\n" + long + b"\nb\n")
    source = Source("r", str(path), str(path), path.stat().st_size, "jsonl")
    assert [line for c in plan_chunks([source], 500) for _, line, _ in read_lines(c)] == [b"a", long, b"b"]
    assert list(read_lines(Chunk(source, 1000, 2000))) == []


def test_unusable_lines_are_counted_not_fatal(messy_run, tmp_path):
    target = tmp_path / "traces.jsonl"
    data = (messy_run / "traces.jsonl").read_bytes()
    target.write_bytes(b'{"broken\n\n{"schema": "other"}\n[1,2]\n' + data)
    rows, unusable = split_unusable(read_rows(find_sources([str(target)])))
    assert unusable == {"malformed": 1, "foreign": 2, "torn": 1}
    assert rows.num_rows == sum(1 for _ in iter_records(find_sources([str(messy_run)])[0]))


def test_rows_agree_with_the_store_reader(messy_run):
    source = find_sources([str(messy_run)])[0]
    rows, _ = split_unusable(read_rows([source], chunk_bytes=10_007))
    ours = rows.filter([s == "rayrl-episode-v1" for s in rows["schema"].to_pylist()])
    assert ours["episode_id"].to_pylist() == [r["episode_id"] for r in RunReader(messy_run).iter_records()]


def test_directories_files_and_globs(messy_run, tmp_path):
    copy = tmp_path / "other" / "messy"
    copy.mkdir(parents=True)
    (copy / "traces.jsonl").write_bytes((messy_run / "traces.jsonl").read_bytes())
    assert find_sources([str(messy_run)])[0].run == "messy"
    found = find_sources([str(messy_run), str(tmp_path / "*" / "messy")])
    assert len({s.run for s in found}) == 2  # same directory name: told apart by path
    assert find_sources([str(messy_run), str(messy_run / "traces.jsonl")])[0].run == "messy"
    with pytest.raises(DataError, match="nothing there"):
        find_sources([str(tmp_path / "nowhere")])
    with pytest.raises(DataError, match="holds neither"):
        find_sources([str(tmp_path)])
    with pytest.raises(DataError, match="cannot be opened"):
        find_sources(["nosuch://bucket/x"])


def test_manifest_and_goals_beside_the_traces(messy_run, recipe):
    source = find_sources([str(messy_run)])[0]
    assert expected_jobs(manifest_of(source)) == 60
    goals = load_goals(source)
    assert set(goals) <= set(recipe.task_ids())
    assert all("asin" in goal for goal in goals.values())


def test_compaction_is_lossless_and_verified(messy_run, tmp_path):
    source, target = find_sources([str(messy_run)])[0], tmp_path / "messy" / "traces.parquet"
    report = compact(source, target)
    assert report.unusable["torn"] == 1
    assert verify(source, target).mismatches == []
    packed = find_sources([str(target.parent)])[0]
    assert packed.kind == "parquet"
    for ours, theirs in zip(iter_records(packed), iter_records(source), strict=True):
        assert {**ours, "interned": None} == {**theirs, "interned": None}
        assert interned(ours) == interned(theirs)
    rows, _ = split_unusable(read_rows([source]))
    assert summarize(read_rows([packed]).select([*SUMMARY_COLUMNS, "instruction"])) == summarize(rows)
    assert target.stat().st_size < source.size / 5


def test_verification_finds_a_changed_record(messy_run, tmp_path):
    changed = tmp_path / "messy" / "traces.jsonl"
    changed.parent.mkdir()
    lines = (messy_run / "traces.jsonl").read_bytes().split(b"\n")
    target = tmp_path / "t.parquet"
    compact(find_sources([str(messy_run)])[0], target)
    record = orjson.loads(lines[3])
    record["duration_s"] = 1e9
    lines[3] = orjson.dumps(record)
    changed.write_bytes(b"\n".join(lines))
    report = verify(find_sources([str(changed)])[0], target)
    assert any("differs" in text for text in report.mismatches)
    changed.write_bytes(b"\n".join(lines[:2]) + b"\n")
    assert any("not in the JSON lines" in text for text in verify(find_sources([str(changed)])[0], target).mismatches)


def test_a_crashed_compaction_leaves_nothing(messy_run, tmp_path, monkeypatch):
    import rayrl.evaluation.compact as module

    monkeypatch.setattr(module, "episode_values", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        compact(find_sources([str(messy_run)])[0], tmp_path / "t.parquet")
    assert list(tmp_path.iterdir()) == []


def test_s3_against_a_local_server(messy_run, monkeypatch):
    moto = pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for name, value in {
            "ACCESS_KEY_ID": "test",
            "SECRET_ACCESS_KEY": "test",
            "DEFAULT_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        client = boto3.client("s3", endpoint_url=f"http://{host}:{port}")
        client.create_bucket(Bucket="traces")
        for name in ("traces.jsonl", "manifest.json", "private.jsonl"):
            client.upload_file(str(messy_run / name), "traces", f"runs/messy/{name}")
        options = f"endpoint_override={host}:{port}&scheme=http&region=us-east-1"
        from jobs.evaluate import evaluate

        here = evaluate([str(messy_run)], engine="local", labels=True)
        for location in (f"s3://traces/runs/messy?{options}", f"s3://traces/runs/*/traces.jsonl?{options}"):
            there = evaluate([location], engine="local", labels=True, chunk_bytes=100_000)
            assert json.dumps(there["runs"]) == json.dumps(here["runs"])
            assert there["diagnosis"] == here["diagnosis"]
    finally:
        server.stop()


DAMAGE = [
    {"job": "a string"},
    {"steps": [1, 2]},
    {"job": {"task_id": None, "sample_id": 0}},
    {"episode_id": None},
    {"selected_skills": ["s"]},
    {"final": {"done": True, "reward": "high", "reward_detail": []}},
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_one_damaged_record_never_ends_a_pass(damage, messy_run, tmp_path):
    from jobs.evaluate import evaluate

    lines = (messy_run / "traces.jsonl").read_bytes().split(b"\n")[:6]
    record = {**orjson.loads(lines[2]), "episode_id": "task-999999__sample-000", **damage}
    path = tmp_path / "traces.jsonl"
    path.write_bytes(b"\n".join([*lines[:2], orjson.dumps(record), *lines[3:]]) + b"\n")
    plain = evaluate([str(path)], engine="local")
    labelled = evaluate([str(path)], engine="local", labels=True)
    assert plain["runs"] == labelled["runs"]
    assert plain["unusable_lines"] == labelled["unusable_lines"]
    assert plain["read"]["records"] + plain["unusable_lines"]["malformed"] == 6


def test_numbers_out_of_range_and_odd_types_stay_out(messy_run, tmp_path):
    record = orjson.loads((messy_run / "traces.jsonl").read_bytes().split(b"\n")[0])
    record["job"]["seed"] = 2**64 - 1
    record["status"] = 7
    path = tmp_path / "traces.jsonl"
    path.write_bytes(orjson.dumps(record) + b"\n")
    [row] = read_rows(find_sources([str(path)])).to_pylist()
    assert row["seed"] is None
    assert row["status"] == "7"
    assert row["complete"] is False


def test_damaged_pages_are_counted_as_unlabelled(messy_run, tmp_path):
    from jobs.evaluate import evaluate

    lines = (messy_run / "traces.jsonl").read_bytes().split(b"\n")
    record = next(r for r in map(orjson.loads, lines[:20]) if isinstance(r.get("interned"), str) and r["final"])
    record["interned"] = record["interned"][:40]
    path = tmp_path / "traces.jsonl"
    path.write_bytes(orjson.dumps(record) + b"\n")
    found = evaluate([str(path)], engine="local", labels=True)
    assert found["runs"][tmp_path.name]["coverage"]["completed"] == 1
    assert (found["diagnosis"]["episodes"], found["diagnosis"]["unlabelled"]) == (0, 1)
