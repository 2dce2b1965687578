"""The shell all pages share: negotiation, catalogue, formatting, static files, errors, sign-in."""

import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from rayrl.studio.app import create_app
from rayrl.studio.config import StudioConfig
from rayrl.studio.pages import format as formats
from rayrl.studio.pages import shell
from rayrl.studio.pages.language import FOLDER, LANGUAGES, catalogue, negotiate, translator
from rayrl.studio.pages.texts import unified_lines, word_diff
from rayrl.workbench.workbench import Workbench

HTML = {"accept": "text/html,application/xhtml+xml"}
PAGES = Path(shell.__file__).parent


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    root = tmp_path_factory.mktemp("store")
    bench = Workbench(root)
    with TestClient(create_app(bench, StudioConfig(root=str(root))), base_url="http://127.0.0.1") as made:
        yield made
    bench.close()


@pytest.mark.parametrize(
    ("asked", "kept", "accept", "wanted"),
    [
        (None, None, "", "en"),
        (None, None, "zh-CN,zh;q=0.9,en;q=0.8", "zh"),
        (None, None, "de,en;q=0.3,zh;q=0.4", "zh"),
        (None, None, "zh;q=0, en;q=0.1", "en"),
        (None, "zh", "en", "zh"),
        ("en", "zh", "zh", "en"),
        ("xx", "zh", "en", "zh"),
        (None, None, "zh;q=many", "en"),
    ],
)
def test_language_is_the_asked_then_the_kept_then_the_browsers(asked, kept, accept, wanted):
    assert negotiate(asked, kept, accept) == wanted


def test_both_languages_have_the_same_messages_with_the_same_places():
    english, chinese = catalogue("en"), catalogue("zh")
    assert set(english) == set(chinese)
    for key, text in english.items():
        here, there = (set(re.findall(r"{(\w+)}", message)) for message in (text, chinese[key]))
        assert here <= there or there <= here, key  # a language may leave out what it need not say
        assert text.strip() and chinese[key].strip(), key


def used_keys():
    """Keys and prefixes of keys that templates and page modules name."""
    keys, prefixes = set(), set()
    sections = "|".join(path.stem for path in (FOLDER / "en").glob("*.yaml"))
    files = [*PAGES.rglob("*.html"), *(path for path in PAGES.rglob("*.py") if path != PAGES / "__init__.py")]
    for path in files:
        text = path.read_text(encoding="utf-8")
        for literal, rest in re.findall(r"""\bt\(\s*f?["']([\w.()]+)["'{]\s*(~|[^~])""", text):
            (prefixes if rest == "~" or literal.endswith(".") else keys).add(literal)
        for literal in re.findall(rf"""["']((?:{sections})\.[\w.]+)["']""", text):
            if not literal.endswith((".md", ".html", ".yaml")):
                (prefixes if literal.endswith(".") else keys).add(literal)
        prefixes |= set(re.findall(r"""\bt\(\s*f["']([\w.]+\.){""", text))
    prefixes |= {f"{section}.notes." for section in sections.split("|") if f"{section}.notes." in str(catalogue("en"))}
    return keys, prefixes


def test_every_message_a_page_names_exists_and_none_is_left_over():
    keys, prefixes = used_keys()
    known = set(catalogue("en"))
    assert {key for key in keys if key not in known and not any(k.startswith(key + ".") for k in known)} == set()
    assert {p for p in prefixes if not any(key.startswith(p) for key in known)} == set()
    assert {key for key in known if key not in keys and not any(key.startswith(p) for p in prefixes)} == set()


def test_plural_places_and_unknown_keys():
    t = translator("en")
    assert t("shell.progress", done=1, failed=0, running=0, total=12345).startswith("1 of 12,345")
    assert t("shell.state.unheard_of") == "unheard_of"


def test_numbers():
    assert formats.pct(0.9214) == "92.1 %" and formats.pct(None) == "–"
    assert formats.pct(-0.95, 0) == "−95 %" and formats.span({"low": -0.1, "high": 0.1}) == "−10.0 to 10.0"
    assert (
        formats.signed(-10195.66, 1) == "−10,195.7"
        and formats.span({"low": 1e4, "high": 2e4}, scale="plain") == "10,000.00 to 20,000.00"
    )
    assert formats.span_signed({"low": -18560.3, "high": -2265.5}, 1) == "−18,560.3 to −2,265.5"
    assert formats.span_signed({"low": None, "high": None}) == "" and "至" in formats.span(
        {"low": 0, "high": 1}, lang="zh"
    )
    assert formats.points(-0.034) == "−3.4" and formats.span({"low": 0.1, "high": 0.25}) == "10.0 to 25.0"
    assert formats.span({"value": None, "low": None, "high": None}) == ""
    assert formats.num(12345) == "12,345" and formats.pvalue(1e-9) == "p < 0.0001"
    assert [formats.secs(v) for v in (0.0123, 3.14, 600, 9000)] == ["12 ms", "3.1 s", "10 min", "2.5 h"]
    assert formats.size(1_500_000) == "1.5 MB" and formats.clip("abcdef", 4) == "abc…"


