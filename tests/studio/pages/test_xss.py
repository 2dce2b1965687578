"""Hostile text in every place that a file, a model or a user fills: it is shown, and it does nothing."""

from html.parser import HTMLParser

import pytest
from sqlalchemy import update
from starlette.testclient import TestClient

from rayrl.studio.app import create_app
from rayrl.studio.config import StudioConfig
from rayrl.workbench import tables
from rayrl.workbench.cases import Case
from rayrl.workbench.reviews import add_review
from rayrl.workbench.workbench import Workbench
from tests.studio.pages.conftest import Site

HTML = {"accept": "text/html"}
CORPUS = [
    "<script>alert(1)</script>",
    "</script><script>window.hit=1</script>",
    "<img src=x onerror=window.hit=1>",
    '"><svg onload=window.hit=1>',
    "' onmouseover='window.hit=1",
    "javascript:window.hit=1",
    "</textarea><script>window.hit=1</script>",
    "</title><script>window.hit=1</script>",
    "{{ 7*7 }}{% raw %}",
    "<!--<script>-->",
    "&lt;script&gt;window.hit=1&lt;/script&gt;",
    "\u2028</script>\u2029",
    "[x](javascript:window.hit=1)",
]
SKILL = """---
name: evil
description: <script>window.hit=1</script>
---

# <img src=x onerror=window.hit=1>

[x](javascript:window.hit=1) <script>window.hit=1</script>
"""


def fill(bench, folder):
    """A store in which every text is one of the corpus; returns the URLs that show them."""
    folder.mkdir()
    (folder / "SKILL.md").write_text(SKILL)
    (folder / "<img src=x onerror=window.hit=1>.md").write_text("# </script><script>window.hit=1</script>\n\nx\n")
    snapshot = bench.snapshots.add_folder(folder)
    cases = [
        Case(
            case_id=f"{i} {text}"[:200], query=text, gold_route="fast", domain=text, request_id=text, history=[text],
            context={text: text}, metadata={text: text}, source_row={text: text}, source_place=text,
        )
        for i, text in enumerate(CORPUS)
    ]  # fmt: skip
    blob = bench.uploads.add(
        "<img src=x onerror=window.hit=1>.csv",
        ("query,label\n" + "\n".join('"' + text.replace('"', '""') + '",fast' for text in CORPUS)).encode(),
    )
    dataset = bench.datasets.freeze(
        name=CORPUS[0], cases=cases, classes=["fast", CORPUS[2]], upload=blob["sha256"], options={},
        profile=(CORPUS[1], 1), notes=CORPUS[2], warnings=[CORPUS[3]],
    )  # fmt: skip
    made = []
    r = tables.results
    for side in (0, 1):
        one = bench.experiments.create(
            name=CORPUS[side], dataset_id=dataset["id"], snapshot_id=snapshot["id"], model="reader"
        )
        made.append(one["id"])
        with bench.store.write() as connection:
            for i, text in enumerate(CORPUS):
                ref = f"SKILL.md#{text}"
                cited = {"ref": ref, "exists": False, "read": "no", "path": None, "section": None, "lines": None}
                detail = {
                    "evidence_refs": [ref, text], "reads": [], "raw_output": text, "error": {"code": text, "message": text},
                    "evidence": {"state": "dangling", "cited": [cited], "read_not_cited": [text]},
                }  # fmt: skip
                wrong = CORPUS[2] if (i + side) % 2 else "fast"
                values = {"state": "completed", "prediction": wrong, "reason": f"{text} {side}", "confidence": 0.4}
                values |= {"evidence": "dangling", "agrees": int(wrong == "fast"), "detail": detail}
                where = (r.c.experiment_id == one["id"]) & (r.c.ordinal == i)
                connection.execute(update(r).where(where).values(values))
            bench.store.note(connection, one["id"], "completed", {})
            e = tables.experiments
            connection.execute(
                update(e).where(e.c.id == one["id"]).values(state="completed", reason=f"stopped: {CORPUS[2]}")
            )
        for i, text in enumerate(CORPUS):
            add_review(bench, one["id"], i, verdict="ambiguous", note=text, reviewer=text)
            add_review(bench, one["id"], i, verdict="gold_right", note=text, reviewer=text)
    base = f"/workbench/experiments/{made[0]}"
    urls = ["/workbench", "/workbench/new", "/workbench/datasets", f"/workbench/datasets/{dataset['id']}"]
    urls += [
        f"/workbench/uploads/{blob['sha256']}",
        f"/workbench/configure?dataset={dataset['id']}",
        "/workbench/skills",
    ]
    urls += [
        f"/workbench/skills/{snapshot['id']}",
        f"/workbench/skills/{snapshot['id']}/file?path=SKILL.md&at={CORPUS[2]}",
    ]
    urls += [f"/workbench/skills/{snapshot['id']}/file?path=%3Cimg%20src=x%20onerror=window.hit=1%3E.md"]
    urls += [base, f"{base}/disagreements", f"{base}/cases", f"{base}/versions", f"{base}/clone", "/workbench/matrix"]
    urls += [f"{base}/cases/{i}" for i in range(len(CORPUS))]
    urls += [
        f"/workbench/compare?a={made[0]}&b={made[1]}",
        f"/workbench/compare?a={made[0]}&b={made[1]}&group=regressed",
    ]
    urls += [
        f"{base}/cases?search={CORPUS[2]}&gold={CORPUS[3]}",
        f"/workbench?q={CORPUS[3]}",
        f"{base}/disagreements?rule={CORPUS[0]}",
    ]
    return [*urls, f"/workbench/experiments/{CORPUS[0]}", f"/workbench/configure?name={CORPUS[3]}&note={CORPUS[0]}"]


