from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import orjson
import pytest

from jobs import skill_runs, validate_skills
from jobs.gate_plan import plan_gate
from jobs.skills import add_arguments as skills_arguments
from jobs.train_selector import gate_pairs
from jobs.validate_skills import CONTRIBUTIONS, LEDGER, MANIFEST, SELECTED, Gate, load_gate
from rayrl.config import configs_root
from rayrl.errors import ConfigError, DataError, RunIncompleteError, UserError
from rayrl.skills.bank import load_snapshot
from rayrl.skills.estimators import fit_cluster
from rayrl.skills.validation import check_bare_manifest, read_arm
from tests.jobs.skills_support import TEXTS, write_bank, write_gate, write_shop

SINGLE = {"design": "bare", "stages": [1.0], "spending": [1.0]}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gate")
    write_shop(folder)
    write_bank(folder)
    return folder


def gate_of(folder: Path, out: Path, overrides=(), **changes) -> Gate:
    config, run, base = load_gate(str(write_gate(folder, **changes)), list(overrides))
    return Gate(config, run, base, out)


@pytest.fixture(scope="module")
def finished(shop: Path) -> Path:
    out = shop / "finished"
    gate_of(shop, out, rule={"fdr": 0.2}).run()
    return out


@pytest.fixture(scope="module")
def bare_gate(shop: Path) -> Path:
    out = shop / "bare-gate"
    gate_of(shop, out, rule=SINGLE, confirm_split=None).run()
    return out


def test_a_gate_leaves_evidence_a_bank_and_a_ledger(finished: Path):
    gate = json.loads((finished / MANIFEST).read_text())
    report = json.loads((finished / CONTRIBUTIONS).read_text())
    assert gate["status"] == "complete" and gate["checkpoint_id"] == "weights-1"
    assert [r["skill_id"] for r in report["contributions"]] == list(TEXTS)
    for row in report["contributions"]:
        for interval in ("interval", "interval_hc3", "interval_bootstrap", "interval_adjusted"):
            low, high = row[interval]
            assert low <= row["effect"] + 0.05 and high >= row["effect"] - 0.05 and low < high
    assert {"reward", "r_success", "total_actions"} <= set(report["metrics"])
    assert report["looks"][-1]["open"] == [] or len(report["looks"]) == 3
    for arm in report["arms"]:
        assert -1 <= arm["correlation"] <= 1
        assert set(arm["correlations"]) == set(report["metrics"])
        low, high = arm["correlations"]["reward"]["interval"]
        assert low < arm["correlation"] < high
    bank = load_snapshot(finished / SELECTED)
    assert [s.skill_id for s in bank.skills] == gate["selected"]
    assert all(bank.record(s.skill_id).gate.checkpoint_id == "weights-1" for s in bank.skills)
    lines = [orjson.loads(line) for line in (finished / LEDGER).read_bytes().splitlines()]
    assert [line["skill_id"] for line in lines] == list(TEXTS)


def test_running_it_again_plays_nothing_and_changes_nothing(shop: Path, finished: Path, monkeypatch):
    before = {name: (finished / name).read_bytes() for name in (CONTRIBUTIONS, SELECTED, LEDGER, MANIFEST)}
    played = []
    real = skill_runs.run_rollout
    monkeypatch.setattr(skill_runs, "run_rollout", lambda e, **k: played.append(r := real(e, **k)) or r)
    gate_of(shop, finished, rule={"fdr": 0.2}).run()
    assert sum(r.ran_now for r in played) == 0
    assert before == {name: (finished / name).read_bytes() for name in before}


def test_bare_and_masked_pairs_give_the_textbook_estimate(bare_gate: Path):
    runs = bare_gate / "runs"
    rows = {}
    for arm in ("masked", "bare"):
        for line in (runs / f"g-s0-{arm}" / "traces.jsonl").read_bytes().splitlines():
            record = orjson.loads(line)
            key = record["job"]["task_id"]
            ids = {s["skill_id"] for s in record["selected_skills"]}
            rows.setdefault(key, {})[arm] = (record["final"]["reward"], ids, record["job"]["seed"])
    x = np.array([[float(n in r["masked"][1]) for n in TEXTS] for r in rows.values()])
    y = np.array([r["masked"][0] - r["bare"][0] for r in rows.values()])
    assert all(r["masked"][2] == r["bare"][2] and not r["bare"][1] for r in rows.values())  # common random numbers
    expected = fit_cluster(x, y, list(rows), list(TEXTS))
    report = json.loads((bare_gate / CONTRIBUTIONS).read_text())
    assert [r["effect"] for r in report["contributions"]] == pytest.approx(list(expected.beta), abs=1e-12)
    assert [r["standard_error"] for r in report["contributions"]] == pytest.approx(list(expected.se), abs=1e-12)


