"""doctor: what is wrong, and what to do about it; never a traceback."""

from __future__ import annotations

import pytest

from jobs import doctor


def by_name(found):
    return {check["name"]: check for check in found["checks"]}


def test_a_healthy_machine(command):
    code, found = command("doctor", "--no-ray")
    checks = by_name(found)
    assert code == 0 and found["ok"]
    assert {"python", "packages", "ports", "memory", "disk"} <= set(checks)


def test_a_healthy_config(command, plain_run):
    code, found = command("doctor", plain_run(), "--no-ray")
    checks = by_name(found)
    assert code == 0, checks
    assert checks["environment"]["found"].startswith("null-v1") and checks["model"]["level"] == "ok"


@pytest.mark.parametrize(
    ("changes", "name", "says"),
    [
        ({"tasks__split": "dev"}, "config", "no split 'dev'"),
        ({"environment": {"kind": "tests.jobs.sick:Down", "options": {}}}, "environment", "no server at"),
    ],
)
def test_what_is_wrong_is_named_with_a_remedy(command, plain_run, changes, name, says):
    code, found = command("doctor", plain_run(**changes), "--no-ray")
    check = by_name(found)[name]
    assert code == 2 and not found["ok"]
    assert check["level"] == "fail" and says in check["found"] and check["do"]


def test_an_endpoint_that_is_down_is_named(command, plain_run):
    model = {
        "kind": "openai",
        "base_url": "http://127.0.0.1:9/v1",
        "retries": {"max_attempts": 1},
        "timeouts": {"connect_s": 1, "total_s": 2},
    }
    code, found = command("doctor", plain_run(model=model), "--no-ray")
    check = by_name(found)["model"]
    assert code == 2 and check["level"] == "fail" and "model.base_url" in check["do"]


def test_a_package_that_is_missing(command, monkeypatch):
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "orjson" else real(name))
    code, found = command("doctor", "--no-ray")
    assert code == 2 and by_name(found)["packages"]["found"] == "missing: orjson"


def test_a_full_or_closed_disk(monkeypatch, tmp_path):
    assert doctor.check_disk(tmp_path / "a" / "b").level == "ok"
    monkeypatch.setattr(doctor, "MIN_FREE_BYTES", 10**18)
    assert doctor.check_disk(tmp_path).level == "warn"
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    assert doctor.check_disk(tmp_path).level == "fail"


def test_people_see_one_line_each(says, plain_run):
    code, out, _ = says("doctor", plain_run(tasks__split="dev"), "--no-ray")
    assert code == 2 and "fail  config" in out and "-> mend the config" in out and "1 thing(s) to mend" in out
