"""``rayrl workbench`` and ``rayrl skills`` by command: the loop from a file to a verified bundle, and clear errors."""

import json
import shutil
import subprocess
import sys
import zipfile

import pytest

from jobs import cli
from rayrl.workbench.samples import sample_file, skill_folder


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with 20 cases, both Skills and a store."""
    root = tmp_path_factory.mktemp("place")
    _, data = sample_file("csv", 20)
    (root / "cases.csv").write_bytes(data)
    for version in (1, 2):
        shutil.copytree(skill_folder(version), root / f"v{version}" / "fast-slow-routing")
    return root


@pytest.fixture
def ask(place, capsysbinary):
    """Run a command; the exit code and its JSON object."""

    def run(*words, store=True):
        code = cli.main([*map(str, words), *(["--root", str(place / "store")] if store else []), "--json"])
        return code, json.loads(capsysbinary.readouterr().out)

    return run


@pytest.fixture(scope="module")
def ids(place):
    return {}


def skill(place, version=1):
    return place / f"v{version}" / "fast-slow-routing"


@pytest.mark.parametrize("version", [1, 2])
def test_run_prints_experiment_and_figures(ask, place, ids, version):
    code, found = ask("workbench", "run", place / "cases.csv", "--skill", skill(place, version))
    assert code == 0 and found["experiment"]["state"] == "completed"
    assert found["experiment"]["counts"]["completed"] == found["metrics"]["denominators"]["scored"] == 20
    ids[version] = found["experiment"]["id"]


def test_list_compare_and_models(ask, ids):
    assert {e["id"] for e in ask("workbench", "list")[1]["experiments"]} == set(ids.values())
    code, found = ask("workbench", "compare", ids[1], ids[2])
    assert code == 0 and found["denominators"]["common"] == 20 and found["skill_diff"][0]["change"] == "modified"
    assert {"reader", "smollm2"} <= {m["name"] for m in ask("workbench", "models")[1]["models"]}


def test_matrix_is_one_command(ask, place):
    words = ["--skill", skill(place), "--skill", skill(place, 2), "--model", "reader", "--model", "shaky-reader"]
    code, found = ask("workbench", "matrix", place / "cases.csv", *words)
    assert code == 0 and len(found["experiments"]) == 4 and {e["scored"] for e in found["experiments"]} == {20}


def test_bundle_by_command_verifies_itself(ask, place, ids):
    code, found = ask("workbench", "export", ids[1], "--kind", "bundle", "--out", place / "b.zip")
    assert code == 0 and found["bytes"] == (place / "b.zip").stat().st_size
    with zipfile.ZipFile(place / "b.zip") as archive:
        archive.extractall(place / "bundle")
    done = subprocess.run([sys.executable, "-I", place / "bundle" / "verify.py"], capture_output=True, text=True)
    assert done.returncode == 0 and "bundle is intact" in done.stdout
    for kind, more in (("results", []), ("reviews", []), ("compare", ["--with", ids[2]])):
        assert ask("workbench", "export", ids[1], "--kind", kind, "--out", place / f"{kind}.csv", *more)[0] == 0


def test_broken_canary_ends_with_its_reason(ask, place):
    (place / "canaries.yaml").write_text("canaries:\n- {query: 帮我规划一下周末行程, expect: fast}\n")
    words = ["run", place / "cases.csv", "--skill", skill(place), "--canaries", place / "canaries.yaml"]
    code, found = ask("workbench", *words)
    assert code == 6 and found["experiment"]["state"] == "invalid"
    assert "expected fast, got slow" in found["experiment"]["reason"]


def test_further_tools_are_part_of_the_experiment(ask, place, ids):
    words = ["run", place / "cases.csv", "--skill", skill(place)]
    code, found = ask("workbench", *words, "--tool", "rayrl.environments.skill_scripts:RunScript")
    assert code == 0 and found["experiment"]["params"]["tools"][-1].endswith(":RunScript")
    code, first = ask("workbench", "compare", ids[1], found["experiment"]["id"])
    assert code == 0 and first["a"]["fingerprint"] != first["b"]["fingerprint"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--concurrency", "0"], "concurrency must be 1 to 256, not 0"),
        (["--label", "fast=快"], "2 to 50 classes are needed"),
        (["--label", "fast=快", "--label", "slow=不"], "gold_route '慢': no class has this spelling"),
        (["--map", "query=nope"], "the file has no column or path 'nope'"),
        (["--map", "quary=x"], "did you mean 'query'?"),
        (["--map", "query"], "not of the form NAME=VALUE"),
        (["--map", "case_id=垂域"], "the id occurs twice, first in line"),
        (["--model", "nope"], "no model profile 'nope'; known: reader"),
        (["--encoding", "klingon"], "there is no encoding 'klingon'"),
        (["--repeats", "0"], "--repeats"),
        (["--tool", "read_fil"], "did you mean 'read_file'?"),
        (["--canaries", "/nope.yaml"], "/nope.yaml does not exist"),
    ],
)
def test_wrong_options_are_named(ask, place, words, message):
    code, found = ask("workbench", "run", place / "cases.csv", "--skill", skill(place), *words)
    assert code == 2 and message in found["error"]["message"]


def test_missing_things_are_named(ask, place, ids):
    for words, message in [
        (["run", place / "nope.csv", "--skill", skill(place)], "No such file"),
        (["run", place / "cases.csv", "--skill", place / "v1"], "there is fast-slow-routing/SKILL.md"),
        (["run", place / "cases.csv", "--skill", place / "cases.csv"], "is no folder; name the folder that holds"),
        (["run"], "give a data file and --skill"),
        (["compare", "ex_a", "ex_b"], "there is no experiment 'ex_a'"),
        (["export", ids[1], "--kind", "compare", "--out", place / "x.csv"], "--kind compare needs --with"),
    ]:
        code, found = ask("workbench", *words)
        assert code != 0 and message in found["error"]["message"]


def test_skill_commands(ask, place):
    code, frozen = ask("skills", "snapshot", skill(place), "--out", place / "snaps", store=False)
    assert code == 0 and frozen["status"] == "deployed"
    assert ask("skills", "verify", frozen["folder"], store=False)[1]["intact"]
    assert ask("skills", "lint", skill(place), store=False)[1]["findings"] == []
    (change,) = ask("skills", "diff", frozen["folder"], skill(place, 2), store=False)[1]["changes"]
    assert change["sections"] == ["knowledge/地图能力.md#到达电量预估"]
    code, found = ask("skills", "verify", place / "nope", store=False)
    assert code == 2 and "its manifest cannot be read" in found["error"]["message"]


def test_labels_of_another_kind_and_ragged_rows(ask, place):
    path = place / "mail.csv"
    path.write_text("id,text,kind\n1,win money,spam\n2,hello,ham\n3,a,b,c\n4,hi,ham\n")
    words = ["workbench", "run", path, "--skill", skill(place), "--map", "gold_route=kind", "--skip-errors"]
    code, found = ask(*words)
    assert code == 0 and found["metrics"]["denominators"]["scored"] == 3
    assert found["metrics"]["overall"]["confusion"]["labels"][:2] == ["ham", "spam"]
    assert "v1 @ " in found["experiment"]["name"]  # two versions of a Skill have two names
