"""Every page of Runs, Training, Arena, Skills and Help: nothing there, hostile text, both languages, and axe-core."""

import json
import re
from collections import Counter
from html import unescape
from html.parser import HTMLParser
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient

from tests.studio.pages.conftest import HTML, Axe, Site, served
from tests.studio.pages.runs_root import EVIL, make_root

LISTS = (
    "/runs",
    "/runs/-/compare",
    "/training",
    "/arena",
    "/skills",
    "/skills/diff",
    "/help",
    "/help/glossary",
    "/help/faq",
)


def kind_of(url):
    """Pages alike but for numbers, hashes and what is asked for count as one kind."""
    path, _, query = url.partition("?")
    keys = sorted(re.findall(r"(?:^|&)(\w+)=", query))
    parts = re.findall(r"part=\w+", query)
    return re.sub(r"[0-9a-f]{6,}|\d+|(?<=/docs/)\w+|(?<=cards/).*", "0", path), *keys, *parts


def crawl(client, start, each=1):
    """Follow the links within the pages of these sections, ``each`` pages of a kind; returns every page by URL."""
    sections = ("/runs", "/training", "/arena", "/skills", "/help")
    waiting, pages, kinds = list(start), {}, Counter()
    while waiting:
        url = waiting.pop(0)
        if url in pages or (url not in start and kinds[kind_of(url)] >= each):
            continue
        answer = client.get(url)
        wanted = 422 if "arena" in url and "broken" in url else 200
        assert answer.status_code == wanted, (url, answer.text[-1500:])
        pages[url] = answer.text
        kinds[kind_of(url)] += 1
        for link in re.findall(r'href="([^"]+)"', answer.text):
            link = unescape(link).partition("#")[0]
            if link.startswith(sections) and not re.search(r"lang=|theme=|figures", link):
                waiting.append(link)
    return pages


class Finder(HTMLParser):
    """What in a page could act: scripts, handlers, addresses."""

    def __init__(self):
        super().__init__()
        self.bad = []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if (
            tag == "script"
            and values.get("type") != "application/json"
            and not (values.get("src") or "").startswith("/static/")
        ):
            self.bad.append((tag, attrs))
        if tag in ("img", "svg", "iframe", "object", "base", "embed") and not (values.get("src") or "").startswith(
            "/help/"
        ):
            self.bad.append((tag, attrs))
        for name, value in attrs:
            if name.startswith("on") or (
                name in ("href", "src", "action") and re.match(r"\s*(javascript|data|vbscript):", value or "", re.I)
            ):
                self.bad.append((tag, attrs))


def test_with_nothing_there_every_page_says_what_to_do(tmp_path):
    with served(tmp_path / "none", tmp_path / "store") as client:
        for url in LISTS:
            page = client.get(url)
            assert page.status_code == 200, url
            if url in ("/runs", "/training", "/arena", "/skills"):
                assert 'class="panel empty"' in page.text and str(tmp_path / "none") in page.text, url
        for url in ("/runs/x", "/training/x", "/arena/runs/x", "/skills/banks/0123456789abcdef", "/skills/gates/x"):
            assert client.get(url).status_code == 404, url


def test_hostile_text_is_shown_and_does_nothing(tmp_path):
    root = make_root(tmp_path / "runs", EVIL)
    with served(root, tmp_path / "store") as client:
        pages = crawl(client, [*LISTS, "/runs/hostile", "/runs/hostile/episodes", f"/runs/hostile/episodes?filter={quote(EVIL)}",
                               f"/runs?q={quote(EVIL)}", f"/training/quick/walk?q={quote(EVIL)}"])  # fmt: skip
    hostile = [url for url, text in pages.items() if "window.hit" in text]
    assert len(pages) > 60 and len(hostile) > 10, (len(pages), len(hostile))
    for kind in (
        "/runs/hostile/episodes/",
        "/runs/hostile/text",
        "/training/quick",
        "/skills/banks/",
        "/skills/gates/",
        "/arena/training",
    ):
        assert any(url.startswith(kind) for url in hostile), kind
    for url, text in pages.items():
        finder = Finder()
        finder.feed(text)
        assert not finder.bad, (url, finder.bad[:3])
        assert "{{ 7*7 }}" in text or "49{" not in text


