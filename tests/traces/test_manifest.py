"""The manifest freezes what a run is; another experiment in the same directory is refused with what differs."""

from __future__ import annotations

import hashlib

import orjson
import pytest

from rayrl.errors import DataError, RunConflictError
from rayrl.traces.manifest import (
    MANIFEST,
    claim,
    describe_difference,
    difference,
    fingerprint,
    flatten,
    make_manifest,
    read_manifest,
    write_json_atomic,
)

SEMANTIC = {"model": {"name": "m", "temperature": 0.5}, "jobs": [[1, 0, 7, "train"]], "skills": {"kind": "none"}}


def manifest(semantic=SEMANTIC, **operational):
    return make_manifest(experiment="e", semantic=semantic, operational=operational, versions={})


def test_the_fingerprint_is_the_hash_of_the_canonical_json():
    assert fingerprint({"b": "杯", "a": 1}) == hashlib.sha256('{"a":1,"b":"杯"}'.encode()).hexdigest()
    assert manifest()["fingerprint"] == fingerprint(SEMANTIC) == manifest(host="other")["fingerprint"]


def test_the_first_claim_freezes_and_a_second_one_resumes(tmp_path):
    assert claim(tmp_path / "run", manifest(actors=2)) is False
    frozen = (tmp_path / "run" / MANIFEST).read_bytes()
    assert claim(tmp_path / "run", manifest(actors=9)) is True
    assert (tmp_path / "run" / MANIFEST).read_bytes() == frozen


def test_another_experiment_is_refused_with_what_differs(tmp_path):
    claim(tmp_path, manifest())
    changed = {**SEMANTIC, "model": {"name": "m", "temperature": 0.7}, "jobs": [[1, 0, 7, "train"], [2, 0, 8, "train"]]}
    with pytest.raises(RunConflictError) as caught:
        claim(tmp_path, manifest(changed))
    text = str(caught.value)
    assert "model.temperature: 0.5 -> 0.7" in text and "jobs: list of 1" in text and "list of 2" in text
    assert "model.name" not in text and "experiment.name" in text and caught.value.exit_code == 3


def test_traces_without_a_manifest_are_not_adopted(tmp_path):
    (tmp_path / "traces.jsonl").write_bytes(b'{"schema": "rayrl-episode-v1"}\n')
    with pytest.raises(RunConflictError, match=r"holds traces but no manifest\.json"):
        claim(tmp_path, manifest())
    (tmp_path / "traces.jsonl").write_bytes(b"")
    assert claim(tmp_path, manifest()) is False


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"schema": "rayrl-manifest-v0"}'])
def test_a_broken_manifest_is_named_not_replaced(tmp_path, data):
    (tmp_path / MANIFEST).write_bytes(data)
    with pytest.raises(DataError, match=r"manifest\.json"):
        claim(tmp_path, manifest())
    assert (tmp_path / MANIFEST).read_bytes() == data


def test_no_manifest_is_none(tmp_path):
    assert read_manifest(tmp_path) is None
    assert read_manifest(tmp_path / "nowhere") is None


def test_differences_show_missing_keys_and_are_limited():
    assert difference({"a": {"b": 1}, "c": 2}, {"a": {"b": 1, "d": None}, "c": 3}) == [("c", 2, 3)]
    assert difference({"a": 1}, {"b": {"c": 2}}) == [("a", 1, None), ("b.c", None, 2)]
    old, new = {str(n): n for n in range(30)}, {str(n): n + 1 for n in range(30)}
    text = describe_difference(old, new, limit=5)
    assert text.count("\n") == 5 and "and 25 more" in text
    assert "..." in describe_difference({"t": "x" * 200}, {"t": "y"})


def test_flatten_keeps_empty_objects_and_lists():
    assert flatten({"a": {"b": [1], "c": {}}, "d": 1}) == {"a.b": [1], "a.c": {}, "d": 1}


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    write_json_atomic(path, {"a": 1})

    def fail(*_):
        raise OSError("no space")

    monkeypatch.setattr("rayrl.traces.manifest.os.fsync", fail)
    with pytest.raises(OSError, match="no space"):
        write_json_atomic(path, {"a": 2})
    assert orjson.loads(path.read_bytes()) == {"a": 1}
