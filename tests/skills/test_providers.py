"""The simple providers: scope, order, masks as pure functions, and errors that name the entry."""

from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrl.errors import ConfigError, DataError
from rayrl.schemas import PublicContext
from rayrl.skills.providers import (
    BankEntry,
    BankSkills,
    MaskedSkills,
    NoSkills,
    SkillsConfig,
    TaskScope,
    bank_hash,
    build_skills,
    load_bank,
    mask_bit,
)
from tests.doubles import OptionSkills, job

BANK = [
    BankEntry(skill_id="all", content="A"),
    BankEntry(skill_id="some", content="B", scope=TaskScope(task_ids=[1, 2])),
    BankEntry(skill_id="also", content="C", version="2", metadata={"k": 1}),
]


def context(task=1, sample=0):
    return PublicContext(job=job(task, sample), instruction="buy", persona={}, observation_state={})


async def ids(provider, task=1, sample=0):
    return [skill.skill_id for skill in await provider.select(context(task, sample))]


def write(tmp_path, skills, schema="rayrl-skillbank-v1"):
    path = tmp_path / "bank.json"
    path.write_text(json.dumps({"schema": schema, "skills": skills}))
    return path


async def test_none_selects_none():
    assert await ids(NoSkills()) == [] and NoSkills().identity() == {"kind": "none"}


async def test_scope_order_and_limit():
    assert await ids(BankSkills(BANK)) == ["all", "some", "also"]
    assert await ids(BankSkills(BANK), task=9) == ["all", "also"]
    assert await ids(BankSkills(BANK, max_skills=2)) == ["all", "some"]
    assert await ids(BankSkills(BANK, max_skills=0)) == []
    (skill,) = [s for s in await BankSkills(BANK).select(context()) if s.skill_id == "also"]
    assert (skill.version, skill.metadata) == ("2", {"k": 1})


def test_the_bank_hash_knows_content_order_and_scope_but_not_the_file(tmp_path):
    path = write(tmp_path, [entry.model_dump(mode="json") for entry in BANK])
    loaded = load_bank(path)
    assert loaded == BANK and bank_hash(loaded) == bank_hash(BANK)
    assert bank_hash(BANK[::-1]) != bank_hash(BANK)
    assert bank_hash([BANK[0].model_copy(update={"content": "A "})]) != bank_hash(BANK[:1])
    assert bank_hash([BANK[1].model_copy(update={"scope": "global"})]) != bank_hash([BANK[1]])


def test_the_mask_is_the_documented_hash():
    digest = hashlib.sha256(b"7:train:3:0:budget").digest()
    assert mask_bit(7, job(3), "budget", 0.5) is (int.from_bytes(digest[:8], "big") < 2**63)


@given(st.integers(0, 2**31), st.integers(0, 10**6), st.integers(0, 9), st.text(min_size=1, max_size=9))
def test_masks_are_pure_and_grow_with_the_inclusion(seed, task, sample, skill):
    if any(0xD800 <= ord(c) < 0xE000 for c in skill):
        return
    bits = [mask_bit(seed, job(task, sample), skill, p) for p in (0.1, 0.5, 0.9)]
    assert bits == sorted(bits)
    assert bits == [mask_bit(seed, job(task, sample), skill, p) for p in (0.1, 0.5, 0.9)]


@pytest.mark.parametrize("inclusion", [0.2, 0.5, 0.8])
def test_masks_include_as_often_as_asked_and_skills_independently(inclusion):
    jobs = [job(task, sample) for task in range(500) for sample in range(4)]
    a = [mask_bit(1, j, "a", inclusion) for j in jobs]
    b = [mask_bit(1, j, "b", inclusion) for j in jobs]
    # 5 standard deviations of a binomial with 2000 draws
    spread = 5 * (inclusion * (1 - inclusion) / len(jobs)) ** 0.5
    assert abs(sum(a) / len(jobs) - inclusion) < spread
    both = sum(x and y for x, y in zip(a, b, strict=True)) / len(jobs)
    assert abs(both - inclusion**2) < spread


