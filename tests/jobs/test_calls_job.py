"""`rayrl export --to calls` and the accuracy of a model on such a set."""

import asyncio
import json

import pytest

from jobs import calls as module
from jobs.calls import run_set
from jobs.command import command_main
from jobs.export import ExportSettings, export
from rayrl.errors import DataError, ModelTransportError
from rayrl.evaluation.tool_calls import call_accuracy
from rayrl.export.calls import read_cases
from rayrl.schemas import ModelOutput, ProtocolError, ToolCall
from rayrl.testing.traces import TraceRecipe, write_run


@pytest.fixture(scope="module")
def call_set(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calls")
    write_run(folder / "run", TraceRecipe(tasks=30, failure_rate=0.0))
    export([str(folder / "run")], folder / "set.jsonl", ExportSettings(to="calls"))
    return folder / "set.jsonl"


class Clicker:
    """Clicks a fixed way; fails or babbles on chosen calls."""

    def __init__(self, choose, *, fail=(), babble=()):
        self.choose, self.fail, self.babble, self.n = choose, fail, babble, 0

    async def generate(self, messages, tools, *, seed):
        self.n += 1
        if self.n in self.fail:
            raise ModelTransportError("gone", code="http_503", stage="model")
        if self.n in self.babble:
            return ModelOutput(protocol_error=ProtocolError(code="no_tool_call", message="m"))
        value = self.choose(tools[0]["function"]["parameters"]["properties"]["value"]["enum"])
        return ModelOutput(tool_calls=[ToolCall(id="1", name="click", arguments={"value": value})])

    async def aclose(self):
        pass


def ask(model, path):
    return asyncio.run(run_set(model, read_cases(path), concurrency=1))


def test_cases_hold_what_the_policy_saw_and_one_legal_right_call(call_set):
    cases = read_cases(call_set)
    assert len(cases) > 20
    for _, messages, tools, expected in cases:
        assert messages[0]["role"] == "system"
        assert messages[-1]["role"] == "tool"
        enum = tools[0]["function"]["parameters"]["properties"]["value"]["enum"]
        assert expected.arguments["value"] in enum


def test_accuracy_of_models(call_set):
    buy = ask(Clicker(lambda enum: "buy now"), call_set)[0]
    found = call_accuracy(buy)
    assert found["tool_choice"]["rate"] == 1.0
    rights = sum(c.expected.arguments["value"] == "buy now" for c in buy)
    assert found["by_argument"]["click.value"]["right"] == rights > 0
    answered, lines = ask(Clicker(lambda enum: enum[-1], fail={2}, babble={3}), call_set)
    assert len(answered) == len(lines) - 1
    assert lines[1]["error"]["code"] == "http_503"
    assert lines[2]["problem"] == "no_tool_call"
    assert call_accuracy(answered)["confusion"] == [{"expected": "click", "actual": "(none)", "n": 1}]


def test_bad_sets_are_named(tmp_path):
    path = tmp_path / "s.jsonl"
    path.write_text('{"messages": [], "tools": "[]", "expected": {"name": "x", "arguments": "{}"}}\n{"messages": 1}\n')
    with pytest.raises(DataError, match=r"s\.jsonl:2"):
        read_cases(path)
    path.write_text("\n")
    with pytest.raises(DataError, match="holds no cases"):
        read_cases(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_cases(tmp_path / "none")


def test_the_command(call_set, tmp_path, capsys, monkeypatch):
    config = tmp_path / "m.yaml"
    config.write_text("model: {kind: scripted, name: j}\n")
    monkeypatch.setattr(module, "build_model", lambda _: Clicker(lambda enum: enum[-1]))
    args = [str(call_set), "--config", str(config), "--out", str(tmp_path / "o.jsonl")]
    assert command_main("calls", module.add_arguments, module.run, [*args, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["failed"] == 0
    assert len((tmp_path / "o.jsonl").read_text().splitlines()) == result["cases"]
    assert command_main("calls", module.add_arguments, module.run, args) == 0
    assert "argument click.value" in capsys.readouterr().out
