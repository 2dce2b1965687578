"""Answer-and-judge: the shipped config, and a chat model as a plain function."""

import orjson
import pytest

from jobs.gate_answers import SCORE_TOOL, AnswersConfig, as_completion
from rayrl.config import configs_root, load_config
from rayrl.errors import ModelTransportError
from rayrl.retrieval.answers import parse_scores
from rayrl.schemas import ModelOutput, ToolCall

SCORES = {"relevance": 8, "accuracy": 6.5, "completeness": 7, "depth": 5}


class Model:
    """Says what it was told to say, and keeps what it was asked."""

    def __init__(self, output):
        self.output, self.asked = output, []

    def identity(self):
        return {"kind": "test"}

    async def generate(self, messages, tools, *, seed):
        self.asked.append((messages, tools))
        return self.output

    async def aclose(self):
        pass


def said(output, tool=None):
    model = Model(output)
    complete, close = as_completion(model, tool)
    try:
        return complete("Why?"), model.asked
    finally:
        close()


@pytest.mark.parametrize("path", sorted((configs_root() / "answers").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_configs_parse(path):
    assert load_config(path, AnswersConfig).items >= 20


def test_answers_are_plain_text_and_scores_a_call():
    text, asked = said(ModelOutput(content="Because."))
    assert text == "Because." and asked == [([{"role": "user", "content": "Why?"}], [])]
    reply, asked = said(ModelOutput(tool_calls=[ToolCall(id="c", name="score", arguments=SCORES)]), SCORE_TOOL)
    assert orjson.loads(reply) == SCORES
    assert asked[0][1] == [SCORE_TOOL]
    assert parse_scores(reply) == {k: float(v) for k, v in SCORES.items()}


def test_a_judge_that_writes_instead_of_calling_is_read_and_silence_is_a_failed_call():
    reply, _ = said(ModelOutput(content='{"tool": "score", "arguments": {"relevance": 11}}'), SCORE_TOOL)
    assert parse_scores(reply) is None
    with pytest.raises(ModelTransportError, match="neither a call nor text"):
        said(ModelOutput())