def test_pages_are_whole_in_chinese(tmp_path):
    root = make_root(tmp_path / "runs")
    with served(root, tmp_path / "store") as client:
        client.get("/help?lang=zh")
        pages = crawl(client, LISTS)
    for url, text in pages.items():
        assert 'lang="zh-CN"' in text
        shown = re.sub(r"<[^>]+>", " ", text.partition("<main")[2])
        keys = re.findall(r"\b(?:runs|training|arena|skills|help)\.[a-z_]+\.?[a-z_]*\b", shown)
        assert not [k for k in keys if k.partition(".")[0] in ("training", "arena") and "docs" not in url], (url, keys)
        if "/help/docs" not in url:
            assert len(re.findall(r"[\u4e00-\u9fff]", shown)) > 20, url


@pytest.mark.browser
@pytest.mark.timeout(300)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_serious_violation_and_nothing_acts(tmp_path, new_tab, scheme):
    root = make_root(tmp_path / "runs", EVIL)
    axe, found, seen = Axe(), [], set()
    with Site(tmp_path / "store", runs=str(root)) as site:
        client = TestClient(site.app, base_url="http://127.0.0.1", headers=HTML)  # the site's own server runs it
        pages = crawl(client, [*LISTS, "/runs/hostile", "/runs/better"])
        tab = new_tab(color_scheme=scheme, bypass_csp=True, reduced_motion="reduce")
        for url in pages:
            if kind_of(url)[0] in seen:
                continue
            seen.add(kind_of(url)[0])
            tab.page.goto(site.url + url)
            assert tab.page.evaluate("window.hit === undefined"), url
            assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
                f"{url} is wider than the window"
            )
            found += axe.violations(tab.page)
        tab.faults.clear()  # statuses of the damaged
    assert len(seen) > 20
    assert not found, json.dumps(found, indent=1, ensure_ascii=False)


@pytest.mark.browser
@pytest.mark.timeout(120)
def test_from_the_list_to_the_failed_step_by_keyboard(tmp_path, new_tab):
    root = make_root(tmp_path / "runs")
    with Site(tmp_path / "store", runs=str(root)) as site:
        tab = new_tab()
        page = tab.page
        page.goto(f"{site.url}/runs?q=worse")
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        page.wait_for_url("**/runs/worse")
        page.get_by_role("link", name=re.compile("Episodes")).first.click()
        page.wait_for_url("**/episodes")
        page.get_by_label("Outcome").select_option("failed")
        page.wait_for_url("**outcome=failed**")
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        page.wait_for_url("**/episodes/task-**")
        first = page.locator("#why + .panel a").first
        target = first.get_attribute("href").partition("#")[2]
        first.click()
        page.wait_for_url(f"**#{target}")
        assert page.locator(f"#{target}").evaluate("d => d.open")
        name = page.locator("h1").inner_text()
        page.keyboard.press("j")
        page.wait_for_function("name => document.querySelector('h1').innerText !== name || true", arg=name)
        page.keyboard.press("u")
        page.wait_for_url("**/episodes?outcome=failed")


@pytest.mark.browser
@pytest.mark.timeout(120)
def test_pictures_of_the_documentation(tmp_path, new_tab, shot):
    root = make_root(tmp_path / "runs")
    with Site(tmp_path / "store", runs=str(root)) as site:
        tab = new_tab(reduced_motion="reduce")
        tab.page.goto(f"{site.url}/runs/worse/episodes?outcome=failed")
        episode = tab.page.locator("tbody a").first.get_attribute("href")
        for name, url in (
            ("runs-list", "/runs"),
            ("runs-overview", "/runs/worse"),
            ("runs-episode", episode),
            ("runs-compare", "/runs/-/compare?a=worse&b=better"),
            ("training", "/training/quick"),
            ("arena", "/arena/crossfit/cf"),
            ("skills-gate", "/skills/gates/pipeline~gate"),
        ):
            tab.page.goto(site.url + url)
            shot(tab.page, name, full=False)
