"""splits build|import|check through the command."""

from __future__ import annotations

import json

import pytest


def test_build_check_and_refuse_to_overwrite(command, products_file, tmp_path):
    out = tmp_path / "m.json"
    words = ["splits", "build", "--products", products_file, "--val", 4, "--test", 4, "--out", out]
    code, built = command(*words)
    assert code == 0 and built["splits"]["val"] == 4 and built["splits"]["test"] == 4
    code, checked = command("splits", "check", out, "--products", products_file)
    assert code == 0 and checked["ok"] and checked["splits"] == built["splits"]
    code, found = command(*words)
    assert code == 3 and "frozen" in found["error"]["message"]


def test_the_same_words_give_the_same_manifest(command, tmp_path):
    made = []
    for name in ("a.json", "b.json"):
        code, _ = command(
            "splits", "build", "--generate", 60, "--seed", 3, "--val", 4, "--test", 4, "--out", tmp_path / name
        )
        assert code == 0
        made.append((tmp_path / name).read_bytes())
    assert made[0] == made[1]


def test_persona_tasks_alone(command, tmp_path):
    out = tmp_path / "p.json"
    code, found = command(
        "splits", "build", "--generate", 240, "--val", 1, "--test", 1, "--persona", "only", "--out", out
    )
    assert code == 0, found
    assert all(split["persona"] is True for split in json.loads(out.read_bytes())["splits"].values())


def test_another_catalogue_and_leaks_are_problems(command, products_file, shop_splits, tmp_path):
    code, found = command("splits", "check", shop_splits, "--generate", 60, "--seed", 4)
    assert code == 2 and any("another catalogue" in p for p in found["problems"])
    code, found = command("splits", "check", shop_splits)
    assert code == 0 and found["ok"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--val", 400, "--test", 400], "can be filled without splitting related tasks"),
        (["--val", -1, "--test", 2], "val: -1 is negative"),
    ],
)
def test_impossible_sizes(command, products_file, tmp_path, words, says):
    code, found = command("splits", "build", "--products", products_file, "--out", tmp_path / "m.json", *words)
    assert code == 2 and says in found["error"]["message"] and not (tmp_path / "m.json").exists()


def test_import(command, tmp_path):
    source = tmp_path / "persona_splits.v1.json"
    source.write_text(json.dumps({"splits": {"train": {"task_ids": [1, 2]}, "val": {"task_ids": [3]}}}))
    code, found = command("splits", "import", source, "--out", tmp_path / "m.json")
    assert code == 0 and found["splits"] == {"train": 2, "val": 1}
    code, found = command("splits", "check", tmp_path / "m.json")
    assert code == 0
    source.write_text("{")
    code, found = command("splits", "import", source, "--out", tmp_path / "n.json")
    assert code == 2 and "persona_splits.v1.json" in found["error"]["message"]


def test_a_missing_products_file_is_bad_input(command, tmp_path):
    words = ["--products", tmp_path / "none.json", "--val", 1, "--test", 1, "--out", tmp_path / "m.json"]
    code, found = command("splits", "build", *words)
    assert code == 2 and "none.json" in found["error"]["message"]


def test_people_see_a_table(says, shop_splits):
    code, out, _ = says("splits", "check", shop_splits)
    assert code == 0 and "train" in out and "role val" in out
