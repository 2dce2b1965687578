import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rayrl.errors import DataError
from rayrl.workbench.cases import normal_label
from rayrl.workbench.mapping import (
    FieldRule,
    MappingProfile,
    apply_profile,
    drift,
    label_values,
    lookup,
    parse_path,
    suggest,
    suggest_labels,
)
from rayrl.workbench.readers.rows import Table


def table(*rows):
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return Table("jsonl", columns, list(rows), [f"line {n}" for n in range(1, len(rows) + 1)])


def profile(**fields):
    return MappingProfile(
        fields={
            name: rule if isinstance(rule, FieldRule) else FieldRule(sources=[rule]) for name, rule in fields.items()
        }
    )


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("data.query", "q"),
        ("$.data.list[1].t", "b"),
        ("数据.文本", "中"),
        ("text.inner", "in"),
        ("data.nothing", None),
        ("data.list[9]", None),
    ],
)
def test_paths(path, value):
    row = {
        "data": {"query": "q", "list": [{"t": "a"}, {"t": "b"}]},
        "数据": {"文本": "中"},
        "text": json.dumps({"inner": "in"}),
    }
    assert lookup(row, path) == value


def test_literal_column_wins_over_path():
    assert lookup({"data.query": "column", "data": {"query": "path"}}, "data.query") == "column"


@pytest.mark.parametrize("path", ["a[", "a[x]", "a]", "a..b"])
def test_bad_paths_are_errors(path):
    with pytest.raises(DataError, match="is no JSON path"):
        parse_path(path)


@pytest.mark.parametrize("text", ["快", " 快 ", "快\u200b", "\ufeff快", "ＦＡＳＴ", "Fast", "0", "０"])
def test_label_spellings(text):
    mapped = apply_profile(table({"q": "x", "l": text}), profile(query="q", gold_route="l"))
    assert mapped.cases[0].gold_route == "fast"


def test_na_null_and_none_are_labels_like_any_other():
    rule = MappingProfile(
        fields={"query": FieldRule(sources=["q"]), "gold_route": FieldRule(sources=["l"])},
        labels={"yes": ["NA", "null"], "no": ["None"]},
    )
    mapped = apply_profile(table(*({"q": f"x{n}", "l": label} for n, label in enumerate(("NA", "null", "None")))), rule)
    assert [case.gold_route for case in mapped.cases] == ["yes", "yes", "no"]


def test_rows_with_errors_name_place_and_field():
    rows = [
        {"id": "1", "q": "x", "l": "快"},
        {"id": "1", "q": "y", "l": "慢"},
        {"id": "2", "q": " ", "l": "慢"},
        {"id": "3", "q": "z", "l": "中"},
        {"id": "", "q": "z", "l": "慢"},
    ]
    mapped = apply_profile(table(*rows), profile(query="q", gold_route="l", case_id="id"))
    assert [c.case_id for c in mapped.cases] == ["1"]
    assert [(e["place"], e["field"]) for e in mapped.errors] == [
        ("line 2", "case_id"),
        ("line 3", "query"),
        ("line 4", "gold_route"),
        ("line 5", "case_id"),
    ]
    assert "first in line 1" in mapped.errors[0]["message"]


def test_label_is_optional_and_counted():
    mapped = apply_profile(table({"q": "x", "l": ""}, {"q": "y", "l": "慢"}), profile(query="q", gold_route="l"))
    assert [c.gold_route for c in mapped.cases] == [None, "slow"] and mapped.unlabelled == 1


def test_automatic_ids_depend_on_content_alone():
    rows = [{"q": "a", "l": "快"}, {"q": "b", "l": "快"}, {"q": "a", "l": "慢"}]
    p = profile(query="q", gold_route="l")
    first = [c.case_id for c in apply_profile(table(*rows), p).cases]
    again = [c.case_id for c in apply_profile(table(*reversed(rows)), p).cases]
    assert len(set(first)) == 3 and set(first) == set(again)
    assert first[2] == f"{first[0]}-2"
    corrected = [{**row, "l": "慢"} for row in rows]
    assert [c.case_id for c in apply_profile(table(*corrected), p).cases] == first


