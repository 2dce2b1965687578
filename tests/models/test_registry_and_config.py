from __future__ import annotations

import sys
import textwrap

import pytest

from rayrl.config import parse_config
from rayrl.errors import ConfigError, ConformanceError
from rayrl.models.base import ChatModel
from rayrl.models.config import BUILT_IN_KINDS, ModelConfig, PriceConfig
from rayrl.models.registry import build_model, model_identity
from rayrl.registry import resolve_dotted
from rayrl.schemas import ModelOutput, Usage

BASE = {"base_url": "http://127.0.0.1:1/v1"}


class Parrot:
    """A user's own model."""

    def __init__(self, word: str = "hi") -> None:
        self.word = word

    def identity(self):
        return {"kind": "parrot", "word": self.word}

    async def generate(self, messages, tools, *, seed):
        return ModelOutput(content=self.word)

    async def aclose(self):
        pass


class NoModel:
    pass


HERE = __name__


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setitem(sys.modules, "parrots", sys.modules[HERE])


def test_a_dotted_model_is_built_with_its_options():
    config = ModelConfig(kind="parrots:Parrot", options={"word": "ho"})
    model = build_model(config)
    assert isinstance(model, ChatModel) and model_identity(config) == {"kind": "parrot", "word": "ho"}


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("no_such_pkg.models:X", "'no_such_pkg' was not found"),
        ("json.no_such:X", "'json.no_such' was not found"),
        ("json:dumpz", "did you mean 'dump"),
        ("json:", "package.module:Name"),
        (":x", "package.module:Name"),
        ("a b:c", "package.module:Name"),
    ],
)
def test_wrong_dotted_paths_say_what_is_wrong(path, part):
    with pytest.raises(ConfigError, match="model") as caught:
        resolve_dotted(path, "model")
    assert part in str(caught.value)


def test_a_module_that_fails_on_import(tmp_path, monkeypatch):
    (tmp_path / "broken_mod.py").write_text(textwrap.dedent("raise ValueError('boom')"))
    (tmp_path / "needy_mod.py").write_text("import not_installed_anywhere")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="ValueError: boom"):
        resolve_dotted("broken_mod:X", "model")
    with pytest.raises(ConfigError, match="needs module 'not_installed_anywhere'"):
        resolve_dotted("needy_mod:X", "model")


def test_nested_attributes_resolve():
    assert resolve_dotted("parrots:Parrot.identity", "thing") is Parrot.identity


def test_what_is_no_model_is_refused():
    with pytest.raises(ConformanceError, match="lacks identity, generate, aclose"):
        build_model(ModelConfig(kind="parrots:NoModel"))
    with pytest.raises(ConformanceError, match="str"):
        build_model(ModelConfig(kind="parrots:HERE"))
    with pytest.raises(ConfigError, match=r"model\.options"):
        build_model(ModelConfig(kind="parrots:Parrot", options={"wird": 1}))


def test_an_unknown_kind_suggests_a_near_one():
    with pytest.raises(ConfigError, match="did you mean 'scripted'"):
        parse_config({"kind": "scriptd"}, ModelConfig, source="x.yaml")
    assert {"openai", "scripted", "local"} == set(BUILT_IN_KINDS)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"kind": "openai"}, "base_url is required"),
        ({**BASE, "base_url": "ftp://x"}, "base_url"),
        ({**BASE, "temperature": -1}, "temperature"),
        ({**BASE, "retries": {"max_attempts": 0}}, "retries.max_attempts"),
        ({**BASE, "max_concurrency": 0}, "max_concurrency"),
        ({**BASE, "temprature": 1}, "did you mean 'temperature'"),
    ],
)
def test_bad_values_are_named(settings, key):
    with pytest.raises(ConfigError) as caught:
        parse_config(settings, ModelConfig, source="x.yaml")
    assert key in str(caught.value)


SEMANTIC = {
    "name": "other",
    "checkpoint_id": "step-80",
    "tool_protocol": "json_schema",
    "tool_choice": "auto",
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 20,
    "max_tokens": 7,
    "extra_body": {"a": 1},
    "context_limit": 8192,
    "send_seed": False,
    "allow_text_beside_call": False,
    "parallel_tool_calls": False,
}
BY_SCHEMA = {"json_schema_max_string": 8}
OPERATIONAL = {
    "base_url": "http://elsewhere/v1",
    "api_key_env": "HOME",
    "trust_env": True,
    "timeouts": {"read_s": 1},
    "retries": {"max_attempts": 2},
    "max_concurrency": 3,
    "prices": {"prompt": 1},
    "logprobs": True,
    "token_ids": True,
    "max_tokens_field": "max_completion_tokens",
    "scripted": {"level": "competent"},
    "local": {"context": 512},
    "options": {"x": 1},
}


def test_the_identity_holds_what_changes_results_and_nothing_else():
    plain = model_identity(ModelConfig.model_validate(BASE))
    for key, value in SEMANTIC.items():
        assert model_identity(ModelConfig.model_validate({**BASE, key: value})) != plain, key
    for key, value in OPERATIONAL.items():
        assert model_identity(ModelConfig.model_validate({**BASE, key: value})) == plain, key
    schema = {**BASE, "tool_protocol": "json_schema"}
    for key, value in BY_SCHEMA.items():
        assert model_identity(ModelConfig.model_validate({**BASE, key: value})) == plain, key  # not read there
        changed = model_identity(ModelConfig.model_validate({**schema, key: value}))
        assert changed != model_identity(ModelConfig.model_validate(schema)), key
    covered = {*SEMANTIC, *OPERATIONAL, *BY_SCHEMA, "kind"}
    assert covered == set(ModelConfig.model_fields)  # a new key must be put on one side


def test_built_models_are_what_the_plan_said():
    for settings in ({**BASE, "temperature": 0.3}, {"kind": "scripted", "checkpoint_id": "a"}):
        config = ModelConfig.model_validate(settings)
        assert build_model(config).identity() == model_identity(config)


def test_costs():
    prices = PriceConfig(prompt=2.0, completion=10.0)
    assert prices.cost(Usage(prompt_tokens=1_000_000, completion_tokens=100_000)) == pytest.approx(3.0)
    assert prices.cost(Usage()) == 0
