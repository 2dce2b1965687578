"""The judge stage: raw output kept, missing stays missing, resumable, blind to what it must not see."""

import asyncio
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import cohen_kappa_score

from jobs import cli
from jobs import judge as job_module
from jobs.judge import OUTPUTS, judge_run, read_outputs
from rayrl.errors import ConfigError, DataError, ModelTransportError, RunConflictError
from rayrl.export.conversation import ConversationOptions
from rayrl.judge.agreement import agreement, kappa_interval, quadratic_kappa, read_labels, score_summary
from rayrl.judge.rubric import DEFAULT_RUBRIC, TOOL_NAME, load_rubric
from rayrl.judge.stage import Judge, judge_job, parse_scores, transcript
from rayrl.schemas import ModelOutput, ProtocolError, ToolCall, Usage
from rayrl.testing.traces import TraceRecipe, make_record, write_run
from rayrl.traces.store import RunLock

IDS = [c.id for c in DEFAULT_RUBRIC.criteria]
RECIPE = TraceRecipe(experiment="j", tasks=12, failure_rate=0.0)


class FixedJudge:
    """A judge model whose scores are a function of the transcript; can fail on chosen calls."""

    def __init__(self, *, fail=(), scores=None, name="fixed"):
        self.calls, self.seen, self.fail, self.scores, self.name = 0, [], set(fail), scores, name

    def identity(self):
        return {"kind": "fixed", "name": self.name}

    async def generate(self, messages, tools, *, seed):
        self.calls += 1
        self.seen.append((messages, tools, seed))
        if self.calls in self.fail:
            raise ModelTransportError("gone", code="http_503", stage="model")
        scores = self.scores or dict.fromkeys(IDS, 1 + len(messages[1]["content"]) % 5)
        call = ToolCall(id="1", name=TOOL_NAME, arguments={**scores, "rationale": "because"})
        return ModelOutput(tool_calls=[call], content="thinking aloud", usage=Usage(prompt_tokens=5))

    async def aclose(self):
        pass


@pytest.fixture
def run_dir(tmp_path):
    write_run(tmp_path / "j", RECIPE)
    return tmp_path / "j"


def judge(run_dir, model, **kwargs):
    return asyncio.run(judge_run(str(run_dir), Judge(model, DEFAULT_RUBRIC), **kwargs))


def outputs(run_dir):
    return [json.loads(line) for line in (run_dir / OUTPUTS).read_text().splitlines()]


def test_every_completed_episode_is_judged_once_and_kept_raw(run_dir):
    assert judge(run_dir, FixedJudge()) == {"judged": 12, "failed": 0, "already": 0}
    made = outputs(run_dir)
    assert len({o["episode_id"] for o in made}) == 12
    one = made[0]
    assert one["rubric"] == {"name": DEFAULT_RUBRIC.name, "version": "1"}
    assert one["raw"]["tool_calls"][0]["arguments"]["rationale"] == one["rationale"] == "because"
    assert set(one["scores"]) == set(IDS)
    again = FixedJudge()
    assert judge(run_dir, again) == {"judged": 0, "failed": 0, "already": 12}
    assert again.calls == 0


def test_failed_calls_are_recorded_and_tried_again(run_dir):
    assert judge(run_dir, FixedJudge(fail={2, 5}))["failed"] == 2
    bad = [o for o in outputs(run_dir) if o["status"] == "failed"]
    assert bad[0]["scores"] is None
    assert bad[0]["error"]["code"] == "http_503"
    assert judge(run_dir, FixedJudge()) == {"judged": 2, "failed": 0, "already": 10}
    assert len(read_outputs(run_dir / OUTPUTS, DEFAULT_RUBRIC)) == 12


def test_a_torn_tail_does_no_harm(run_dir):
    judge(run_dir, FixedJudge(), limit=4)
    path = run_dir / OUTPUTS
    path.write_bytes(path.read_bytes()[:-30])
    assert judge(run_dir, FixedJudge()) == {"judged": 9, "failed": 0, "already": 3}
    assert len(read_outputs(path, DEFAULT_RUBRIC)) == 12


def test_another_judge_or_rubric_does_not_count_as_done(run_dir):
    judge(run_dir, FixedJudge())
    assert judge(run_dir, FixedJudge(name="other"))["judged"] == 12
    changed = DEFAULT_RUBRIC.model_copy(update={"version": "2"})
    counts = asyncio.run(judge_run(str(run_dir), Judge(FixedJudge(), changed)))
    assert counts["judged"] == 12
    with pytest.raises(DataError, match="no output of rubric"):
        read_outputs(run_dir / OUTPUTS, changed.model_copy(update={"version": "3"}))


def test_filters_limits_and_the_lock(run_dir):
    counts = judge(run_dir, FixedJudge(), text_filter="success", limit=2)
    assert counts["judged"] == 2
    with RunLock(run_dir / ".judge"), pytest.raises(RunConflictError):
        judge(run_dir, FixedJudge())


def test_seeds_depend_on_the_input_alone(run_dir):
    one, two = FixedJudge(), FixedJudge(name="b")
    judge(run_dir, one)
    judge(run_dir, two)
    assert [s for _, _, s in one.seen] == [s for _, _, s in two.seen]
    assert len({s for _, _, s in one.seen}) == 12


