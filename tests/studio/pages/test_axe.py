"""axe-core over the workbench's pages, light and dark: no serious or critical violation."""

import json

import pytest

from rayrl.studio.pages.workbench.lists import make_sample
from rayrl.workbench.results import Filter, page
from rayrl.workbench.samples import skill_folder
from tests.studio.pages.conftest import Axe

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def urls(site):
    first = make_sample(site.app.state.context, 60)["id"]
    site.app.state.context.wake()
    site.ended(first)
    bench = site.bench
    other = bench.snapshots.add_folder(skill_folder(2))
    second = bench.experiments.clone(first, {"snapshot_id": other["id"], "model": "shaky-reader", "name": "second"})[
        "id"
    ]
    bench.experiments.move(second, "start")
    site.app.state.context.wake()
    site.ended(second)
    created = bench.experiments.clone(first, {"name": "created"})["id"]
    dataset = bench.datasets.all()[0]
    cited = next(r for r in page(bench, first, Filter(), limit=100)["items"] if r["evidence_refs"])["ordinal"]
    base = f"/workbench/experiments/{first}"
    return [
        "/workbench", "/workbench/new", f"/workbench/uploads/{dataset['upload_sha256']}", "/workbench/datasets",
        f"/workbench/configure?dataset={dataset['id']}", f"/workbench/datasets/{dataset['id']}", "/workbench/models",
        "/workbench/skills", f"/workbench/skills/{other['id']}?against={bench.snapshots.all()[1]['id']}",
        f"/workbench/skills/{other['id']}/file?path=knowledge/边界.md&at=多意图#cited", "/workbench/sessions",
        base, f"{base}/disagreements", f"{base}/cases", f"{base}/versions", f"{base}/clone", f"{base}/cases/{cited}",
        f"/workbench/experiments/{created}", f"/workbench/compare?a={first}&b={second}", "/workbench/compare",
        f"/workbench/matrix?id={first}&id={second}", "/workbench/experiments/ex_0000000000000000",
    ]  # fmt: skip


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_serious_violation(site, urls, new_tab, scheme):
    axe, found = Axe(), []
    # bypass_csp lets the checker's own script in; the policy itself is tested elsewhere
    tab = new_tab(color_scheme=scheme, bypass_csp=True, reduced_motion="reduce")
    for url in urls:
        tab.page.goto(site.url + url)
        found += axe.violations(tab.page)
    tab.faults.clear()  # the missing page's own status
    assert not found, json.dumps(found, indent=1, ensure_ascii=False)


def test_everything_is_reached_by_tab(site, urls, new_tab):
    """Each link, button and field of the overview can be focused, in order, without a trap."""
    tab = new_tab()
    tab.page.goto(site.url + urls[11])
    wanted = tab.page.evaluate(
        "[...document.querySelectorAll('a[href],button,input,select,textarea,summary')]"
        ".filter(n => n.checkVisibility() && !n.disabled && n.type !== 'hidden').length"
    )
    seen = set()
    for _ in range(wanted + 5):
        tab.page.keyboard.press("Tab")
        seen.add(
            tab.page.evaluate(
                "(() => { const n = document.activeElement; n.dataset.seen ||= String(Math.random()); return n.tagName + n.dataset.seen })()"
            )
        )
    assert len(seen - {s for s in seen if s.startswith("BODY")}) >= wanted


def test_no_page_scrolls_sideways_on_a_telephone(site, urls, new_tab):
    tab = new_tab()
    tab.page.set_viewport_size({"width": 390, "height": 800})
    for url in urls:
        tab.page.goto(site.url + url)
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= 390, url
    tab.faults.clear()  # the missing page's own status