class Checker(HTMLParser):
    """Finds what a browser would run."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.found = []

    def handle_starttag(self, tag, attrs):
        names = dict(attrs)
        if tag == "script" and not (
            names.get("src", "").startswith("/static/") or names.get("type") == "application/json"
        ):
            self.found.append((tag, attrs))
        if tag in ("img", "svg", "iframe", "object", "embed", "base", "meta") and not (
            tag == "meta" and ("charset" in names or names.get("name") == "viewport")
        ):
            self.found.append((tag, attrs))
        for name, value in attrs:
            bad = name.startswith("on") or (
                name in ("href", "src", "action") and (value or "").strip().lower().startswith("javascript")
            )
            if bad or (name == "style" and ("url(" in (value or "") or "window.hit" in (value or ""))):
                self.found.append((tag, name, value))


@pytest.fixture(scope="module")
def evil(tmp_path_factory):
    root = tmp_path_factory.mktemp("evil")
    bench = Workbench(root / "store")
    urls = fill(bench, root / "evil")
    with TestClient(create_app(bench, StudioConfig(root=str(root / "store"))), base_url="http://127.0.0.1") as client:
        yield client, urls
    bench.close()


def test_nothing_in_the_corpus_becomes_markup(evil):
    client, urls = evil
    shown = 0
    for url in urls:
        answer = client.get(url, headers=HTML)
        assert answer.status_code in (200, 404, 405, 422), (url, answer.status_code)
        checker = Checker()
        checker.feed(answer.text)
        assert checker.found == [], url
        assert "window.hit=1</script>" not in answer.text, url
        shown += "hit=1" in answer.text
    assert shown > len(urls) // 2  # the texts are there, as text


def test_exports_do_not_run_either(evil):
    client, urls = evil
    base = next(url for url in urls if url.startswith("/workbench/experiments/ex_")).removeprefix(
        "/workbench/experiments/"
    )
    answer = client.get(f"/api/evaluations/{base}/export?kind=results&format=csv")
    assert answer.headers["content-disposition"].startswith("attachment")


@pytest.mark.browser
@pytest.mark.timeout(300)
def test_nothing_runs_in_a_browser(tmp_path, new_tab):
    with Site(tmp_path / "store") as site:
        urls = fill(site.bench, tmp_path / "evil")
        tab = new_tab()
        page = tab.page
        page.on("dialog", lambda dialog: tab.faults.append(f"dialog {dialog.message}"))
        for url in urls:
            answer = page.goto(site.url + url)
            assert page.evaluate("window.hit") is None, url
            if answer.status >= 400:
                tab.faults.clear()  # the browser notes the status of the page itself as an error