def test_combining_transforming_defaults_and_metadata():
    rule = FieldRule(sources=["a", "b"], join=" / ", transforms=["nfkc", "collapse_spaces", "lower"])
    p = profile(
        query=rule,
        history=FieldRule(sources=["h"], transforms=["json"]),
        domain=FieldRule(sources=["d"], default="其他"),
    )
    case = apply_profile(table({"a": "Ａ  b", "b": "C", "h": '["x"]', "z": 1}), profile(query=rule)).cases[0]
    assert case.query == "a b / c" and case.metadata == {"h": '["x"]', "z": 1}
    with pytest.raises(DataError, match="domain: the file has no column or path 'd'"):
        apply_profile(table({"a": "x", "b": "", "h": "[]"}), p)
    mapped = apply_profile(table({"a": "x", "b": "", "h": '["u"]', "d": ""}, {"a": "y", "h": "no json", "d": "k"}), p)
    assert mapped.cases[0].history == ["u"] and mapped.cases[0].domain == "其他"
    assert mapped.errors[0]["place"] == "line 2" and mapped.errors[0]["field"] == "history"


def test_source_row_is_kept_whole():
    row = {"id": "007", "q": "x", "nested": {"a": [1]}}
    case = apply_profile(table(row), profile(query="q", case_id="id")).cases[0]
    assert case.source_row == row and case.source_place == "line 1" and case.case_id == "007"


def test_ambiguous_label_sets_and_missing_query_are_refused():
    with pytest.raises(ValidationError, match="stands for both"):
        MappingProfile(fields={"query": FieldRule(sources=["q"])}, labels={"a": ["1"], "b": ["１"]})
    with pytest.raises(ValidationError, match="query must be mapped"):
        MappingProfile(fields={"domain": FieldRule(sources=["q"])})
    with pytest.raises(ValidationError, match=r"no field 'quary'.*query"):
        MappingProfile(fields={"quary": FieldRule(sources=["q"])})


def test_suggestions_know_chinese_names_and_nested_keys():
    assert suggest(table({"编号": 1, "用户query": "x", "人工标签": "快", "垂域": "d"})) == {
        "case_id": "编号",
        "query": "用户query",
        "gold_route": "人工标签",
        "domain": "垂域",
    }
    assert suggest(table({"data": {"query": "x"}, "rid": "r"}))["query"] == "data.query"


def test_drift_names_columns_and_labels():
    p = profile(query="q", gold_route="l")
    found = drift(["q", "l", "old"], table({"q": "x", "l": "快", "new": 1}, {"q": "y", "l": "很快", "new": 1}), p)
    assert found == {
        "new_columns": ["new"],
        "missing_columns": ["old"],
        "missing_used": [],
        "unknown_labels": {"很快": 1},
        "drifted": True,
    }


@given(st.text(max_size=30))
def test_normal_label_is_stable(text):
    assert normal_label(normal_label(text)) == normal_label(text)


def test_classes_come_from_the_file_unless_the_default_ones_fit():
    rows = [{"text": str(n), "category": name} for n, name in enumerate(["spam", "ham", "Spam ", "ham"])]
    found = table(*rows)
    assert suggest(found) == {"query": "text", "gold_route": "category"}  # few values, and no other label column
    values = label_values(found, FieldRule(sources=["category"]))
    assert values == {"spam": 2, "ham": 2} and suggest_labels(values) == {"ham": [], "spam": []}
    assert set(suggest_labels({"快": 3, "慢": 2, "也许": 1})) == {"fast", "slow"}
    assert set(suggest_labels({"spam": 9})) == {"fast", "slow"}  # one class is none
    unlike = table(*({"text": str(n), "category": str(n)} for n in range(4)))
    assert suggest(unlike)["domain"] == "category"


def test_rows_that_could_not_be_read_are_errors_like_others():
    found = table({"q": "x"})
    found.reject("line 3", "3 fields, but the header has 1")
    mapped = apply_profile(found, MappingProfile(fields={"query": FieldRule(sources=["q"])}))
    assert (len(mapped.cases), mapped.n_errors, mapped.errors[0]["place"]) == (1, 1, "line 3")
