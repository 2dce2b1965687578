"""evaluate, compare, compact, report: from run directories to files, by both engines, through the command."""

import json
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from jobs import cli
from jobs.compare import compare_runs
from jobs.evaluate import choose_engine, evaluate
from rayrl.errors import DataError, UserError
from rayrl.evaluation.rows import EPISODE_ARROW
from rayrl.evaluation.sources import find_sources, read_rows
from rayrl.testing.traces import TraceRecipe, write_run

RECIPE = TraceRecipe(experiment="a", tasks=40, samples=2, failure_rate=0.1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "a", RECIPE, duplicates=0.1, v4_share=0.2, torn_tail=True)
    write_run(root / "b", replace(RECIPE, experiment="b", competence=1.5, checkpoint="synthetic-1"))
    write_run(root / "same", replace(RECIPE, experiment="same"))
    return root


def numbers(result):
    return json.dumps({k: v for k, v in result.items() if k not in ("read", "engine")}, sort_keys=True)


def test_auto_engine_rule(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    gigabyte = 10**9
    for cpus, first in ((1, None), (2, 5.3), (8, 1.9)):
        monkeypatch.setattr("os.cpu_count", lambda cpus=cpus: cpus)
        assert choose_engine("auto", 0) == "local"
        if first is None:
            assert choose_engine("auto", 10**15) == "local"
        else:
            assert choose_engine("auto", int(first * gigabyte)) == "ray"
            assert choose_engine("auto", int(0.9 * first * gigabyte)) == "local"
    assert choose_engine("auto", gigabyte, address="ray://x") == "ray"
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert choose_engine("auto", gigabyte) == "ray"
    assert choose_engine("auto", gigabyte // 4) == "local"
    assert choose_engine("ray", 1) == "ray"


@pytest.mark.ray
@pytest.mark.slow
def test_ray_and_local_give_identical_numbers(runs, tmp_path):
    places = [str(runs / "a"), str(runs / "b")]
    local = evaluate(places, engine="local", labels=True, steps=True, out=tmp_path / "local")
    ray = evaluate(places, engine="ray", labels=True, steps=True, out=tmp_path / "ray", chunk_bytes=300_007)
    assert (local["engine"], ray["engine"]) == ("local", "ray")
    assert numbers(local) == numbers(ray)
    for name in ("episodes.parquet", "steps.parquet"):
        one, two = pq.read_table(tmp_path / "local" / name), pq.read_table(tmp_path / "ray" / name)
        assert one.equals(two)
    labels = [(tmp_path / engine / "episode_labels.jsonl").read_bytes() for engine in ("local", "ray")]
    assert labels[0] == labels[1]


def test_outputs_of_evaluate(runs, tmp_path):
    result = evaluate([str(runs / "a")], engine="local", labels=True, out=tmp_path / "out")
    summary = result["runs"]["a"]
    assert summary["coverage"]["expected"] == 80
    assert summary["coverage"]["duplicates"] > 0
    assert result["unusable_lines"] == {"malformed": 0, "torn": 1, "foreign": 0}
    table = pq.read_table(tmp_path / "out" / "episodes.parquet")
    assert table.schema.equals(EPISODE_ARROW)
    assert table["instruction"].null_count < table.num_rows
    lines = (tmp_path / "out" / "episode_labels.jsonl").read_text().splitlines()
    assert len(lines) == summary["coverage"]["completed"] == result["diagnosis"]["episodes"]
    assert json.loads((tmp_path / "out" / "diagnosis.json").read_text())["tool_calls"]["cases"] > 0
    assert not list((tmp_path / "out").glob(".*"))


def test_private_goals_can_be_left_alone(runs):
    assert evaluate([str(runs / "a")], engine="local", labels=True, private=False)["diagnosis"]["goal_known"] == 0


def test_known_calls_from_a_file(runs, tmp_path):
    calls = tmp_path / "calls.jsonl"
    calls.write_text('{"task_id": 0, "step": 0, "name": "search", "arguments": {"query": "x"}}\n')
    found = evaluate([str(runs / "a")], engine="local", calls=calls)["diagnosis"]["tool_calls"]
    assert found["cases"] == 2  # two samples of the task


def test_steps_need_a_place(runs):
    with pytest.raises(DataError, match="--steps needs --out"):
        evaluate([str(runs / "a")], engine="local", steps=True)


def test_compare_finds_refuses_and_stays_calm(runs):
    a, b, same = (str(runs / name) for name in ("a", "b", "same"))
    with pytest.raises(UserError, match=r"model\.checkpoint_id: synthetic-0 in a, synthetic-1 in b"):
        compare_runs([a, b])
    found = compare_runs([a, b, same], may_differ=["model"], private=True)
    assert "b is better than a" in found[0]["sentence"]
    assert "No difference" in found[1]["sentence"]
    assert [d[0] for d in found[0]["manifest_differences"]] == ["model.checkpoint_id", "model.competence"]
    assert found[1]["manifest_differences"] == []
    assert all(name.startswith("家居") for name in found[0]["by_category"])
    with pytest.raises(UserError, match="at least two runs"):
        compare_runs([a])


def test_the_command_prints_one_json_object(runs, tmp_path, capsys):
    a, b = str(runs / "a"), str(runs / "b")
    assert cli.main(["evaluate", a, "--engine", "local", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"]["a"]["schema"] == "rayrl-summary-v1"
    assert cli.main(["compare", a, b, "--json"]) == 2
    assert "model.checkpoint_id" in json.loads(capsys.readouterr().out)["error"]["message"]
    out = tmp_path / "cmp"
    assert cli.main(["compare", a, b, "--may-differ", "model", "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["comparisons"][0]["pairing"]["pairs"] > 0
    assert {p.name for p in out.iterdir()} == {"comparison.json", "comparison.md", "comparison.html"}
    assert cli.main(["report", a, "--out", str(tmp_path), "--json"]) == 0
    page = (tmp_path / "a.html").read_text()
    assert json.loads(capsys.readouterr().out)["reports"] == [str(tmp_path / "a.html")]
    assert "<svg" in page and "http" not in page.replace("http://www.w3.org", "")
    assert "1 torn" in page


def test_people_get_tables(runs, capsys):
    assert cli.main(["evaluate", str(runs / "a"), "--labels", "--engine", "local"]) == 0
    out = capsys.readouterr().out
    assert out.index("Coverage") < out.index("Failed episodes by class") < out.index("Scores")
    assert "1 torn" in out
    assert cli.main(["compare", str(runs / "a"), str(runs / "b"), "--may-differ", "model"]) == 0
    assert "b is better than a" in capsys.readouterr().out


def test_memory_stays_flat_over_a_growing_file(tmp_path):
    """The rows kept grow by some hundred bytes an episode, never by the size of its trace."""
    import tracemalloc

    sizes = []
    for tasks in (50, 800):
        run = tmp_path / str(tasks)
        write_run(run, replace(RECIPE, tasks=tasks, samples=1))
        sources = find_sources([str(run)])
        tracemalloc.start()
        assert read_rows(sources, chunk_bytes=1_000_000).num_rows >= tasks
        sizes.append((tracemalloc.get_traced_memory()[1], (run / "traces.jsonl").stat().st_size))
        tracemalloc.stop()
    (small, small_bytes), (large, large_bytes) = sizes
    assert large_bytes - small_bytes > 10e6
    assert large - small < 3e6


def test_compact_verifies_and_finds_damage(runs, tmp_path, capsys):
    target = tmp_path / "t.parquet"
    assert cli.main(["traces", "compact", str(runs / "b"), "--out", str(target), "--verify", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["verified"] and report["mismatches"] == []
    assert cli.main(["traces", "compact", str(runs / "b"), "--out", str(target), "--only-verify"]) == 0
    assert "verified" in capsys.readouterr().out
    assert cli.main(["traces", "compact", str(runs / "a"), "--out", str(target), "--only-verify"]) == 2
    assert "does not hold" in capsys.readouterr().err
    assert cli.main(["traces", "compact", str(runs / "a"), "--out", str(tmp_path / "no"), "--only-verify"]) == 2
