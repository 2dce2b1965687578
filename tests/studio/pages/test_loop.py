"""The whole loop in a real Chromium, by mouse and by keyboard alone: from a file to two compared experiments."""

import re

import pytest

from rayrl.workbench.models import READER
from rayrl.workbench.reviews import list_reviews
from rayrl.workbench.samples import sample_file

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def file(tmp_path_factory, site):
    site.bench.models.save("slow-reader", {"kind": READER, "name": "slow", "options": {"latency_ms": 25}})
    name, data = sample_file("csv", 200)
    path = tmp_path_factory.mktemp("file") / name
    path.write_bytes(data)
    return path


def experiment_id(page):
    return re.search(r"ex_[0-9a-f]{16}", page.url)[0]


def test_by_mouse(site, file, new_tab, shot):
    page = new_tab().page
    page.goto(site.url)
    assert page.url.endswith("/workbench")
    shot(page, "workbench-empty")
    page.get_by_role("link", name="New experiment").click()
    page.get_by_label("file").set_input_files(file)
    page.get_by_role("button", name="Upload").click()
    assert page.locator("#m-query").input_value() == "用户query"
    page.locator("#m-domain").fill("")
    page.get_by_role("button", name="Preview").click()
    assert "200 cases, 0 rows with errors" in page.locator("#preview").inner_text()
    assert "m.domain=" in page.url
    page.locator("#m-domain").fill("垂域")
    page.get_by_role("button", name="Preview").click()
    shot(page, "workbench-mapping")
    page.get_by_role("button", name="Save data set").click()
    page.wait_for_url("**/configure?*")
    page.get_by_label("model").select_option("slow-reader")
    shot(page, "workbench-configure")
    page.get_by_role("button", name="Create and start").click()
    page.wait_for_url("**/experiments/*")
    first = experiment_id(page)
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("button", name="Resume").wait_for()
    site.ended(first, ("paused",))
    shot(page, "workbench-paused")
    counts = site.bench.experiments.get(first)["counts"]
    assert counts["pending"] > 0
    page.get_by_role("button", name="Resume").click()
    site.ended(first)
    # the page follows by itself
    page.locator(".chip", has_text="completed").first.wait_for()
    page.get_by_text("Human against model").wait_for()
    shot(page, "workbench-overview")
    page.get_by_role("link", name=re.compile("^To look at")).first.click()
    shot(page, "workbench-disagreements", full=False)
    page.get_by_role("link", name=re.compile("^disagreements ")).click()
    page.locator("td a[href*='/file?']").first.wait_for()
    row = page.locator("table[data-rows] tbody tr", has=page.locator("a[href*='/file?']")).first
    row.locator("a").first.click()
    shot(page, "workbench-case")
    cited = page.locator(".evidence header a").first
    name = cited.inner_text()
    cited.click()
    page.wait_for_url("**/file?*#cited")
    assert name.startswith(page.locator("h1").inner_text())
    assert page.locator("#cited").is_visible()
    assert page.locator(".source .cited").count() >= 2
    shot(page, "workbench-evidence")
    page.go_back()
    page.locator("#note").fill("the rule does not say which destination")
    page.get_by_role("button", name="Standard is ambiguous").click()
    page.get_by_text("The review was kept.").wait_for()
    (review,) = list_reviews(site.bench, first)
    assert (review["verdict"], review["note"]) == ("ambiguous", "the rule does not say which destination")
    page.get_by_role("link", name=re.compile("^To look at")).first.click()
    page.get_by_role("link", name=re.compile("^Clone with")).click()
    page.get_by_label("Skill").select_option(label="v2: as deployed now")
    shot(page, "workbench-clone")
    page.get_by_role("button", name="Clone and start").click()
    page.wait_for_url(re.compile(r"/experiments/ex_\w+(\?note=cloned)?$"))
    second = experiment_id(page)
    assert second != first
    site.ended(second)
    page.get_by_role("link", name="Versions").click()
    shot(page, "workbench-versions")
    page.get_by_role("link", name="compare with this").click()
    answer = page.locator("#answer").inner_text()
    assert re.search(r"(better|worse|cannot be told apart).*exact McNemar p = ", answer)
    shot(page, "workbench-compare")
    page.locator(".chips a", has_text="fixed").click()
    with page.expect_download() as download:
        page.get_by_role("link", name="CSV").click()
    assert download.value.suggested_filename.endswith(".csv")
    text = download.value.path().read_bytes().decode("utf-8-sig")
    assert text.startswith("group,case_id")


