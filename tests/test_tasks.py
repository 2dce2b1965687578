"""Splits are frozen lists; sampling and jobs are pure functions of them and the seed."""

from __future__ import annotations

import hashlib
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrl.errors import ConfigError, DataError
from rayrl.schemas import canonical_json, episode_id, episode_seed, step_seed
from rayrl.tasks import (
    Split,
    SplitManifest,
    load_split_manifest,
    make_jobs,
    sample_task_ids,
    task_ids_sha256,
)

SEEDS = st.integers(0, 2**31)


def split(ids, role="train", **more):
    return Split(role=role, task_ids=ids, task_ids_sha256=task_ids_sha256(ids), **more)


def test_the_hash_is_that_of_the_sorted_ids_as_compact_json():
    assert task_ids_sha256([5, 2, 9]) == hashlib.sha256(b"[2,5,9]").hexdigest()


def test_seed_is_the_documented_text_hashed():
    digest = hashlib.sha256(b"7:12:3").digest()
    assert episode_seed(7, 12, 3) == int.from_bytes(digest[:4], "big")
    assert episode_id(12, 3) == "task-000012__sample-003"


@given(seed=SEEDS, step=st.integers(0, 200))
def test_step_seeds_are_no_sums(seed, step):
    # seed + step would make job n's step 1 equal job n+1's step 0
    assert step_seed(seed, step + 1) != step_seed(seed + 1, step)


def test_all_seeds_of_a_large_run_are_distinct():
    jobs = make_jobs(list(range(0, 3000, 3)), split="train", repeats=4, experiment_seed=7)
    seeds = {step_seed(job.seed, step) for job in jobs for step in range(10)}
    # 40,000 draws of 32 bits collide about 0.2 times by chance: none or a single pair, never a pattern
    assert len(seeds) >= len(jobs) * 10 - 2


@given(st.sets(st.integers(0, 10**6), min_size=1, max_size=60), SEEDS, st.data())
def test_sampling_is_the_documented_rule_and_ignores_the_order_of_the_list(ids, seed, data):
    n = data.draw(st.integers(1, len(ids)))
    listed = list(ids)
    sampled = sample_task_ids(listed, n, experiment_seed=seed)
    assert sampled == random.Random(seed).sample(sorted(ids), n)
    assert sampled == sample_task_ids(list(reversed(listed)), n, experiment_seed=seed)


def test_the_whole_split_comes_sorted():
    assert sample_task_ids([9, 2, 40], None, experiment_seed=1) == [2, 9, 40]


@pytest.mark.parametrize(("n", "says"), [(0, "not positive"), (4, "has only 3")])
def test_impossible_samples_name_the_key(n, says):
    with pytest.raises(ConfigError, match=f"tasks.sample_size.*{says}"):
        sample_task_ids([1, 2, 3], n, experiment_seed=0)


def test_jobs_are_tasks_times_samples_and_independent_of_what_else_is_sampled():
    few = make_jobs([5, 9], split="val", repeats=2, experiment_seed=3)
    assert [(j.task_id, j.sample_id, j.split) for j in few] == [
        (5, 0, "val"),
        (5, 1, "val"),
        (9, 0, "val"),
        (9, 1, "val"),
    ]
    many = make_jobs([1, 5, 7, 9], split="val", repeats=3, experiment_seed=3)
    assert set(few) <= set(many)


@pytest.mark.parametrize(
    ("ids", "says"), [([1, 1], "repeats an id"), ([-1, 2], "negative id"), ([], "at least 1 item")]
)
def test_bad_lists_are_refused(ids, says):
    with pytest.raises(ValueError, match=says):
        split(ids)


def test_an_edited_list_is_noticed(tmp_path):
    manifest = SplitManifest(splits={"train": split([1, 2, 3])})
    raw = manifest.model_dump(mode="json")
    raw["splits"]["train"]["task_ids"].append(4)
    path = tmp_path / "splits.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(DataError, match=r"splits\.json is not valid:(.|\n)*frozen list was edited"):
        load_split_manifest(path)


def test_overlapping_splits_are_refused(tmp_path):
    with pytest.raises(ValueError, match="task 2 is in both 'train' and 'val'"):
        SplitManifest(splits={"train": split([1, 2]), "val": split([2, 3], "val")})


def test_a_manifest_survives_disk(tmp_path):
    manifest = SplitManifest(
        source={"kind": "x"}, splits={"a": split([4, 1], "val", persona=True)}, grouping={"components": 2}
    )
    path = tmp_path / "m.json"
    path.write_text(manifest.model_dump_json())
    assert load_split_manifest(path) == manifest


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", r"m\.json:1: not JSON"),
        ("[]", r"m\.json is not valid"),
        ('{"version": "v9"}', "version is 'v9', expected 'rayrl-splits-v1'; convert"),
        ('{"version": "rayrl-splits-v1", "splits": {}}', r"splits: .*at least 1"),
        ('{"version": "rayrl-splits-v1", "splits": {"a": {"role": "dev"}}}', r"splits\.a\.role"),
    ],
)
def test_broken_manifests_name_file_and_place(tmp_path, text, says):
    path = tmp_path / "m.json"
    path.write_text(text)
    with pytest.raises(DataError, match=says):
        load_split_manifest(path)


def test_a_missing_manifest_is_bad_input(tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.json: cannot be read"):
        load_split_manifest(tmp_path / "nowhere.json")


def test_an_unknown_split_gets_a_suggestion():
    manifest = SplitManifest(splits={"train": split([1]), "val": split([2], "val")})
    with pytest.raises(ConfigError, match=r"tasks\.split: no split 'trian'.*did you mean 'train'.*train, val"):
        manifest.split("trian")


def test_canonical_json_is_sorted_compact_and_keeps_non_ascii():
    assert canonical_json({"b": 1, "a": "杯子"}) == '{"a":"杯子","b":1}'.encode()
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"x": float("nan")})