@pytest.mark.slow
def test_a_finished_bare_run_is_reused_as_second_or_third_arm(shop: Path, bare_gate: Path, tmp_path: Path):
    bare = str(bare_gate / "runs" / "g-s0-bare")
    again = gate_of(shop, tmp_path / "a", rule=SINGLE, confirm_split=None, bare_run_dir=bare).run()
    assert not (tmp_path / "a" / "runs" / "g-s0-bare").exists()
    first = json.loads((bare_gate / CONTRIBUTIONS).read_text())["contributions"]
    second = json.loads((tmp_path / "a" / CONTRIBUTIONS).read_text())["contributions"]
    assert first == second and again["status"] == "complete"
    three = {"stages": [1.0], "spending": [1.0]}
    gate_of(shop, tmp_path / "b", rule=three, confirm_split=None, bare_run_dir=bare).run()
    assert len(json.loads((tmp_path / "b" / CONTRIBUTIONS).read_text())["arms"][0]["mean_rewards"]) == 3


@pytest.mark.parametrize(
    ("path", "value", "word"),
    [
        (("model", "checkpoint_id"), "weights-2", "model.checkpoint_id"),
        (("model", "name"), "another", "model.name"),
        (("prompt", "sha256"), "0" * 64, "prompt.sha256"),
        (("environment", "catalogue_sha256"), "0" * 64, "environment.catalogue_sha256"),
        (("limits", "max_actions"), 3, "limits.max_actions"),
        (("skills",), {"kind": "bank"}, "has skills"),
        (("trace_schema",), "other", "trace_schema"),
        (("jobs",), [], "are not in it"),
        (("jobs", 0, 2), 1, "another seed or split"),
    ],
)
def test_each_unfit_bare_run_is_refused_by_name(shop: Path, bare_gate: Path, tmp_path: Path, path, value, word):
    folder = tmp_path / "bare"
    shutil.copytree(bare_gate / "runs" / "g-s0-bare", folder)
    masked = json.loads((bare_gate / "runs" / "g-s0-masked" / "manifest.json").read_text())["semantic"]
    jobs = gate_of(shop, tmp_path / "x", rule=SINGLE).plan.stages[0]
    check_bare_manifest(folder, masked, jobs)
    manifest = json.loads((folder / "manifest.json").read_text())
    target = manifest["semantic"]
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=word):
        check_bare_manifest(folder, masked, jobs)
    (folder / "manifest.json").unlink()
    with pytest.raises(UserError, match="no manifest"):
        check_bare_manifest(folder, masked, jobs)


def test_records_that_are_not_what_was_assigned_are_refused(shop: Path, bare_gate: Path, tmp_path: Path):
    gate = gate_of(shop, tmp_path / "x", rule=SINGLE)
    jobs = gate.plan.stages[0]
    assigned = validate_skills.assignments(gate.config, gate.plan.entries, None)[0]
    source = bare_gate / "runs" / "g-s0-masked"
    lines = (source / "traces.jsonl").read_bytes().splitlines()
    read_arm(source, jobs, assigned)
    with_skill = next(i for i, line in enumerate(lines) if orjson.loads(line)["selected_skills"])

    def broken(change) -> Path:
        folder = tmp_path / "broken"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        records = [orjson.loads(line) for line in lines]
        change(records)
        (folder / "traces.jsonl").write_bytes(b"".join(orjson.dumps(r) + b"\n" for r in records))
        return folder

    def no_skills(records):
        records[with_skill]["selected_skills"] = []

    def other_text(records):
        records[with_skill]["selected_skills"][0]["content_sha256"] = "0" * 64

    def twice(records):
        records.append(records[0])

    def missing(records):
        del records[0]

    def no_number(records):
        records[0]["final"]["reward_detail"]["r_att"] = 1e999

    def no_reward(records):
        records[0]["final"]["reward"] = None

    def seed(records):
        records[0]["job"]["seed"] += 1

    for change, word in (
        (no_skills, "was assigned"),
        (other_text, "was assigned"),
        (twice, "more than one completed"),
        (missing, "no completed record"),
        (no_reward, "reward is None"),
        (seed, "another seed"),
    ):
        with pytest.raises(DataError, match=word):
            read_arm(broken(change), jobs, assigned)
    text = (source / "traces.jsonl").read_text().splitlines()
    text[0] = text[0].replace('"r_att":', '"r_att":null,"r_x":', 1)
    (tmp_path / "broken" / "traces.jsonl").write_text("\n".join(text) + "\n")
    read_arm(tmp_path / "broken", jobs, assigned)  # a component that is absent is absent, not a number


