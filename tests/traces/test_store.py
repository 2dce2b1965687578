"""The append-only store: durable, one writer, torn tails harmless, complete records never hidden, reading streams."""

from __future__ import annotations

import itertools
import json
import os
import stat
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrl.errors import ConfigError, DataError, RunConflictError
from rayrl.schemas import EPISODE_SCHEMA, episode_id
from rayrl.traces import store as store_module
from rayrl.traces.store import (
    PRIVATE,
    TRACES,
    TRAINING,
    RunLock,
    RunReader,
    TraceLine,
    TraceWriter,
    iter_lines,
)


def record(task=1, attempt=1, status="completed", **more):
    final = {"done": True, "reward": 1.0} if status == "completed" else None
    return {
        "schema": EPISODE_SCHEMA,
        "episode_id": episode_id(task, 0),
        "attempt": attempt,
        "status": status,
        "final": final,
        "usage": {"prompt_tokens": 10, "completion_tokens": 2},
        **more,
    }


def line(*args, **kwargs):
    return orjson.dumps(record(*args, **kwargs))


def write_all(run_dir, *lines):
    run_dir.mkdir(exist_ok=True, parents=True)
    (run_dir / TRACES).write_bytes(b"".join(item + b"\n" for item in lines))
    return RunReader(run_dir)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


# --- writing


def test_what_was_appended_is_on_disk_after_flush_in_order(tmp_path):
    writer = TraceWriter(tmp_path)
    for n in range(2000):
        writer.append(TraceLine(line(n)))
    writer.flush()
    found = [r["episode_id"] for r in RunReader(tmp_path).iter_records()]
    assert found == [episode_id(n, 0) for n in range(2000)]
    assert writer.bytes_written == (tmp_path / TRACES).stat().st_size
    assert writer.commits < 2000, "no group commit"
    writer.close()
    writer.close()


def test_private_goals_lie_beside_the_traces_for_the_owner_only(tmp_path):
    old = os.umask(0)
    try:
        writer = TraceWriter(tmp_path)
        private = orjson.dumps({"episode_id": episode_id(1, 0), "attempt": 1, "goal": {"asin": "SECRET"}})
        writer.append(TraceLine(line(1), private=private, training=b'{"step":0}\n{"step":1}'))
        writer.close()
    finally:
        os.umask(old)
    assert mode(tmp_path / PRIVATE) == 0o600
    assert mode(tmp_path / TRACES) == 0o644
    assert b"SECRET" not in (tmp_path / TRACES).read_bytes()
    assert RunReader(tmp_path).private_goals() == {episode_id(1, 0): {"asin": "SECRET"}}
    assert (tmp_path / TRAINING).read_bytes().count(b"\n") == 2


def test_a_private_file_that_was_left_open_is_closed_again(tmp_path):
    (tmp_path / PRIVATE).touch(mode=0o644)
    TraceWriter(tmp_path).close()
    assert mode(tmp_path / PRIVATE) == 0o600


def test_private_and_training_lines_are_durable_before_their_trace(tmp_path, monkeypatch):
    synced = []
    real = os.fsync

    def fsync(fd):
        synced.append(Path(f"/proc/self/fd/{fd}").readlink().name)
        real(fd)

    monkeypatch.setattr(store_module.os, "fsync", fsync)
    writer = TraceWriter(tmp_path)
    writer.append(TraceLine(line(1), private=b'{"goal":1,"episode_id":"x"}', training=b"{}"))
    writer.close()
    assert synced == [PRIVATE, TRAINING, TRACES]


def test_a_disk_failure_is_loud_and_stays_loud(tmp_path, monkeypatch):
    writer = TraceWriter(tmp_path)

    def full(fd, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module, "_write_all", full)
    writer.append(TraceLine(line(1)))
    with pytest.raises(DataError, match="No space left"):
        writer.flush()
    with pytest.raises(DataError, match="No space left"):
        writer.append(TraceLine(line(2)))
    with pytest.raises(DataError, match="No space left"):
        writer.close()


def test_nothing_is_swallowed_after_close(tmp_path):
    writer = TraceWriter(tmp_path)
    writer.close()
    with pytest.raises(DataError, match="closed"):
        writer.append(TraceLine(line(1)))


