"""The locked split: every refusal, the ledger, and what counts as a second look."""

from __future__ import annotations

import json
import shutil

import orjson
import pytest

from jobs.rollout import run_rollout
from jobs.summarize import summarize_directory
from rayrl.errors import GuardError
from rayrl.experiment import load_run_config, prepare
from rayrl.guard import check_test_access, checkpoint_key, ledger_path, record_opening


@pytest.fixture
def lab(plain_run, tmp_path):
    """Makes experiments on val and test of one checkpoint; ``val()`` runs one to its end."""

    class Lab:
        def experiment(self, split, name=None, *, overrides=(), **changes):
            path = plain_run(
                f"{name or split}.yaml",
                experiment__name=name or split,
                tasks__split=split,
                tasks__sample_size=None,
                model__checkpoint_id=changes.pop("checkpoint", "step-100"),
                **changes,
            )
            return prepare(*load_run_config(path, list(overrides)))

        def val(self, name="val", **changes):
            experiment = self.experiment("val", name, **changes)
            result = run_rollout(experiment, quiet=True)
            assert result.status == "complete"
            return experiment.fingerprint

        def test(self, name="test", *, val, purpose="final report", **changes):
            return self.experiment("test", name, tasks__test_purpose=purpose, tasks__val_fingerprint=val, **changes)

    return Lab()


def refused(experiment, says, **more):
    with pytest.raises(GuardError, match=f"split 'test' has role test.*{says}") as caught:
        check_test_access(experiment, **more)
    assert caught.value.exit_code == 4


