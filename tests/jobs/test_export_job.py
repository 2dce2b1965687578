"""`rayrl export`: files that training code can load, reports that say what is in them."""

import json

import pytest

from jobs import cli
from jobs.export import ExportSettings, export
from rayrl.errors import UserError
from rayrl.export.slime import record_from_sample
from rayrl.testing.traces import TraceRecipe, write_run
from rayrl.traces.store import RunReader

RECIPE = TraceRecipe(experiment="x", tasks=30, samples=3, failure_rate=0.1)

TEMPLATE = """{%- if tools %}<tools>
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}
{%- for m in messages %}{{ '<' + m.role + '>' }}
{%- if m.role == 'tool' and not m.tool_call_id %}{{ raise_exception('a tool answer without its call') }}{% endif %}
{{- m.content or '' }}
{%- for call in m.tool_calls or [] %}{{ '<call>' + call.function.name + ' ' + call.function.arguments }}{% endfor %}
{%- endfor %}"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "x"
    write_run(path, RECIPE, duplicates=0.2, v4_share=0.1, torn_tail=True)
    return path


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_sft_takes_successes_once_and_reports(run_dir, tmp_path):
    out = tmp_path / "sft.jsonl"
    report = export([str(run_dir)], out, ExportSettings(to="sft"))
    records = lines(out)
    expected = {
        r["episode_id"]
        for r in RunReader(run_dir).results()
        if r["status"] == "completed" and r["final"]["reward_detail"]["r_success"] == 1
    }
    names = [r["episode_id"] for r in records]
    assert len(names) == len(set(names)) == report["records"]
    assert expected <= set(names)  # the store reader does not read the other schema
    assert all(r["reward"] == 1.0 for r in records)
    quality = json.loads((tmp_path / "sft.jsonl.report.json").read_text())["quality"]
    assert quality["episodes"] == len(records)
    assert quality["coverage"]["tasks_expected"] == 30
    assert quality["coverage"]["tasks"] == len({r["task_id"] for r in records})
    assert set(quality["rules"]) <= {*quality["rules"]} and quality["lengths"]["messages"]["max"] > 3


def test_filters_and_distinct(run_dir, tmp_path):
    text = "completed and reward_detail.r_success == 1 and steps <= 8"
    out = tmp_path / "s.jsonl"
    export([str(run_dir)], out, ExportSettings(to="sft", filter=text, distinct=True))
    short = lines(out)
    assert short
    assert all(sum(m["role"] == "assistant" for m in r["messages"]) <= 8 for r in short)
    behaviours = [json.dumps([m.get("tool_calls", [{}])[0].get("function") for m in r["messages"]]) for r in short]
    assert len({(r["task_id"], b) for r, b in zip(short, behaviours, strict=True)}) == len(short)
    with pytest.raises(UserError, match="nothing to export"):
        export([str(run_dir)], tmp_path / "none.jsonl", ExportSettings(to="sft", filter="reward > 5"))
    assert not (tmp_path / "none.jsonl").exists()


def test_exports_load_with_datasets_and_templates_accept_every_record(run_dir, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    plain = Tokenizer(BPE({c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))}, []))
    plain.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, chat_template=TEMPLATE)
    for unit in ("episode", "step"):
        out = tmp_path / f"{unit}.jsonl"
        export([str(run_dir)], out, ExportSettings(to="sft", unit=unit))
        data = datasets.load_dataset("json", data_files=str(out), split="train", cache_dir=str(tmp_path / "cache"))
        originals = lines(out)
        assert len(data) == len(originals)
        for loaded, original in zip(data, originals, strict=True):
            tools = json.loads(loaded["tools"])
            assert tools == json.loads(original["tools"])
            messages = loaded["messages"] if unit == "episode" else loaded["prompt"] + loaded["completion"]
            text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
            assert text.count("<call>") == sum(bool(m.get("tool_calls")) for m in messages) > 0
            assert "search" in text
    ids = tokenizer.apply_chat_template(messages, tools=tools, tokenize=True)
    assert len(ids) > 0


def test_groups_and_pairs(run_dir, tmp_path):
    report = export([str(run_dir)], tmp_path / "g.jsonl", ExportSettings(to="grpo"))
    groups = lines(tmp_path / "g.jsonl")
    counts = report["dynamic_sampling"]
    assert counts["groups"] == 30
    assert counts["kept"] == len(groups) == report["records"]
    for group in groups:
        rewards = [s["reward"] for s in group["samples"]]
        assert max(rewards) > min(rewards)
        assert sum(group["training"]["advantages"]) == pytest.approx(0, abs=1e-9)
        assert "price_upper" not in json.dumps(group["samples"])
    export([str(run_dir)], tmp_path / "d.jsonl", ExportSettings(to="dpo"))
    assert len(lines(tmp_path / "d.jsonl")) == len(groups)
    with pytest.raises(UserError, match="starved"):
        export([str(run_dir)], tmp_path / "none.jsonl", ExportSettings(to="grpo", min_groups=31))
    assert not (tmp_path / "none.jsonl").exists()


def test_slime_files(run_dir, tmp_path):
    report = export([str(run_dir)], tmp_path / "s.jsonl", ExportSettings(to="slime", reasoning=True, persona=True))
    samples = lines(tmp_path / "s.jsonl")
    assert report["samples"]["without_tokens"] == len(samples) == 90
    ours = {r["episode_id"]: r for r in RunReader(run_dir).results()}
    for sample in samples:
        record = record_from_sample(sample)
        if record.get("schema") and record["episode_id"] in ours and record["status"] == "completed":
            assert record == ours[record["episode_id"]]
    assert len({s["group_index"] for s in samples}) == 30
    export([str(run_dir)], tmp_path / "r.jsonl", ExportSettings(to="slime-requests"))
    assert len(lines(tmp_path / "r.jsonl")) == 90


def test_nothing_private_unless_asked(run_dir, tmp_path):
    goals = [json.loads(line)["goal"] for line in (run_dir / "private.jsonl").read_text().splitlines()]
    for to in ("sft", "grpo", "dpo", "slime"):
        out = tmp_path / f"{to}.jsonl"
        export([str(run_dir)], out, ExportSettings(to=to))
        text = out.read_text()
        assert "reasoning" not in text
        assert "年龄段" not in text  # a persona key
        assert "goal_options" not in text
    assert goals


def test_the_command(run_dir, tmp_path, capsys):
    out = str(tmp_path / "o.jsonl")
    assert cli.main(["export", str(run_dir), "--to", "sft", "--out", out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["carries"] == {
        "reasoning": False,
        "persona": False,
        "protocol_errors": False,
        "private_goal": False,
    }
    assert cli.main(["export", str(run_dir), "--to", "sft", "--out", out, "--filter", "steps <"]) == 2
    assert "not understood" in capsys.readouterr().err
    assert cli.main(["export", str(run_dir), "--to", "grpo", "--out", out]) == 0
    assert "effective samples" in capsys.readouterr().out