def test_by_keyboard(site, file, new_tab):
    page = new_tab().page
    keys = page.keyboard
    page.goto(site.url)
    keys.press("n")
    page.wait_for_url("**/workbench/new")
    keys.press("f")
    page.wait_for_function("document.activeElement.type === 'file'")
    with page.expect_file_chooser() as chooser:
        keys.press("Space")
    chooser.value.set_files(file)
    keys.press("Tab")
    keys.press("Enter")
    page.wait_for_url("**/uploads/*")
    keys.press("v")
    page.wait_for_url("**m.query=*")
    keys.press("g")
    page.wait_for_url("**/configure?*")
    keys.press("f")
    for _ in range(3):
        keys.press("Tab")
    keys.type("slow")
    keys.press("Escape")
    keys.press("g")
    page.wait_for_url("**/experiments/*")
    first = experiment_id(page)
    keys.press("p")
    page.get_by_role("button", name="Resume").wait_for()
    page.wait_for_load_state()  # the button is there before the script that listens to keys
    keys.press("p")
    page.get_by_role("button", name="Resume").wait_for(state="hidden")  # at work again, or through already
    site.ended(first)
    page.locator(".chip", has_text="completed").first.wait_for()
    page.get_by_role("link", name=re.compile("^Review ")).wait_for()
    keys.press("r")
    page.wait_for_url("**/cases/*review=none")
    for _ in range(40):
        if page.locator("a[data-key=e]").count():
            break
        before = page.url
        keys.press("j")
        page.wait_for_url(lambda url, before=before: url != before)
    keys.press("e")
    page.wait_for_url("**#cited")
    assert page.locator("#cited").evaluate(
        "n => { const r = n.getBoundingClientRect(); return r.top >= 0 && r.top < innerHeight }"
    )
    page.go_back()
    case = page.url
    keys.press("n")
    keys.type("looked at it")
    keys.press("Escape")
    keys.press("1")
    page.get_by_text("The review was kept.").wait_for()
    assert page.url != case
    keys.press("?")
    page.locator("dialog[open]").wait_for()
    keys.press("Escape")
    keys.press("u")
    page.wait_for_url("**/disagreements*")
    keys.press("j")
    keys.press("j")
    assert page.locator("tr[aria-selected=true]").count() == 1
    keys.press("Enter")
    page.wait_for_url("**/cases/*")
    keys.press("u")
    page.wait_for_url("**/disagreements*")
    keys.press("c")
    page.wait_for_url("**/clone")
    keys.press("n")
    keys.type("v2")
    keys.press("Escape")
    keys.press("g")
    page.wait_for_url("**note=cloned")
    second = experiment_id(page)
    assert second != first
    site.ended(second)
    keys.press("v")
    page.wait_for_url("**/versions")
    keys.press("u")
    page.wait_for_url("**/workbench")
    keys.press("x")
    page.wait_for_url("**/compare?*")
    assert f"a={first}" in page.url and f"b={second}" in page.url
    page.locator("#answer").wait_for()
    with page.expect_download() as download:
        keys.press("e")
    assert download.value.suggested_filename.startswith("compare-")


def test_without_script(site, file, new_tab):
    """Links and forms do it all where no script runs."""
    page = new_tab(java_script_enabled=False).page
    page.goto(f"{site.url}/workbench")
    page.get_by_role("button", name="Try the sample").click()
    page.wait_for_url("**/experiments/*")
    site.ended(experiment_id(page))
    page.reload()
    page.get_by_role("link", name=re.compile("^Review ")).click()
    page.get_by_role("button", name="Undecided").click()
    assert "The review was kept." in page.inner_text("main")


def test_session(site, new_tab, shot):
    page = new_tab().page
    page.goto(f"{site.url}/workbench/sessions")
    page.get_by_role("button", name=re.compile("^New session")).click()
    page.wait_for_url("**/sessions/se_*")
    page.get_by_label("Say something").fill("空调调到二十二度")
    page.keyboard.press("Control+Enter")
    page.locator("#chat .chip").first.wait_for()
    assert page.locator("#chat .step").count() >= 1
    shot(page, "workbench-session")
    page.get_by_role("button", name="Delete").click()
    page.get_by_text("The session was deleted.").wait_for()