def test_what_cannot_work_is_refused_before_anything_is_played(shop: Path, tmp_path: Path):
    def plan(overrides=(), **changes):
        config, run, base = load_gate(str(write_gate(shop, **changes)), list(overrides))
        return plan_gate(config, run, base)

    with pytest.raises(ConfigError, match="checkpoint_id"):
        plan(overrides=["overrides=[model.checkpoint_id=null]"])
    with pytest.raises(UserError, match="sees effects from"):
        plan(min_effect=0.01)
    with pytest.raises(ConfigError, match="role test"):
        plan(split="test")
    with pytest.raises(ConfigError, match="same tasks"):
        plan(confirm_split="gate")
    with pytest.raises(DataError, match=r"cannot tell|says nothing"):
        plan(tasks=3)
    empty = tmp_path / "empty"
    empty.mkdir()
    write_bank(empty, {"only": "x"})
    bank = json.loads((empty / "bank.json").read_text())
    bank.pop("snapshot_sha256")
    bank["records"] = {"only": {"review": {"status": "rejected"}}}
    (empty / "bank.json").write_text(json.dumps(bank))
    with pytest.raises(UserError, match="no active skill"):
        plan(bank=str(empty / "bank.json"))
    leaky = tmp_path / "leaky"
    leaky.mkdir()
    write_bank(leaky, {"fine": "Compare the price.", "leaky": "Compare, then buy B07XJ8C8F5 first."})
    with pytest.raises(UserError, match=r"skill 'leaky' looks like a product id.*skills review"):
        plan(bank=str(leaky / "bank.json"))
    assert plan().detectable > plan(rule={"stages": [4.0], "spending": [1.0]}).detectable


@pytest.mark.slow
def test_an_incomplete_gate_says_so_leaves_no_bank_and_goes_on(shop: Path, tmp_path: Path, monkeypatch):
    out = tmp_path / "g"
    real = skill_runs.SkillRuns.run

    def stops(self, experiment):
        if "complement" in experiment.name:
            raise RunIncompleteError("the endpoint is down")
        return real(self, experiment)

    monkeypatch.setattr(skill_runs.SkillRuns, "run", stops)
    gate = gate_of(shop, out, rule={"stages": [1.0], "spending": [1.0]}, confirm_split=None)
    with pytest.raises(RunIncompleteError):
        gate.run()
    manifest = json.loads((out / MANIFEST).read_text())
    assert manifest["status"] == "incomplete" and "endpoint is down" in manifest["reason"]
    assert not (out / SELECTED).exists() and not (out / CONTRIBUTIONS).exists() and not (out / LEDGER).exists()
    monkeypatch.setattr(skill_runs.SkillRuns, "run", real)
    assert gate.run()["status"] == "complete" and (out / SELECTED).exists()


@pytest.mark.slow
def test_a_harmful_chunk_is_dropped_by_a_look_and_a_killed_gate_goes_on_without_it(
    shop: Path, tmp_path: Path, monkeypatch
):
    study = json.loads((configs_root() / "skills/study_bank.json").read_text())
    texts = {s["skill_id"]: s["content"] for s in study["skills"] if s["skill_id"] in ("harm-persona", "harm-options")}
    bank = write_bank(tmp_path, {**{k: TEXTS[k] for k in ("search", "plants")}, **texts})
    changes = {
        "bank": str(bank),
        "rule": {"stages": [2.0, 0.5], "spending": [0.0, 1.0], "fdr": 0.4},
        "confirm_split": None,
    }
    real = skill_runs.SkillRuns.run

    def stops(self, experiment):
        if experiment.name == "g-s1-complement":
            raise RunIncompleteError("killed")
        return real(self, experiment)

    monkeypatch.setattr(skill_runs.SkillRuns, "run", stops)
    with pytest.raises(RunIncompleteError):
        gate_of(shop, tmp_path / "g", **changes).run()
    monkeypatch.setattr(skill_runs.SkillRuns, "run", real)
    found = gate_of(shop, tmp_path / "g", **changes).run()
    report = json.loads((tmp_path / "g" / CONTRIBUTIONS).read_text())
    rows = {r["skill_id"]: r for r in report["contributions"]}
    dropped = {name for name, row in rows.items() if row["dropped_after"]}
    assert dropped and dropped <= set(texts) and not dropped & set(found["selected"])
    assert all(rows[n]["status"] == "harmful" and rows[n]["dropped_after"] == 48 for n in dropped)
    assert set(report["looks"][0]["dropped"]) == dropped and report["looks"][0]["accepted"] == []
    lines = [orjson.loads(line) for line in (tmp_path / "g" / LEDGER).read_bytes().splitlines()]
    assert {line["skill_id"] for line in lines if line["dropped_after"]} == dropped
    pairs = gate_pairs(tmp_path / "g", "g", load_snapshot(bank)).data.masks
    columns = [i for i, name in enumerate(rows) if name in dropped]
    assert (pairs[:48].sum(axis=1) == 1).all() and (pairs[48:][:, :, columns] == 0).all()
    assert (np.delete(pairs[48:], columns, axis=2).sum(axis=1) == 1).all()


