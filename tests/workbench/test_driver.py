"""Running experiments: states, failures that harm nobody, pause, cancel, retry, other models."""

import threading
import time
from pathlib import Path

import pytest

from rayrl.environments.skill_case import SkillCaseFactory
from rayrl.errors import DataError, RunConflictError
from rayrl.schemas import EpisodeJob, ModelOutput, ToolCall
from rayrl.workbench.driver import Driver
from rayrl.workbench.experiments import Params
from rayrl.workbench.launcher import Supervisor
from rayrl.workbench.reader import ScriptedReader
from rayrl.workbench.results import Filter, case_detail, page
from rayrl.workbench.samples import skill_folder
from tests.workbench.conftest import drive, make_pool, sample_dataset, sample_experiment


class Moody(ScriptedReader):
    """A reader that does something wrong for chosen queries."""

    def __init__(self, **options):
        self.rules = options.pop("rules")
        super().__init__(**options)

    async def generate(self, messages, tools, *, seed):
        text = str(messages[1]["content"])
        for word, mood in self.rules.items():
            if word not in text:
                continue
            if mood == "crash":
                raise RuntimeError("boom")
            if mood == "chatter":
                return ModelOutput(content="I think it is fast.")
            if mood == "dither":
                return ModelOutput(tool_calls=[ToolCall(id="c", name="list_files", arguments={})])
            verdict = {
                "prediction": mood,
                "reason": "r",
                "confidence": 7,
                "evidence_refs": ["no.md#x", "knowledge/边界.md"],
            }
            return ModelOutput(tool_calls=[ToolCall(id="c", name="submit", arguments=verdict)])
        return await super().generate(messages, tools, seed=seed)


def moody(bench, rules, n=20, **more):
    body = {"kind": "tests.workbench.test_driver:Moody", "options": {"rules": rules}}
    bench.models.save("moody", body, trusted=True)
    return sample_experiment(bench, n, model="moody", params=Params(max_actions=8, max_attempts=2), **more)


def queries(bench, experiment):
    return {r["query"]: r for r in page(bench, experiment["id"], Filter(), limit=500)["items"]}


def test_single_failures_harm_nobody_and_are_told_apart(bench):
    plain = [case.query for case in bench.datasets.cases(sample_dataset(bench)["id"])]
    rules = {plain[0]: "crash", plain[1]: "chatter", plain[2]: "dither", plain[3]: "maybe"}
    experiment = moody(bench, rules)
    found = drive(bench, experiment["id"])
    assert found["state"] == "completed" and found["counts"]["failed"] == 3 and found["counts"]["completed"] == 17
    rows = queries(bench, experiment)
    assert [rows[q]["failure"] for q in plain[:4]] == ["infrastructure", "unparseable", "agent", None]
    assert rows[plain[0]]["attempts"] == 2 and "boom" in rows[plain[0]]["error"]["message"]
    odd = rows[plain[3]]
    assert (odd["prediction"], odd["confidence"], odd["evidence"], odd["agrees"]) == ("maybe", None, "dangling", False)
    cited = case_detail(bench, experiment["id"], odd["ordinal"])["passages"]
    assert [(c["ref"], c["exists"], c["read"]) for c in cited] == [
        ("no.md#x", False, "no"),
        ("knowledge/边界.md", True, "no"),
    ]


def test_retry_of_failed_and_of_chosen_cases_keeps_history(bench):
    first = sample_dataset(bench)
    query = bench.datasets.cases(first["id"])[0].query
    experiment = moody(bench, {query: "crash"})
    drive(bench, experiment["id"])
    assert bench.experiments.retry(experiment["id"], "failed") == 1
    found = drive(bench, experiment["id"])
    assert found["state"] == "completed" and found["counts"]["failed"] == 1
    detail = case_detail(bench, experiment["id"], 0)
    assert [a["attempt"] for a in detail["attempts"]] == [1, 2, 3, 4]
    chosen = [row["case_id"] for row in page(bench, experiment["id"], Filter())["items"][3:5]]
    assert bench.experiments.retry(experiment["id"], "cases", chosen) == 2
    assert drive(bench, experiment["id"])["counts"]["completed"] == 19
    with pytest.raises(DataError, match="has no case 'nope'"):
        bench.experiments.retry(experiment["id"], "cases", ["nope"])


def test_retry_of_disagreements_touches_no_other_case(bench):
    experiment = sample_experiment(bench, 30)
    drive(bench, experiment["id"])
    wrong = [row["ordinal"] for row in page(bench, experiment["id"], Filter(agrees=False))["items"]]
    assert wrong and bench.experiments.retry(experiment["id"], "disagreements") == len(wrong)
    drive(bench, experiment["id"])
    again = [row["ordinal"] for row in page(bench, experiment["id"], Filter())["items"] if row["attempts"] == 2]
    assert again == wrong


def slow_experiment(bench, n=40, **more):
    body = {"kind": "rayrl.workbench.reader:ScriptedReader", "options": {"latency_ms": 30}}
    bench.models.save("slow", body)
    return sample_experiment(bench, n, model="slow", concurrency=4, **more)


def start(bench, experiment):
    driver = Driver(bench, experiment["id"], make_pool)
    thread = threading.Thread(target=driver.run, daemon=True)
    thread.start()
    until = time.monotonic() + 30
    while bench.experiments.get(experiment["id"])["counts"]["completed"] < 4:
        assert time.monotonic() < until
        time.sleep(0.02)
    return driver, thread