async def test_a_masked_selection_is_a_subset_in_bank_order_that_differs_by_sample():
    provider = MaskedSkills(BANK, mask_seed=3, inclusion=0.5)
    chosen = [tuple(await ids(provider, sample=n)) for n in range(40)]
    assert len(set(chosen)) > 3
    order = [entry.skill_id for entry in BANK]
    assert all(list(c) == [i for i in order if i in c] for c in chosen)
    for n in range(10):
        assert "some" not in await ids(provider, task=9, sample=n)


@pytest.mark.parametrize("inclusion", [0.0, 1.0, -0.1, 1.5])
def test_an_inclusion_without_chance_is_refused(inclusion):
    with pytest.raises(ConfigError, match=r"skills\.inclusion"):
        MaskedSkills(BANK, mask_seed=0, inclusion=inclusion)


def test_what_enters_the_fingerprint():
    masked = MaskedSkills(BANK, mask_seed=3, inclusion=0.25).identity()
    assert masked == {"kind": "masked", "bank_sha256": bank_hash(BANK), "mask_seed": 3, "inclusion": 0.25}
    assert BankSkills(BANK, max_skills=2).identity()["max_skills"] == 2


@pytest.mark.parametrize(
    ("skills", "says"),
    [
        ([{"skill_id": "a"}], r"skills\[0\]\.content: Field required"),
        ([{"skill_id": "a", "content": "x"}, {"skill_id": "a", "content": "y"}], r"skills\[1\]: .*'a' occurs twice"),
        ([{"skill_id": "", "content": "x"}], r"skills\[0\]\.skill_id"),
        ([{"skill_id": "a", "content": ""}], r"skills\[0\]\.content"),
        ([{"skill_id": "a", "content": "x", "scoop": "global"}], r"skills\[0\]\.scoop"),
        ([{"skill_id": "a", "content": "x", "scope": {"task_ids": []}}], r"skills\[0\]\.scope"),
        (["text"], r"skills\[0\]"),
    ],
)
def test_broken_banks_name_the_entry(tmp_path, skills, says):
    with pytest.raises(DataError, match=rf"bank\.json: {says}"):
        load_bank(write(tmp_path, skills))


def test_files_that_are_no_bank(tmp_path):
    with pytest.raises(DataError, match="schema is 'v0', expected 'rayrl-skillbank-v1'"):
        load_bank(write(tmp_path, [], schema="v0"))
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read as JSON"):
        load_bank(tmp_path / "x.json")
    with pytest.raises(DataError, match="cannot be read"):
        load_bank(tmp_path / "none.json")


def test_a_config_names_a_provider(tmp_path):
    path = write(tmp_path, [{"skill_id": "a", "content": "x"}])
    assert isinstance(build_skills(SkillsConfig()), NoSkills)
    assert isinstance(build_skills(SkillsConfig(kind="bank", path="bank.json"), tmp_path), BankSkills)
    assert isinstance(build_skills(SkillsConfig(kind="masked", path=str(path))), MaskedSkills)
    own = build_skills(SkillsConfig(kind="tests.doubles:OptionSkills", options={"a": 1}))
    assert isinstance(own, OptionSkills) and own.options == {"a": 1}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"kind": "bnak"}, r"skills\.kind: 'bnak' is none of"),
        ({"kind": "bank"}, r"skills\.path: needed for skills\.kind=bank"),
        ({"path": "bank.json"}, r"skills\.path is set but skills\.kind is none"),
        ({"kind": "bank", "path": "nowhere.json"}, "nowhere.json"),
        ({"kind": "tests.doubles:Nothing"}, "no attribute 'Nothing'"),
        ({"kind": "tests.doubles:FakeModel"}, r"does not offer identity\(\) and select\(\)"),
        ({"kind": "tests.doubles:FakeFactory", "options": {"speed": 1}}, r"cannot be built from skills\.options"),
    ],
)
def test_what_cannot_be_built_says_which_key(config, says):
    with pytest.raises(ConfigError, match=says):
        build_skills(SkillsConfig(**config))
