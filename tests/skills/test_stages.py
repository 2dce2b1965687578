"""Durable stages: what a change or a kill leaves in force."""

from pathlib import Path

import pytest

from rayrl.errors import DataError
from rayrl.skills.stages import Stages


def go(folder: Path, inputs: dict[str, int], *, until: str | None = None) -> Stages:
    """Three stages that each write a file of their own with their input and the file before."""
    stages, before = Stages(folder), ""
    for name, value in inputs.items():

        def work(name: str = name, value: int = value, before: str = before) -> dict[str, int]:
            (folder / name).write_text(f"{before}{value}")
            return {"value": value}

        stages.run(name, {"value": value}, [name], work)
        before = (folder / name).read_text()
        if name == until:
            break
    return stages


def test_what_is_done_stays_and_what_changed_runs_with_all_behind_it(tmp_path: Path):
    first = {"a": 1, "b": 2, "c": 3}
    assert go(tmp_path, first).ran == ["a", "b", "c"]
    assert go(tmp_path, first).ran == []
    assert go(tmp_path, first | {"b": 5}).ran == ["b", "c"]
    assert (tmp_path / "c").read_text() == "153"


def test_stopped_behind_a_change_the_old_results_are_not_taken_up_again(tmp_path: Path):
    first = {"a": 1, "b": 2, "c": 3}
    go(tmp_path, first)
    go(tmp_path, first | {"a": 9}, until="a")
    later = go(tmp_path, first | {"a": 9})
    assert later.ran == ["b", "c"]
    assert (tmp_path / "c").read_text() == "923"


def test_a_stage_that_is_left_out_now_is_not_in_force(tmp_path: Path):
    go(tmp_path, {"a": 1, "b": 2, "c": 3})
    without = go(tmp_path, {"a": 4, "c": 3})
    assert without.ran == ["a", "c"] and without.facts("b") is None


def test_a_touched_or_missing_file_runs_its_stage_again(tmp_path: Path):
    first = {"a": 1, "b": 2}
    go(tmp_path, first)
    (tmp_path / "a").write_text("other")
    assert go(tmp_path, first).ran == ["a", "b"]
    with pytest.raises(DataError, match="without its file"):
        Stages(tmp_path).run("d", {}, ["d"], dict)