def test_many_threads_may_append(tmp_path):
    writer = TraceWriter(tmp_path)

    def work(base):
        for n in range(100):
            writer.append(TraceLine(line(base * 100 + n)))

    threads = [threading.Thread(target=work, args=(base,)) for base in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    report = RunReader(tmp_path).scan()
    assert (report.records, report.complete, report.malformed_lines) == (800, 800, 0)


# --- torn tails


def test_a_tail_torn_at_any_byte_is_no_record_and_hides_none(tmp_path):
    first, second = line(1), line(2, note="雨伞 \u2028 end")
    whole = first + b"\n" + second + b"\n"
    for cut in range(len(first) + 1, len(whole) + 1):
        run_dir = tmp_path / str(cut)
        run_dir.mkdir()
        (run_dir / TRACES).write_bytes(whole[:cut])
        done = cut >= len(whole) - 1  # all but the newline is a whole record
        report = RunReader(run_dir).scan()
        assert report.complete_ids == ({episode_id(1, 0), episode_id(2, 0)} if done else {episode_id(1, 0)}), cut
        assert report.torn_tail == (cut not in (len(first) + 1, len(whole))), cut
        # a new writer goes on: what follows the torn tail is whole
        writer = TraceWriter(run_dir)
        writer.append(TraceLine(line(3)))
        writer.close()
        ids = [r["episode_id"] for r in RunReader(run_dir).results()]
        assert ids == [episode_id(1, 0), *([episode_id(2, 0)] if done else []), episode_id(3, 0)], cut
        assert not RunReader(run_dir).scan().torn_tail


@pytest.mark.parametrize("junk", [b"\0" * 64, b"{", b'{"schema":"rayrl', b"\xff\xfe", b"[]", b"3", b'"text"'])
def test_junk_lines_are_counted_not_believed(tmp_path, junk):
    reader = write_all(tmp_path, line(1), junk, line(2))
    report = reader.scan()
    assert (report.complete, report.malformed_lines) == (2, 1)
    assert [r["episode_id"] for r in reader.iter_records()] == [episode_id(1, 0), episode_id(2, 0)]


def test_records_of_other_schemas_or_without_an_id_are_told_apart(tmp_path):
    nameless = orjson.dumps({k: v for k, v in record(2).items() if k != "episode_id"})
    reader = write_all(tmp_path, line(1), b'{"schema":"shopsimrl-episode-v4"}', nameless, b"", line(3))
    report = reader.scan()
    assert (report.complete, report.foreign_schema, report.malformed_lines) == (2, 1, 1)
    assert len(list(reader.results())) == 2


# --- what an episode's result is


def test_the_first_complete_record_is_the_result_whatever_comes_later(tmp_path):
    reader = write_all(
        tmp_path,
        line(1, 1, "failed"),
        line(1, 2, note="the result"),
        line(1, 3, "failed"),
        line(1, 4, note="a duplicate"),
        line(1, 5, "cancelled"),
    )
    assert [r.get("note") for r in reader.results()] == ["the result"]
    assert reader.find(episode_id(1, 0))["note"] == "the result"
    report = reader.scan()
    assert (report.records, report.complete, report.duplicates, report.failed, report.cancelled) == (5, 1, 1, 2, 1)
    assert report.duplicate_ids == [episode_id(1, 0)] and report.attempts_beyond_first == 4
    assert report.last_attempt == {}


def test_without_a_complete_record_the_newest_one_counts_and_numbering_goes_on(tmp_path):
    reader = write_all(
        tmp_path, line(1, 1, "failed"), line(2), line(1, 3, "failed", note="newest"), line(1, 2, "cancelled")
    )
    results = {r["episode_id"]: r for r in reader.results()}
    assert results[episode_id(1, 0)]["status"] == "cancelled"
    assert reader.scan().last_attempt == {episode_id(1, 0): 3}
    assert reader.find(episode_id(1, 0), attempt=3)["note"] == "newest"


EVENTS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 4), st.sampled_from(["completed", "failed", "cancelled", "torn"])),
    max_size=30,
)


@given(EVENTS)
@settings(max_examples=60, deadline=None)
def test_results_follow_the_rule_on_any_history(tmp_path_factory, events):
    run_dir = tmp_path_factory.mktemp("run")
    lines, expected = [], {}
    for n, (task, attempt, status) in enumerate(events):
        if status == "torn":
            lines.append(line(task, attempt)[:-3])
            continue
        lines.append(line(task, attempt, status, note=n))
        held = expected.get(task)
        if held is None or held[0] != "completed":
            expected[task] = (status, n)
    reader = write_all(run_dir, *lines)
    assert {r["note"] for r in reader.results()} == {note for _, note in expected.values()}
    report = reader.scan()
    done = {episode_id(t, 0) for t, (status, _) in expected.items() if status == "completed"}
    assert report.complete_ids == done and report.complete == len(done)
    for task, (_, note) in expected.items():
        assert reader.find(episode_id(task, 0))["note"] == note


