from __future__ import annotations

import hashlib
import json

import pytest

from rayrl.errors import DataError, UserError
from rayrl.skills.bank import (
    BankEntry,
    EvidenceRef,
    LeakCheck,
    Review,
    SkillRecord,
    diff_banks,
    from_public,
    load_snapshot,
    make_bank,
    next_version,
    public_content_sha256,
    review_skill,
    save_bank,
    to_public,
)
from rayrl.skills.providers import TaskScope, load_bank


def bank():
    return make_bank(
        [
            BankEntry(skill_id="a", content="Compare the price with the budget."),
            BankEntry(skill_id="b", content="翻页。", scope=TaskScope(task_ids=[4])),
        ],
        {"a": SkillRecord(evidence_for=[EvidenceRef(episode_id="e", steps=[1])], family="f")},
    )


def test_a_snapshot_comes_back_as_it_was_and_is_named_by_its_content(tmp_path):
    path = tmp_path / "bank.json"
    digest = save_bank(bank(), path)
    assert load_snapshot(path) == bank() and load_snapshot(path).sha256 == digest == bank().sha256
    assert [e.skill_id for e in load_bank(path)] == ["a", "b"]
    changed = make_bank(list(reversed(bank().skills)))
    assert changed.sha256 != digest  # order is prompt order


def test_snapshots_are_immutable(tmp_path):
    path = tmp_path / "bank.json"
    save_bank(bank(), path)
    save_bank(bank(), path)
    with pytest.raises(DataError, match="immutable"):
        save_bank(make_bank([]), path)
    raw = json.loads(path.read_text())
    raw["skills"][0]["content"] = "Buy at once."
    path.write_text(json.dumps(raw))
    with pytest.raises(DataError, match="edited"):
        load_bank(path)


def test_a_plain_list_of_skills_is_a_bank(tmp_path):
    path = tmp_path / "bank.json"
    path.write_text(json.dumps({"schema": "rayrl-skillbank-v1", "skills": [{"skill_id": "x", "content": "y"}]}))
    assert load_snapshot(path).record("x") == SkillRecord()


def test_broken_banks_are_refused_with_the_place(tmp_path):
    path = tmp_path / "bank.json"
    for text, message in (
        ("{", "cannot be read"),
        ('{"schema": "other"}', "'other'"),
        ('{"schema": "rayrl-skillbank-v1", "skills": [{"skill_id": "x"}]}', r"skills\[0\].content"),
        (
            '{"schema": "rayrl-skillbank-v1", "skills": [{"skill_id": "x", "content": "1"},'
            ' {"skill_id": "x", "content": "2"}]}',
            "occurs twice",
        ),
        ('{"schema_version": "shopsimrl-skillbank-v1", "skills": [{"skill_id": "x"}]}', r"skills\[0\]"),
        ('{"schema_version": "shopsimrl-skillbank-v1"}', "must be a list"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            load_bank(path)
    with pytest.raises(DataError, match="records speak of"):
        make_bank([], {"ghost": SkillRecord()})


def test_the_public_schema_is_read_and_written(tmp_path):
    public = to_public(bank())
    assert public["schema_version"] == "shopsimrl-skillbank-v1"
    # the hash of the JSON string, quotes included, as the public project computes it
    text = json.dumps("翻页。", ensure_ascii=False)
    assert public["skills"][1]["content_sha256"] == hashlib.sha256(text.encode()).hexdigest()
    assert public["skills"][1]["task_ids"] == [4]
    path = tmp_path / "public.json"
    path.write_text(json.dumps(public))
    back = load_snapshot(path)
    assert [(s.skill_id, s.content, s.scope) for s in back.skills] == [
        (s.skill_id, s.content, s.scope) for s in bank().skills
    ]
    public["skills"][0]["content_sha256"] = "0" * 64
    with pytest.raises(DataError, match="does not fit"):
        from_public(public)


def test_disabled_public_skills_are_not_injected(tmp_path):
    payload = {
        "schema_version": "shopsimrl-skillbank-v1",
        "bank_version": "draft-3",
        "skills": [{"skill_id": "a", "content": "x", "enabled": False}, {"skill_id": "b", "content": "y"}],
    }
    path = tmp_path / "p.json"
    path.write_text(json.dumps(payload))
    assert [e.skill_id for e in load_bank(path)] == ["b"]
    assert to_public(load_snapshot(path))["skills"][0]["enabled"] is False


def test_review_makes_a_new_snapshot_that_names_its_parent():
    old = bank()
    new = review_skill(old, "a", "edited", by="me", at="2026-01-01", content="Keep within the budget.")
    assert new.parent == old.sha256 and old.entry("a").version == "1" and new.entry("a").version == "2"
    assert new.record("a").review.status == "edited" and not new.record("a").leak_check.checked
    rejected = review_skill(new, "a", "rejected", by="me", at="", note="wrong")
    assert [s.skill_id for s in rejected.active()] == ["b"]
    with pytest.raises(UserError, match="no skill"):
        review_skill(old, "aa", "accepted", by="me", at="")
    with pytest.raises(UserError, match="changed text"):
        review_skill(old, "a", "edited", by="me", at="", content=old.entry("a").content)
    with pytest.raises(UserError, match="empty"):
        review_skill(old, "a", "edited", by="me", at="", content=" ")


def test_a_failed_leak_check_keeps_a_skill_out():
    leaky = make_bank(
        bank().skills, {"a": SkillRecord(leak_check=LeakCheck(checked=True, passed=False, reasons=["id"]))}
    )
    assert [s.skill_id for s in leaky.active()] == ["b"]


def test_the_difference_of_two_banks_names_everything():
    old = bank()
    new = make_bank(
        [BankEntry(skill_id="c", content="new"), old.skills[0].model_copy(update={"content": "other"})],
        {"a": SkillRecord(review=Review(status="accepted"))},
        parent=old,
    )
    found = diff_banks(old, new)
    assert (found["added"], found["removed"], found["child"]) == (["c"], ["b"], True)
    assert found["changed"]["a"]["content"] == ["Compare the price with the budget.", "other"]
    assert found["changed"]["a"]["family"] == ["f", None]
    assert diff_banks(old, old)["same"] == 2 and not diff_banks(old, old)["changed"]


@pytest.mark.parametrize(("old", "new"), [("1", "2"), ("9", "10"), ("draft-1", "draft-1.2"), ("v.2", "v.3")])
def test_versions_go_up(old, new):
    assert next_version(old) == new


def test_the_public_hash_is_of_the_json_string():
    assert public_content_sha256('a"b') == hashlib.sha256(b'"a\\"b"').hexdigest()
