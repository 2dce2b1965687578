"""The whole road from real traces: two levels of the scripted shopper on a real shop server."""

import json

import pytest

from jobs import cli


def json_of(capsys, *argv):
    code = cli.main([*argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture
def roll_out(shop_run, capsys, monkeypatch):
    # the token opens the server's private side, so that goals are recorded beside the traces
    monkeypatch.setenv("SHOP_TEST_TOKEN", "admin-of-the-tests")

    def go(name, level):
        config = shop_run(
            f"{name}.yaml",
            experiment__name=name,
            environment__admin_token_env="SHOP_TEST_TOKEN",
            model__scripted__level=level,
            tasks__sample_size=28,
            tasks__repeats=2,
        )
        code, result = json_of(capsys, "run", str(config))
        assert code == 0, result
        return result["run_dir"]

    return go


def test_from_rollouts_to_evidence(roll_out, capsys, tmp_path):
    naive, again, competent = roll_out("naive", "naive"), roll_out("again", "naive"), roll_out("competent", "competent")

    code, refused = json_of(capsys, "compare", naive, competent)
    assert code == 2
    assert "model.config.level: naive in naive, competent in competent" in refused["error"]["message"]

    code, found = json_of(capsys, "compare", naive, competent, "--may-differ", "model", "--private")
    assert code == 0
    [result] = found["comparisons"]
    assert result["sentence"].startswith("competent is better than naive on reward")
    assert result["pairing"]["pairs"] == 56
    assert len(result["by_category"]) > 1

    code, same = json_of(capsys, "compare", naive, again)
    assert code == 0
    [result] = same["comparisons"]
    assert result["sentence"].startswith("naive and again cannot be told apart")
    assert result["metrics"]["reward"]["difference"]["mean"] == 0

    code, evaluated = json_of(capsys, "evaluate", naive, competent, "--labels", "--steps", "--out", str(tmp_path / "e"))
    assert code == 0
    runs = evaluated["runs"]
    assert runs["competent"]["metrics"]["r_success"]["mean"] > runs["naive"]["metrics"]["r_success"]["mean"]
    assert set(runs["naive"]["pass_at_k"]) == {"1", "2"}
    assert evaluated["diagnosis"]["goal_known"] == 112
    summarized = json_of(capsys, "summarize", naive)[1]
    assert summarized["metrics"] == runs["naive"]["metrics"]

    assert json_of(capsys, "report", naive, "--out", str(tmp_path))[0] == 0
    assert "scripted shopper, not a language model" in (tmp_path / "naive.html").read_text()

    for to in ("sft", "grpo", "dpo", "slime", "slime-requests", "calls"):
        code, report = json_of(capsys, "export", naive, "--to", to, "--out", str(tmp_path / f"{to}.jsonl"))
        assert code == 0, (to, report)
    text = (tmp_path / "sft.jsonl").read_text()
    assert "Persona" not in text and "用户ID" not in text

    assert cli.main(["traces", "compact", naive, "--verify"]) == 0
