"""The addresses the quickstart names at its end are pages of the studio that are there."""

import re
from types import SimpleNamespace

from rich.console import Console
from starlette.testclient import TestClient

from jobs.quickstart import Context, _pages
from rayrl.studio.app import create_app
from rayrl.studio.config import StudioConfig
from rayrl.testing.traces import TraceRecipe, write_run
from rayrl.workbench.workbench import Workbench
from tests.studio.pages.runs_root import training


def test_every_address_leads_to_a_page(tmp_path):
    root = tmp_path / "runs"
    context = Context(out=Console(quiet=True), overrides=[], quiet=True)
    for level, competence in (("naive", -1.0), ("competent", 1.0)):
        recipe = TraceRecipe(experiment=f"quickstart-{level}", tasks=6, competence=competence, failure_rate=0.0)
        write_run(root / f"quickstart-{level}", recipe)
        context.runs[level] = SimpleNamespace(run_dir=root / f"quickstart-{level}")
    training(root, "note")
    context.places["training"] = root / "quick"
    lines = _pages(context)
    addresses = [found[1] for line in lines[1:] if (found := re.match(r"http://127\.0\.0\.1:8765(/\S+) ", line))]
    assert lines[0].startswith("./run rayrl studio") and len(addresses) == len(lines) - 1 == 5
    bench = Workbench(tmp_path / "store")
    app = create_app(bench, StudioConfig(root=str(tmp_path / "store"), runs=str(root)))
    with TestClient(app, base_url="http://127.0.0.1", headers={"accept": "text/html"}) as client:
        for address in addresses:
            assert client.get(address).status_code == 200, address
    bench.close()