def test_find_says_what_is_not_there(tmp_path):
    reader = write_all(tmp_path, line(1))
    with pytest.raises(DataError, match="no record of episode 'task-000009__sample-000'"):
        reader.find(episode_id(9, 0))
    with pytest.raises(DataError, match="attempt 2"):
        reader.find(episode_id(1, 0), attempt=2)
    with pytest.raises(DataError, match=r"traces\.jsonl"):
        RunReader(tmp_path / "none").find(episode_id(1, 0))


def test_an_id_inside_another_record_is_not_that_episode(tmp_path):
    reader = write_all(tmp_path, line(2, note=episode_id(1, 0)), line(1, note="mine"))
    assert reader.find(episode_id(1, 0))["note"] == "mine"


def test_an_empty_or_missing_run_is_empty(tmp_path):
    assert RunReader(tmp_path / "none").scan().records == 0
    assert list(write_all(tmp_path).results()) == []


# --- reading in pieces


@given(
    st.lists(st.binary(max_size=20).map(lambda b: b.replace(b"\n", b"")), max_size=20),
    st.lists(st.integers(0, 300), max_size=4),
    st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_byte_ranges_partition_the_lines(tmp_path_factory, lines, cuts, ends_with_newline):
    path = tmp_path_factory.mktemp("chunks") / "f"
    data = b"\n".join(lines) + (b"\n" if ends_with_newline and lines else b"")
    path.write_bytes(data)
    borders = sorted({0, len(data), *(c for c in cuts if c < len(data))})
    pieces = [item for a, b in itertools.pairwise(borders) for item in iter_lines(path, start=a, stop=b)]
    assert pieces == list(iter_lines(path))


def test_every_cut_in_two_gives_the_same_lines(tmp_path):
    path = tmp_path / "f"
    for data in (b"", b"a", b"a\n", b"ab\n\ncd\ne\n", b"\n\nx\nyy"):
        path.write_bytes(data)
        whole = list(iter_lines(path))
        for cut in range(len(data) + 1):
            pieces = [*iter_lines(path, start=0, stop=cut), *iter_lines(path, start=cut, stop=len(data))]
            assert pieces == whole, (data, cut)


def test_reading_streams(tmp_path):
    big = 24_000_000
    padding = "x" * 4000
    with (tmp_path / TRACES).open("wb") as file:
        n = 0
        while file.tell() < big:
            file.write(line(n, padding=padding) + b"\n")
            n += 1
    reader = RunReader(tmp_path)
    tracemalloc.start()
    try:
        assert sum(1 for _ in reader.iter_records()) == n
        _, streaming = tracemalloc.get_traced_memory()
        assert reader.scan().complete == n
        assert sum(1 for _ in reader.results()) == n
        _, indexed = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert streaming < 1_000_000, "memory grew with the file"
    assert indexed < 4_000_000, "more than ids was kept"


# --- one writer per run

HOLD = """
import sys
from pathlib import Path
from rayrl.traces.store import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_refused_and_the_lock_dies_with_its_holder(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline().strip() == "held"
        with pytest.raises(RunConflictError, match="in use by another process"), RunLock(tmp_path):
            pass
    finally:
        holder.kill()
        holder.wait()
        holder.stdin.close()
        holder.stdout.close()
    with RunLock(tmp_path):
        pass


def test_two_locks_in_one_process_conflict_too(tmp_path):
    with RunLock(tmp_path), pytest.raises(RunConflictError), RunLock(tmp_path):
        pass
    with RunLock(tmp_path):
        pass


def test_a_run_root_that_cannot_be_made_is_bad_input(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"cannot be written.*run_root"), RunLock(tmp_path / "file" / "run"):
        pass


def test_goals_of_a_torn_private_file(tmp_path):
    rows = [
        {"episode_id": "a", "goal": {"n": 1}},
        {"episode_id": "a", "goal": {"n": 2}},
        {"goal": {}},
        {"episode_id": "b"},
    ]
    text = "\n".join(json.dumps(row) for row in rows) + '\n{"episode_id": "c", "go'
    (tmp_path / PRIVATE).write_text(text)
    assert RunReader(tmp_path).private_goals() == {"a": {"n": 2}}