def test_word_diff_joins_to_both_texts():
    before, after = "多步推理 needs planning", "单步能力 needs no planning"
    segments = word_diff(before, after)
    assert "".join(s for k, s in segments if k != "ins") == before
    assert "".join(s for k, s in segments if k != "del") == after
    assert word_diff("", "") == [] and word_diff("a", "a") == [("same", "a")]
    assert [k for k, _ in unified_lines("--- a\n+++ b\n@@ -1 +1 @@\n-x\n+y\n z")] == [
        "head", "head", "hunk", "del", "ins", "same",
    ]  # fmt: skip


def test_browsers_get_error_pages_and_the_api_json(client):
    page = client.get("/nothing/<script>", headers=HTML)
    assert page.status_code == 404 and page.headers["content-type"].startswith("text/html")
    assert "<script>" not in page.text.partition("<main")[2]
    assert client.get("/api/nothing", headers=HTML).json()["error"]["type"] == "Http"
    assert client.get("/nothing").json()["error"]["message"]


def test_language_and_theme_are_kept(client):
    first = client.get("/nothing?lang=zh&theme=dark", headers=HTML)
    assert 'lang="zh-CN" data-theme="dark"' in first.text
    assert 'data-theme="dark"' in client.get("/nothing", headers=HTML).text
    client.cookies.clear()
    assert "data-theme" not in client.get("/nothing?theme=blue", headers=HTML).text


def test_static_files_and_policy(client):
    for name in ("studio.css", "studio.js", "plotly.min.js"):
        answer = client.get(f"/static/{name}")
        assert answer.status_code == 200 and len(answer.content) > 1000
    assert client.get("/static/../app.py").status_code == 404
    policy = client.get("/nothing", headers=HTML).headers["content-security-policy"]
    scripts = next(part for part in policy.split("; ") if part.startswith("script-src"))
    assert scripts == "script-src 'self'" and "default-src 'none'" in policy


def test_no_page_has_inline_script_or_handlers():
    for path in PAGES.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"<script(?![^>]*(src=|application/json))", text), path
        assert not re.search(r"\son\w+=", text), path
        assert "|safe" not in text and "| safe" not in text, path
        assert not re.search(r"""(?:src|href)=["']https?:""", text), path


def test_strings_outside_of_the_catalogue():
    """Letters between tags of a template are messages that were forgotten."""
    for path in PAGES.rglob("*.html"):
        text = re.sub(r"{#.*?#}|{%.*?%}|{{.*?}}|<!doctype[^>]*>", "", path.read_text(encoding="utf-8"), flags=re.S)
        text = re.sub(
            r"<(code|kbd|b|title)\b[^>]*>[^<]*</\1>|\bp \(\w+\)|\w+\.(yaml|jsonl?|md)\b", "", text
        )  # notation
        found = [w for w in re.findall(r">([^<]*)<", text) if re.search(r"[a-z]{2,}", w)]
        assert not found, (path, found)


def test_behind_a_token_a_browser_signs_in(tmp_path):
    bench = Workbench(tmp_path)
    app = create_app(bench, StudioConfig(root=str(tmp_path)), token="s3cret")
    with TestClient(app, base_url="http://127.0.0.1", follow_redirects=False) as client:
        led = client.get("/", headers=HTML)
        assert led.status_code == 303 and led.headers["location"] == "/sign-in"
        assert client.get("/api/evaluations").status_code == 401
        assert client.get("/sign-in", headers=HTML).status_code == 200
        assert client.post("/sign-in", data={"token": "no"}, headers=HTML).status_code == 401
        answer = client.post("/sign-in", data={"token": "s3cret"}, headers=HTML)
        assert answer.status_code == 303 and "HttpOnly" in answer.headers["set-cookie"]
        assert client.get("/api/evaluations").status_code == 200
    bench.close()


def test_all_languages_are_served():
    assert set(LANGUAGES) == {path.name for path in FOLDER.iterdir()}