def test_pause_lets_running_cases_end_and_resume_goes_on(bench):
    experiment = slow_experiment(bench)
    _, thread = start(bench, experiment)
    bench.experiments.move(experiment["id"], "pause")
    thread.join(30)
    counts = bench.experiments.get(experiment["id"])["counts"]
    assert counts["running"] == 0 and 4 <= counts["completed"] < 40
    bench.experiments.move(experiment["id"], "resume")
    assert drive(bench, experiment["id"])["counts"]["completed"] == 40


def test_cancel_ends_everything_and_leaves_nothing_pending(bench):
    experiment = slow_experiment(bench)
    _, thread = start(bench, experiment)
    bench.experiments.move(experiment["id"], "cancel")
    thread.join(30)
    counts = bench.experiments.get(experiment["id"])["counts"]
    assert counts["pending"] == counts["running"] == 0 and counts["cancelled"] + counts["completed"] == 40
    with pytest.raises(RunConflictError, match="cancelled"):
        bench.experiments.move(experiment["id"], "resume")


def test_second_driver_is_refused_and_concurrency_changes_are_obeyed_and_noted(bench):
    experiment = slow_experiment(bench)
    driver, thread = start(bench, experiment)
    with pytest.raises(DataError, match="is being driven by"):
        Driver(bench, experiment["id"], make_pool, owner="other:1:1").run()
    bench.experiments.set_concurrency(experiment["id"], 9)
    time.sleep(0.3)
    assert len(driver._live) <= 9
    thread.join(60)
    with bench.store.read() as connection:
        kinds = connection.exec_driver_sql("SELECT data FROM events WHERE kind='concurrency'").scalars().all()
    assert len(kinds) == 1 and '"to": 9' in kinds[0]


def test_repeats_show_flakes_and_seeds_repeat_results(bench):
    dataset = sample_dataset(bench, 15)
    facts = {"dataset": dataset, "model": "shaky-reader", "params": Params(repeats=4)}
    one, two = sample_experiment(bench, **facts), sample_experiment(bench, **facts)
    rows = []
    for experiment in (one, two):
        drive(bench, experiment["id"])
        found = page(bench, experiment["id"], Filter(), limit=500)["items"]
        rows.append([(r["ordinal"], r["repeat"], r["prediction"], r["reason"]) for r in found])
    assert rows[0] == rows[1] and len(rows[0]) == 60
    assert one["fingerprint"] == two["fingerprint"]
    assert len({r[2] for r in rows[0] if r[0] == 0} | {r[2] for r in rows[0]}) == 2


async def test_runner_gets_neither_label_nor_source(bench):
    dataset = sample_dataset(bench, 3)
    text = Path(bench.datasets.inputs_file(dataset)).read_text(encoding="utf-8")
    assert "gold" not in text and "annotation" not in text and "rid" not in text
    snapshot = bench.snapshots.add_folder(skill_folder(1))
    factory = SkillCaseFactory(
        cases=bench.datasets.inputs_file(dataset),
        cases_sha256=dataset["content_sha256"],
        snapshot=str(bench.snapshots.folder(snapshot["id"])),
        skill_sha256=snapshot["content_sha256"],
        classes=["fast", "slow"],
    )
    await factory.start()
    environment = factory.open()
    await environment.reset(EpisodeJob(task_id=0, sample_id=0, seed=0, split="x"))
    for path in ("../../workbench.db", "/etc/passwd", "knowledge/../../../x", "tree"):
        answer = await environment.step(ToolCall(id="1", name="read_file", arguments={"path": path}), seed=0)
        assert answer.feedback["reason"] == "no_such_file" and "There is no file" in answer.observation.text


def test_damaged_snapshot_stops_the_experiment_with_its_reason(bench):
    experiment = sample_experiment(bench, 3)
    target = bench.snapshots.folder(experiment["snapshot_id"]) / "tree" / "SKILL.md"
    target.chmod(0o644)
    target.write_text("other")
    with pytest.raises(DataError, match=r"SKILL\.md is not what was frozen"):
        drive(bench, experiment["id"])


def test_old_experiment_survives_an_edit_of_the_skill(bench, tmp_path):
    import shutil

    live = tmp_path / "fast-slow-routing"
    shutil.copytree(skill_folder(1), live)
    dataset = sample_dataset(bench, 10)
    before = bench.snapshots.add_folder(live)
    made = bench.experiments.create(name="e", dataset_id=dataset["id"], snapshot_id=before["id"], model="reader")
    bench.experiments.move(made["id"], "start")
    drive(bench, made["id"])
    first = [(r["case_id"], r["prediction"], r["reason"]) for r in page(bench, made["id"], Filter())["items"]]
    shutil.rmtree(live)
    clone = bench.experiments.clone(made["id"], {})
    assert clone["fingerprint"] == made["fingerprint"]
    bench.experiments.move(clone["id"], "start")
    drive(bench, clone["id"])
    again = [(r["case_id"], r["prediction"], r["reason"]) for r in page(bench, clone["id"], Filter())["items"]]
    assert again == first
    assert bench.snapshots.file(before["id"], "SKILL.md")["text"].startswith("---")


def test_finished_drivers_are_reaped(bench):
    asked = []

    class Done:
        def alive(self):
            asked.append(1)  # of a process: asking reaps it
            return False

        def stop(self, timeout_s):
            raise AssertionError("it has ended already")

    made = sample_experiment(bench, dataset=sample_dataset(bench, 4), start=True)
    supervisor = Supervisor(bench.store, lambda _: Done())
    assert supervisor.look() == [made["id"]]
    bench.experiments.move(made["id"], "cancel")
    assert supervisor.look() == [] and asked
    supervisor.stop(0)
