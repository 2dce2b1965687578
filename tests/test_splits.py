"""Related tasks never land on two sides; the assignment is deterministic; foreign files are read or refused by name."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrl.errors import DataError
from rayrl.splits import (
    TaskFacts,
    build_splits,
    check_splits,
    components,
    facts_from_products,
    import_splits,
)
from rayrl.tasks import task_ids_sha256


def fact(task_id, **relations):
    return TaskFacts(task_id=task_id, **relations)


FACTS = st.lists(
    st.builds(
        lambda product, instruction, user: {"product": product, "instruction": instruction, "user": user},
        st.sampled_from(["", "p1", "p2", "p3"]),
        st.sampled_from(["", "i1", "i2", "i3", "i4"]),
        st.sampled_from(["", "u1", "u2"]),
    ),
    min_size=1,
    max_size=40,
).map(lambda rows: [fact(2 * n + 1, **row) for n, row in enumerate(rows)])


def slow_components(facts):
    groups = [{f.task_id} for f in facts]
    by_id = {f.task_id: set(f.keys()) for f in facts}
    merged = True
    while merged:
        merged = False
        for a in groups:
            for b in groups:
                if a is not b and any(by_id[x] & by_id[y] for x in a for y in b):
                    a |= b
                    groups.remove(b)
                    merged = True
                    break
            if merged:
                break
    return sorted(sorted(g) for g in groups)


@given(FACTS)
@settings(max_examples=60, deadline=None)
def test_union_find_agrees_with_the_slow_definition(facts):
    assert components(facts) == slow_components(facts)


def test_empty_relations_relate_nothing():
    assert components([fact(1), fact(2), fact(3)]) == [[1], [2], [3]]


def test_relations_chain():
    facts = [fact(1, product="p"), fact(2, product="p", user="u"), fact(3, user="u"), fact(4, persona="q")]
    assert components(facts) == [[1, 2, 3], [4]]


def many(n, **more):
    return [fact(i, product=f"p{i}", **more) for i in range(n)]


@given(st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_built_splits_keep_components_together_and_hold_every_task_once(seed):
    facts = many(60) + [fact(100 + i, product=f"p{i}") for i in range(0, 20, 2)]
    manifest = build_splits(facts, val=20, test=20, seed=seed, source={"kind": "t"})
    ids = [i for split in manifest.splits.values() for i in split.task_ids]
    assert sorted(ids) == sorted(f.task_id for f in facts)
    assert (len(manifest.splits["val"].task_ids), len(manifest.splits["test"].task_ids)) == (20, 20)
    assert check_splits(manifest, facts) == []


def test_the_same_tasks_and_seed_give_the_same_splits_whatever_their_order():
    facts = many(40)
    one = build_splits(facts, val=5, test=5, seed=4, source={})
    two = build_splits(list(reversed(facts)), val=5, test=5, seed=4, source={})
    assert one == two
    assert one != build_splits(facts, val=5, test=5, seed=5, source={})


def test_a_large_family_stays_in_train():
    facts = many(60) + [fact(200 + i, user="family") for i in range(9)]
    for seed in range(12):
        manifest = build_splits(facts, val=20, test=20, seed=seed, source={})
        assert set(range(200, 209)) <= set(manifest.splits["train"].task_ids)
    assert manifest.grouping["largest_component"] == 9


@pytest.mark.parametrize(
    ("facts", "sizes", "says"),
    [
        ([fact(1), fact(1)], (0, 0), "task id 1 occurs twice"),
        (many(6), (3, 3), "nothing is left for train"),
        ([fact(i, product="same") for i in range(30)], (5, 5), "can be filled without splitting related tasks"),
        (many(6), (-1, 2), "val: -1 is negative"),
    ],
)
def test_impossible_splits_say_why(facts, sizes, says):
    with pytest.raises(DataError, match=says):
        build_splits(facts, val=sizes[0], test=sizes[1], seed=0, source={})


def test_facts_leave_the_user_id_out_of_the_persona_and_ignore_white_space():
    def product(asin, task_id, instruction, user=None):
        persona = {"user_persona": {"用户ID": user, "风格": "x"}} if user else {}
        return {"asin": asin, "instructions": [{"task_id": task_id, "instruction": instruction}], **persona}

    products = [product("a", 1, "buy  a mug", "u1"), product("b", 2, "other", "u2"), product("c", 3, "buy a\nmug")]
    facts = facts_from_products(products)
    assert [f.user for f in facts] == ["u1", "u2", ""]
    assert facts[0].persona == facts[1].persona
    assert components(facts) == [[1, 2, 3]]


def test_check_finds_leaks_and_unknown_tasks():
    facts = many(20)
    manifest = build_splits(facts, val=4, test=4, seed=0, source={})
    val, train = manifest.splits["val"].task_ids[0], manifest.splits["train"].task_ids[0]
    related = [f if f.task_id not in (val, train) else fact(f.task_id, product="shared") for f in facts]
    problems = check_splits(manifest, related)
    assert len(problems) == 1 and f"{val} in val" in problems[0] and f"{train} in train" in problems[0]
    problems = check_splits(manifest, facts[:-1])
    assert problems == ["1 task ids are not in the source, the first is 19"]


# --- foreign files


def write(tmp_path, value):
    path = tmp_path / "persona_splits.v1.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_the_public_persona_splits_and_their_sizes(tmp_path):
    # the public file: 3726/400/400 explicit ids under "splits", facts about the grouping beside them
    ids = list(range(0, 9052, 2))
    body = {"train": ids[:3726], "val": ids[3726:4126], "test": ids[4126:]}
    value = {
        "version": "persona_splits.v1",
        "grouping": {"method": "union-find"},
        "splits": {name: {"task_ids": part, "persona": True} for name, part in body.items()},
    }
    manifest = import_splits(write(tmp_path, value))
    assert {n: len(s.task_ids) for n, s in manifest.splits.items()} == {"train": 3726, "val": 400, "test": 400}
    assert all(s.persona is True for s in manifest.splits.values())
    assert manifest.splits["val"].task_ids_sha256 == task_ids_sha256(body["val"])
    assert manifest.grouping["grouping"] == {"method": "union-find"}
    assert manifest.source["file"] == "persona_splits.v1.json" and len(manifest.source["sha256"]) == 64


@pytest.mark.parametrize(
    "value",
    [
        {"train": {"range": [0, 4]}, "validation": {"range": [4, 6]}},
        {"train": {"start": 0, "end": 4}, "dev": {"start": 4, "stop": 6}},
        {"train": [0, 1, 2, 3], "val": {"ids": [4, 5]}},
        {"splits": {"train": {"tasks": [3, 2, 1, 0]}, "held": {"task_ids": [4, 5], "role": "val"}}},
    ],
)
def test_legacy_shapes(tmp_path, value):
    manifest = import_splits(write(tmp_path, value))
    by_role = {split.role: split.task_ids for split in manifest.splits.values()}
    assert by_role == {"train": [0, 1, 2, 3], "val": [4, 5]}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("{", "cannot be read as JSON"),
        ([1, 2], "expected an object of splits"),
        ({"note": "x"}, "holds no split"),
        ({"train": {"rows": 3}}, "split 'train': no task_ids, range or start/end found"),
        ({"holdout": [1]}, "split 'holdout': role 'holdout' is none of"),
        ({"train": [1, 2], "val": [2]}, "task 2 is in both"),
        ({"train": []}, "split 'train'"),
        ({"train": [3, 3]}, "split 'train'.*repeats an id"),
        ({"train": {"task_ids": ["one"]}}, "split 'train'"),
        ({"train": {"range": ["a", 4]}}, "split 'train'"),
        ({"train": {"start": 0, "end": None}}, "split 'train'"),
        ({"train": [-4]}, "split 'train'.*negative"),
    ],
)
def test_what_cannot_be_understood_is_refused_by_name(tmp_path, value, says):
    with pytest.raises(DataError, match=f"persona_splits.v1.json.*{says}"):
        import_splits(write(tmp_path, value))


def test_a_missing_file_is_bad_input(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        import_splits(tmp_path / "none.json")