def test_the_judge_sees_the_public_transcript_only():
    record = make_record(RECIPE, 0, 0)
    text = json.dumps(judge_job(record, DEFAULT_RUBRIC, run="r").messages, ensure_ascii=False)
    assert "当前页面是" not in text  # reasoning
    assert "r_strict" not in text and "reward" not in text
    assert record["reset"]["instruction"][:10] in text
    long = transcript(record, ConversationOptions(), 1000)
    assert len(long) < 1100 and "characters cut" in long


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (None, "missing"),
        (9, "out_of_range"),
        (0, "out_of_range"),
        (2.5, "not_an_integer"),
        ("3", "not_an_integer"),
        (True, "not"),
    ],
)
def test_unusable_scores_stay_missing(value, problem):
    arguments = {**dict.fromkeys(IDS, 3), IDS[0]: value}
    output = ModelOutput(tool_calls=[ToolCall(id="1", name=TOOL_NAME, arguments=arguments)])
    scores, _, problems = parse_scores(output, DEFAULT_RUBRIC)
    assert scores[IDS[0]] is None
    assert [s for i, s in scores.items() if i != IDS[0]] == [3] * (len(IDS) - 1)
    assert problems[0].startswith(problem)


def test_protocol_errors_give_no_score():
    broken = ModelOutput(protocol_error=ProtocolError(code="no_tool_call", message="m"))
    scores, _, problems = parse_scores(broken, DEFAULT_RUBRIC)
    assert set(scores.values()) == {None}
    assert problems == ["protocol:no_tool_call"]
    assert parse_scores(ModelOutput(), DEFAULT_RUBRIC)[2] == ["no_scores_call"]


def test_missing_scores_are_counted_not_averaged(run_dir):
    judge(run_dir, FixedJudge(scores={**dict.fromkeys(IDS, 4), IDS[1]: None}))
    summary = score_summary(read_outputs(run_dir / OUTPUTS, DEFAULT_RUBRIC), DEFAULT_RUBRIC)
    assert summary["criteria"][IDS[1]] == {"missing": 12, "n": 0}
    assert summary["criteria"][IDS[0]]["mean"] == 4.0
    assert summary["problems"] == {f"missing:{IDS[1]}": 12}


def test_rubric_files_are_checked(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(
        "name: n\nversion: '1'\ninstructions: x\ncriteria: [{id: a, description: d, minimum: 3, maximum: 2}]\n"
    )
    with pytest.raises(ConfigError, match="minimum must be below maximum"):
        load_rubric(path)
    path.write_text("name: n\nversion: '1'\ninstructions: x\ncriteria: [{id: a, description: d}]\nextra: 1\n")
    with pytest.raises(ConfigError, match="extra"):
        load_rubric(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_rubric(tmp_path / "none.yaml")
    path.write_text("name: n\nversion: '1'\ninstructions: x\ncriteria: [{id: a, description: d}]\n")
    assert load_rubric(path).sha256() != DEFAULT_RUBRIC.sha256()


pairs = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=60)


@settings(max_examples=200, deadline=None)
@given(pairs)
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.UndefinedMetricWarning")
def test_quadratic_kappa_equals_scikit_learn(items):
    a, b = (np.array(x) for x in zip(*items, strict=True))
    expected = cohen_kappa_score(a, b, labels=range(5), weights="quadratic")
    found = quadratic_kappa(a, b, 5)
    if np.isnan(expected):
        assert np.isnan(found)
    else:
        assert found == pytest.approx(expected, abs=1e-9)


def test_kappa_interval_is_deterministic_and_holds_the_estimate():
    rng = np.random.default_rng(0)
    a = rng.integers(0, 5, 80)
    b = np.clip(a + rng.integers(-1, 2, 80), 0, 4)
    low, high = kappa_interval(a, b, 5)
    order = rng.permutation(80)
    assert kappa_interval(a[order], b[order], 5) == (low, high)
    assert low < quadratic_kappa(a, b, 5) < high
    assert kappa_interval(a[:3], b[:3], 5) is None


def test_agreement_with_human_labels(run_dir, tmp_path):
    judge(run_dir, FixedJudge())
    made = read_outputs(run_dir / OUTPUTS, DEFAULT_RUBRIC)
    path = tmp_path / "labels.jsonl"
    lines = [{"episode_id": o["episode_id"], "scores": {IDS[0]: o["scores"][IDS[0]], IDS[1]: None}} for o in made[:10]]
    path.write_text("\n".join(map(json.dumps, lines)))
    found = agreement(made, read_labels(path), DEFAULT_RUBRIC)
    first = found[IDS[0]]
    assert (first["n"], first["exact"], first["left_out"], first["mean_difference"]) == (10, 1.0, 0, 0.0)
    assert first["quadratic_kappa"] in (None, 1.0)
    assert found[IDS[1]] == {"n": 0, "left_out": 10}
    path.write_text('{"episode_id": "x"}\n')
    with pytest.raises(DataError, match=r"labels\.jsonl:1"):
        read_labels(path)


def test_the_command(run_dir, tmp_path, capsys, monkeypatch):
    config = tmp_path / "judge.yaml"
    config.write_text("model: {kind: scripted, name: j}\n")
    monkeypatch.setattr(job_module, "build_model", lambda _: FixedJudge(fail={1}))
    assert cli.main(["judge", str(run_dir), "--config", str(config), "--json"]) == 6
    assert json.loads(capsys.readouterr().out)["counts"] == {"judged": 11, "failed": 1, "already": 0}
    monkeypatch.setattr(job_module, "build_model", lambda _: FixedJudge())
    assert cli.main(["judge", str(run_dir), "--config", str(config)]) == 0
    assert "search_quality" in capsys.readouterr().out
