"""A studio on a port of its own, and a real Chromium that may reach nothing else."""

import os
import shutil
import threading
import time
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
import uvicorn
from starlette.testclient import TestClient

from rayrl.studio.app import create_app
from rayrl.studio.config import StudioConfig
from rayrl.workbench.launcher import Supervisor
from rayrl.workbench.samples import SKILL, skill_folder
from rayrl.workbench.workbench import Workbench
from tests.studio.conftest import ThreadDriver
from tests.studio.pages.runs_root import make_root

FIGURES = Path(__file__).parents[3] / "docs" / "figures" / "studio"
HTML = {"accept": "text/html"}
SIZE = {"width": 1280, "height": 860}


class Site:
    """A running studio: its address and its store."""

    def __init__(self, root, **settings):
        self.bench = Workbench(root)
        skills = {SKILL: str(skill_folder(1)), "v2": str(skill_folder(2))}
        self.config = StudioConfig(root=str(root), skills=skills, **settings)
        supervisor = Supervisor(self.bench.store, lambda e: ThreadDriver(root, e), poll_s=0.1)
        self.app = create_app(self.bench, self.config, supervisor=supervisor)
        self._server = uvicorn.Server(uvicorn.Config(self.app, port=0, log_level="error", access_log=False))
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self):
        self._thread.start()
        until = time.monotonic() + 30
        while not self._server.started:
            assert time.monotonic() < until, "the server does not start"
            time.sleep(0.02)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_):
        # a page that loads or asks again while its server goes away would report a fault that is none
        for tab in list(Tab.open):
            tab.close()
        self._server.should_exit = True
        self._thread.join(20)
        self.bench.close()

    def ended(self, experiment_id, states=("completed",), timeout_s=90):
        until = time.monotonic() + timeout_s
        while (found := self.bench.experiments.get(experiment_id))["state"] not in states:
            assert time.monotonic() < until, found
            time.sleep(0.05)
        return found


@contextmanager
def served(root, store):
    """A client of a studio over the runs below ``root``, asking as a browser would."""
    bench = Workbench(store)
    app = create_app(bench, StudioConfig(root=str(store), runs=str(root)))
    with TestClient(app, base_url="http://127.0.0.1", headers=HTML) as client:
        yield client
    bench.close()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Runs, trainings, evaluations and banks of every kind, whole and damaged."""
    return make_root(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def client(root, tmp_path_factory):
    """A client of a studio over ``root``."""
    with served(root, tmp_path_factory.mktemp("store")) as made:
        yield made


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A studio with an empty store."""
    with Site(tmp_path_factory.mktemp("studio") / "store") as made:
        yield made


@pytest.fixture(scope="session")
def chromium():
    """A headless Chromium. Without one the tests are skipped, or fail where RAYRL_REQUIRE_BROWSER is 1."""
    path = os.environ.get("RAYRL_CHROMIUM") or next(
        (p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name))), None
    )
    reason = None
    if path is None:
        reason = "no Chromium is installed (on Debian: apt install chromium), or name one in RAYRL_CHROMIUM"
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        reason = "the package playwright is not installed (extra `dev`)"
    if reason is not None:
        if os.environ.get("RAYRL_REQUIRE_BROWSER") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()


class Tab:
    """A page of the browser that keeps account of what it asked for and what went wrong in it."""

    open = []

    def __init__(self, browser, **options):
        self.context = browser.new_context(viewport=SIZE, accept_downloads=True, **options)
        self.context.set_default_timeout(20_000)
        self.page = self.context.new_page()
        self.beyond, self.faults = [], []
        self.open.append(self)
        self.page.on("request", self._request)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("console", lambda m: self.faults.append(m.text) if m.type == "error" else None)

    def _request(self, request):
        allowed = ("http://127.0.0.1:", "data:", "blob:http://127.0.0.1:", "about:")
        if not request.url.startswith(allowed):
            self.beyond.append(request.url)

    def close(self):
        """Close it, if it is not closed yet."""
        if self in self.open:
            self.open.remove(self)
            self.context.close()

    def check(self):
        """Nothing was asked for beyond loopback, and nothing went wrong."""
        assert self.beyond == []
        assert self.faults == []


class Axe:
    """axe-core over an open page."""

    def __init__(self):
        spec = find_spec("axe_playwright_python")
        if spec is None:
            pytest.skip("the package axe-playwright-python is not installed (extra `dev`)")
        self.script = next(Path(spec.origin).parent.rglob("axe.min.js")).read_text(encoding="utf-8")

    def violations(self, page):
        """Serious and critical violations with every fold open: where, which rule, which nodes."""
        for fold in page.query_selector_all("details:not([open])")[:6]:
            fold.evaluate("d => d.open = true")
        page.evaluate(self.script)
        result = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        return [
            (page.url, v["id"], [(n["target"], n["failureSummary"][:200]) for n in v["nodes"][:3]])
            for v in result["violations"]
            if v["impact"] in ("serious", "critical")
        ]


@pytest.fixture
def new_tab(chromium):
    """Makes tabs; each is checked and closed at the end of the test."""
    made = []

    def make(**options):
        made.append(Tab(chromium, **options))
        return made[-1]

    yield make
    for tab in made:
        tab.close()
    for tab in made:
        tab.check()


@pytest.fixture
def shot(tmp_path):
    """Takes a picture: among the figures of the documentation with RAYRL_SCREENSHOTS set, else for the test alone."""
    folder = FIGURES if os.environ.get("RAYRL_SCREENSHOTS") else tmp_path
    folder.mkdir(parents=True, exist_ok=True)

    def take(page, name, full=True):
        page.wait_for_load_state()
        for chart in page.query_selector_all(".chart"):
            page.wait_for_function("c => c.dataset.drawn", arg=chart)
        path = folder / f"{name}.png"
        page.screenshot(path=str(path), full_page=full, animations="disabled")
        assert path.stat().st_size > 5000
        return path

    return take
