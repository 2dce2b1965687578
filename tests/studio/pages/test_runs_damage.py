"""Runs that are not what their small files say: cut traces, no traces, a manifest nobody can read."""

import shutil

import orjson
import pytest

from rayrl.evaluation.sources import find_sources, read_rows
from rayrl.evaluation.summary import summarize
from rayrl.testing.traces import TraceRecipe, write_run
from tests.studio.pages.conftest import served

FULL = 24


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "whole", TraceRecipe(experiment="whole", tasks=FULL, failure_rate=0.0))
    summary = summarize(read_rows(find_sources([str(root / "whole")])), expected_jobs=FULL)
    for name in ("cut", "middle", "gone", "list", "binary", "empty"):
        shutil.copytree(root / "whole", root / name)
        (root / name / "summary.json").write_bytes(orjson.dumps(summary))
    traces = (root / "cut" / "traces.jsonl").read_bytes()
    (root / "cut" / "traces.jsonl").write_bytes(traces[: len(traces) // 2])
    lines = traces.splitlines(keepends=True)
    lines[3] = b"\xff" + lines[3][50:]
    (root / "middle" / "traces.jsonl").write_bytes(b"".join(lines))
    (root / "gone" / "traces.jsonl").unlink()
    for name, data in (("list", b"[]"), ("binary", bytes(range(128, 256))), ("empty", b"")):
        (root / name / "manifest.json").write_bytes(data)
    for name in ("cut", "middle"):
        (root / name / "summary.json").touch()  # newer than the traces, as after copying
    write_run(root / "pipe" / "gate" / "runs" / "one", TraceRecipe(experiment="one", tasks=3))
    (root / "pipe" / "state.json").write_bytes(b"{}")
    (root / "pipe" / "gate" / "gate.json").write_bytes(b"{}")
    with served(root, tmp_path_factory.mktemp("store")) as made:
        yield made


def row(client, name):
    page = client.get("/runs").text.partition("<main")[2]
    return page.partition(f">{name}</a>")[2].partition("</tr>")[0]


def test_the_state_is_what_the_traces_hold(client):
    assert "completed" in row(client, "whole")
    for name, held in (("middle", FULL - 1), ("gone", 0)):
        found = row(client, name)
        assert "not finished" in found and f"{held} of {FULL} episodes" in found, name
        assert f"The summary says {FULL} complete episodes, the traces hold {held}." in found
    assert "not finished" in row(client, "cut") and f"The summary says {FULL}" in row(client, "cut")
    page = client.get("/runs/gone").text
    assert "The traces are missing" in page and "Nothing recorded yet" not in page


def test_a_comparison_with_a_damaged_run_warns(client):
    whole, cut, middle = (client.get(f"/runs/-/compare?a=whole&b={name}").text for name in ("whole", "cut", "middle"))
    assert "is incomplete" not in whole
    assert "cut is incomplete" in cut and "1 lines are damaged" in cut
    assert "middle is incomplete: 1 planned episodes have no record, 1 lines are damaged" in middle


@pytest.mark.parametrize("name", ["list", "binary", "empty"])
def test_a_manifest_nobody_can_read_is_not_no_manifest(client, name):
    assert "manifest unreadable" in row(client, name) and "no manifest" not in row(client, name)
    assert client.get(f"/runs/{name}").status_code == 200


def test_runs_of_a_pipeline_are_folded_and_last_to_choose(client):
    page = client.get("/runs").text
    assert "1 run inside pipe<" in page and ">pipe/gate/runs/one</a>" not in page
    assert ">pipe/gate/runs/one</a>" in client.get("/runs?inside=pipe").text
    assert ">pipe/gate/runs/one</a>" in client.get("/runs?q=pipe").text
    chosen = client.get("/runs/-/compare").text.partition("<select")[2].partition("</select>")[0]
    assert chosen.rstrip().endswith(">pipe/gate/runs/one</option>") and "selected" in chosen