def ledger(experiment):
    path = ledger_path(experiment)
    return [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def test_train_and_val_are_never_guarded(lab):
    for split in ("train", "val"):
        assert check_test_access(lab.experiment(split)) is None


def test_each_missing_condition_is_refused_in_turn(lab):
    refused(lab.experiment("test"), r"tasks\.test_purpose")
    refused(lab.test(val=None), r"name the finished val run of this checkpoint in tasks\.val_fingerprint")
    refused(lab.test(val="abc"), "at least 12 digits")
    refused(lab.test(val="0" * 64), "no run with fingerprint 000000000000")


def test_the_val_run_must_be_a_finished_val_run_of_this_very_model(lab):
    train = lab.experiment("train")
    run_rollout(train, quiet=True)
    refused(lab.test(val=train.fingerprint), "is a train run, not a val run")
    val = lab.val()
    refused(lab.test(val=val, checkpoint="step-200"), "val run of another model, checkpoint or sampling")
    refused(lab.test(val=val, model__scripted={"noise": 0.5}), "val run of another model")
    assert check_test_access(lab.test(val=val)) == {"purpose": "final report", "openings_before": 0, "again": None}
    assert check_test_access(lab.test(val=val[:12])) is not None


def test_an_unfinished_val_run_is_refused_and_a_finished_twin_accepted(lab):
    val = lab.val()
    run_dir = lab.experiment("val").run_dir
    twin = run_dir.with_name("a-twin")
    shutil.copytree(run_dir, twin)
    lines = (twin / "traces.jsonl").read_bytes().splitlines(keepends=True)
    (twin / "traces.jsonl").write_bytes(b"".join(lines[:-1]))
    assert check_test_access(lab.test(val=val)) is not None
    shutil.rmtree(run_dir)
    refused(lab.test(val=val), r"is not finished \(3 of 4 episodes\); resume it first")


def test_other_things_in_the_run_root_do_not_disturb(lab):
    val = lab.val()
    other = lab.experiment("val").run_dir.with_name("0-other")
    other.mkdir()
    (other / "manifest.json").write_text("{")
    assert check_test_access(lab.test(val=val)) is not None


SKILLED = {"skills__kind": "tests.doubles:OptionSkills", "skills__options": {"kind": "none"}}


def test_skills_are_refused_whatever_the_provider_calls_itself(lab):
    val = lab.val()
    refused(lab.test(val=val, **SKILLED), "skills are not allowed")
    notice = check_test_access(lab.test(val=val, purpose="equipped_report", **SKILLED))
    assert notice["purpose"] == "equipped_report"


def test_an_opening_is_in_the_ledger_and_in_every_summary(lab):
    val = lab.val()
    test = lab.test(val=val)
    result = run_rollout(test, quiet=True)
    (row,) = ledger(test)
    assert row["experiment"] == "test" and row["fingerprint"] == test.fingerprint
    assert (row["purpose"], row["val_fingerprint"], row["again"]) == ("final report", val, None)
    notice = {"purpose": "final report", "openings_before": 0, "again": None}
    assert result.summary["test_split"] == notice
    assert json.loads((test.run_dir / "summary.json").read_bytes())["test_split"] == notice
    # also where the run never reached its summary, or somebody deleted it
    (test.run_dir / "summary.json").unlink()
    assert summarize_directory(test.run_dir)["test_split"] == notice


def test_a_resume_is_no_second_look(lab):
    test = lab.test(val=lab.val())
    run_rollout(test, quiet=True)
    lines = (test.run_dir / "traces.jsonl").read_bytes().splitlines(keepends=True)
    (test.run_dir / "traces.jsonl").write_bytes(b"".join(lines[:2]))
    result = run_rollout(test, quiet=True)
    assert result.complete == 4 and len(ledger(test)) == 1


SECOND = "already opened it on .* as 'test'.*--again REASON"


@pytest.mark.parametrize(
    "changes",
    [
        {},  # the very same settings under another name
        {"experiment__seed": 9},
        {"overrides": ["runtime.max_actions=7"]},
    ],
)
def test_a_second_run_of_the_checkpoint_needs_a_reason_that_stays(lab, changes):
    val = lab.val()
    run_rollout(lab.test(val=val), quiet=True)
    second = lab.test("second", val=val, **changes)
    refused(second, SECOND)
    assert len(ledger(second)) == 1 and not second.run_dir.exists()
    result = run_rollout(second, again="the shop was down", quiet=True)
    assert [row["again"] for row in ledger(second)] == [None, "the shop was down"]
    assert result.summary["test_split"] == {
        "purpose": "final report",
        "openings_before": 1,
        "again": "the shop was down",
    }
    # its own resume needs no reason again, and keeps the first one
    (second.run_dir / "traces.jsonl").write_bytes(b"")
    again = run_rollout(second, quiet=True)
    assert again.summary["test_split"]["again"] == "the shop was down" and len(ledger(second)) == 2


def test_removing_the_run_does_not_undo_the_look(lab):
    test = lab.test(val=lab.val())
    run_rollout(test, quiet=True)
    shutil.rmtree(test.run_dir)
    refused(lab.test(val=lab.experiment("val").fingerprint), SECOND)


def test_other_sampling_of_the_same_checkpoint_is_a_second_look(lab):
    run_rollout(lab.test(val=lab.val()), quiet=True)
    warmer = {"model__scripted": {"noise": 0.4}}
    val = lab.val("val-warm", **warmer)
    refused(lab.test("warm", val=val, **warmer), SECOND)


def test_another_checkpoint_may_look(lab):
    first = lab.test(val=lab.val())
    run_rollout(first, quiet=True)
    val = lab.val("val-200", checkpoint="step-200")
    other = lab.test("test-200", val=val, checkpoint="step-200")
    assert check_test_access(other)["openings_before"] == 0
    assert checkpoint_key(first) != checkpoint_key(other)


def test_a_model_without_a_checkpoint_is_known_by_its_whole_identity(lab):
    plain, warm = lab.experiment("test", checkpoint=None), lab.experiment("test", checkpoint=None, model__name="other")
    assert checkpoint_key(plain) != checkpoint_key(warm)


@pytest.mark.parametrize("damage", [b"{", b"[]", b'{"time": "2026"}'])
def test_a_damaged_ledger_is_not_taken_for_an_empty_one(lab, damage):
    test = lab.test(val=lab.val())
    ledger_path(test).write_bytes(damage + b"\n")
    with pytest.raises(GuardError, match=r"ledger\.jsonl:1 is damaged"):
        check_test_access(test)


def test_a_ledger_that_cannot_be_written_stops_the_run_before_its_first_episode(lab):
    test = lab.test(val=lab.val())
    notice = check_test_access(test)
    ledger_path(test).mkdir()
    with pytest.raises((GuardError, IsADirectoryError)):
        record_opening(test, notice)


def test_two_runs_that_open_at_the_same_time_are_not_both_the_first(lab):
    val = lab.val()
    one, two = lab.test("one", val=val), lab.test("two", val=val)
    notices = check_test_access(one), check_test_access(two)
    record_opening(one, notices[0])
    with pytest.raises(GuardError, match="opened by another run just now"):
        record_opening(two, notices[1])


def test_the_ledger_survives_a_lost_newline(lab):
    val = lab.val()
    run_rollout(lab.test(val=val), quiet=True)
    path = ledger_path(lab.experiment("test"))
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    run_rollout(lab.test("second", val=val), again="why", quiet=True)
    assert len(ledger(lab.experiment("test"))) == 2
