"""A planted key must not be found anywhere but in the request's own header."""

from __future__ import annotations

import logging
import pickle
import traceback
from collections.abc import Iterator

import pytest

from rayrl.errors import ConfigError, ModelTransportError
from rayrl.models.config import ModelConfig
from rayrl.models.http_transport import ApiKey
from rayrl.models.openai_http import OpenAIChatModel
from rayrl.models.registry import build_model, model_identity
from tests.models.conftest import FAST, IMPATIENT, MESSAGES, SEARCH

KEY = "sk-planted-0123456789-secret"


@pytest.fixture(autouse=True)
def planted(monkeypatch):
    monkeypatch.setenv("PLANTED_KEY", KEY)


def chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@pytest.mark.parametrize(
    "behaviour",
    [
        "ok",
        "401",
        "500",
        "429:0.01",
        "echo_key",
        "echo_key_500",
        "echo_key_200",
        "reset",
        "never",
        "cut_body",
        "not_json",
    ],
)
async def test_the_key_goes_nowhere_but_into_the_header(mock, make, caplog, capsys, behaviour):
    caplog.set_level(logging.DEBUG)
    mock.default = behaviour
    events: list[object] = []
    timeouts = IMPATIENT if behaviour == "never" else FAST["timeouts"]
    model: OpenAIChatModel = make(
        api_key_env="PLANTED_KEY", timeouts=timeouts, on_event=lambda *event: events.append(event)
    )
    seen: list[object] = [events, model, vars(model)]
    try:
        seen.append((await model.generate(MESSAGES, [SEARCH], seed=1)).model_dump_json())
    except ModelTransportError as error:
        seen.append(error.detail)
        seen.append(pickle.dumps(error))
        seen.append("".join(traceback.format_exception(error)))
        for link in chain(error):
            seen += [repr(link), str(link), link.args, getattr(link, "detail", None)]
            request = getattr(link, "_request", None)
            seen += [repr(request), repr(getattr(request, "headers", None))]
            # what tools with "show locals" would print
            for frame, _ in traceback.walk_tb(link.__traceback__):
                if "rayrl/models" in frame.f_code.co_filename:
                    seen.append({name: repr(value) for name, value in frame.f_locals.items()})
    assert mock.last_authorization == f"Bearer {KEY}"
    out = capsys.readouterr()
    seen += [caplog.text, out.out, out.err, model.identity(), model.stats()]
    assert KEY not in repr(seen)
    if behaviour == "echo_key":
        assert "***" in repr(seen)


def test_the_key_is_not_in_identity_config_or_pickles():
    config = ModelConfig.model_validate({"base_url": "http://127.0.0.1:1/v1", "api_key_env": "PLANTED_KEY", **FAST})
    model = build_model(config)
    for value in (
        config.model_dump(),
        model_identity(config),
        model.identity(),
        repr(model),
        repr(ApiKey.from_env("PLANTED_KEY")),
    ):
        assert KEY not in str(value)
    assert "PLANTED_KEY" not in str(model_identity(config)) and "127.0.0.1" not in str(model_identity(config))
    with pytest.raises(TypeError):
        pickle.dumps(ApiKey.from_env("PLANTED_KEY"))


@pytest.mark.parametrize(
    "settings",
    [
        {"api_key_env": KEY},
        {"base_url": f"http://user:{KEY}@host/v1"},
        {"base_url": f"http://host/v1?api_key={KEY}"},
        {"extra_body": {"api_key": KEY}},
        {"options": {"Authorization": KEY}},
    ],
)
def test_a_key_typed_into_the_config_is_refused_and_not_repeated(settings):
    from rayrl.config import parse_config

    with pytest.raises(ConfigError) as caught:
        parse_config({"base_url": "http://host/v1", **settings}, ModelConfig, source="test.yaml")
    assert KEY not in str(caught.value) and "test.yaml" in str(caught.value)


def test_a_key_that_no_header_can_carry(monkeypatch):
    monkeypatch.setenv("ODD_KEY", "ключ")
    with pytest.raises(ConfigError, match="ODD_KEY") as caught:
        ApiKey.from_env("ODD_KEY")
    assert "ключ" not in str(caught.value)