def test_looks_for_harm_wait_until_the_design_can_show_it(shop: Path, tmp_path: Path):
    few = gate_of(shop, tmp_path / "a").plan
    assert [len(s) for s in few.stages] == [24, 12, 12] and few.rule.spending == [0.4, 0.3, 0.3]
    more = gate_of(shop, tmp_path / "b", rule={"stages": [1.0, 1.0], "spending": [0.0, 1.0]}).plan
    assert [len(s) for s in more.stages] == [24, 24]


def test_another_gate_in_the_same_directory_is_refused(shop: Path, finished: Path):
    with pytest.raises(UserError, match="another gate"):
        gate_of(shop, finished, rule={"fdr": 0.1}).run()


def test_the_selector_reads_the_pairs_of_a_gate(finished: Path):
    bank = load_snapshot(finished / "candidates.snapshot.json")
    pairs = gate_pairs(finished, "g", bank)
    n = pairs.data.rewards.shape[0]
    assert n >= 24 and pairs.data.masks.shape == (n, 2, 4) and len(pairs.questions) == n
    assert (pairs.data.masks[:, 0] + pairs.data.masks[:, 1] == 1).all()
    with pytest.raises(DataError, match="no masked runs"):
        gate_pairs(finished, "other", bank)


def test_the_command_line_plans_shows_reviews_and_compares(shop: Path, finished: Path, tmp_path: Path, capsysbinary):
    from jobs.cli import main

    def run(*words) -> dict:
        assert main(["skills", *words, "--json"]) == 0
        return json.loads(capsysbinary.readouterr().out)

    plan = run("gate", str(write_gate(shop)), "--out", str(tmp_path / "none"), "--plan")
    assert plan["rollouts_at_most"] == 96 and not (tmp_path / "none").exists()
    bank = finished / "candidates.snapshot.json"
    assert len(run("show", str(bank))["skills"]) == 4
    assert run("show", str(bank), "--skill", "plants")["content"] == TEXTS["plants"]
    reviewed = tmp_path / "reviewed.json"
    run("review", str(bank), "plants", "rejected", "--by", "me", "--out", str(reviewed))
    assert run("diff", str(bank), str(reviewed))["changed"]["plants"]["review"][1]["status"] == "rejected"
    run("convert", str(reviewed), "--public", "--out", str(tmp_path / "public.json"))
    assert json.loads((tmp_path / "public.json").read_text())["schema_version"] == "shopsimrl-skillbank-v1"
    assert run("check", str(bank))["problems"] == {}
    leaky = tmp_path / "leaky.txt"
    leaky.write_text("Open B07XQ3F2K9.")
    assert (
        main(
            [
                "skills",
                "review",
                str(bank),
                "plants",
                "edited",
                "--by",
                "x",
                "--text",
                str(leaky),
                "--out",
                str(tmp_path / "o.json"),
                "--json",
            ]
        )
        == 2
    )
    assert callable(skills_arguments)


def test_shipped_gate_configs_parse():
    from jobs.pipeline import load_pipeline

    designs = {}
    for name in ("skills/gate.yaml", "skills/gate_local.yaml"):
        config, run, _ = load_gate(str(configs_root() / name), [])
        designs[name] = config.rule.design
        assert run.model.checkpoint_id
    assert designs == {"skills/gate.yaml": "complement", "skills/gate_local.yaml": "bare"}
    pipeline, run, _ = load_pipeline("pipeline", [])
    assert pipeline.gate.tasks == 400 and run.model.checkpoint_id
