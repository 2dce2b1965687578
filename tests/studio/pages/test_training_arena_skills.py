"""Training, Arena, Skills and Help over files of their shapes: figures with intervals, links, and what is damaged."""

import json
import re

import orjson
import pytest

from rayrl.studio.pages.arena import contests
from rayrl.studio.pages.help import texts
from rayrl.studio.pages.shell import HERE


def main(client, url, status=200):
    client.cookies.clear()
    answer = client.get(url)
    assert answer.status_code == status, (url, answer.text[-2000:])
    return answer.text.partition("<main")[2]


# ---- training -------------------------------------------------------------------------------------------------------
def test_trainings_are_listed_the_broken_one_with_its_problem(client):
    page = main(client, "/training")
    for name in ("quick", "trained", "broken-training"):
        assert f">{name}</a>" in page
    assert page.count("damaged</span>") == 1


def test_a_training_has_intervals_where_there_are_some_and_says_where_not(client):
    quick = main(client, "/training/quick")
    assert "5.40 to 7.40" in quick and "+0.10 to +0.70" in quick and "no clear difference" in quick
    trained = main(client, "/training/trained")
    assert "there are no intervals here" in trained and "collapsed at update 30" in trained
    shown = {f["data"][0].get("name") for f in charts(trained)}
    assert {"KL", "entropy", "share of groups without signal", "balanced return"} <= shown
    main(client, "/training/broken-training")
    main(client, "/training/nothing", 404)
    main(client, "/training/worse", 422)


def charts(page):
    found = re.findall(r'<script type="application/json">(.*?)</script>', page, re.DOTALL)
    return [orjson.loads(text) for text in found]


def test_headroom_is_the_oracle_minus_the_policy(client):
    rows = main(client, "/training/quick").partition("Left to the oracle")[2].partition("</table>")[0]
    left = [float(v) for v in re.findall(r'<td class="num">([\d.]+)</td>', rows)]
    assert left == sorted(left) and left[0] == pytest.approx(8.2 - 6.4)


def test_a_training_without_a_gate_says_so(client):
    assert "left no gate" in main(client, "/training/quick/walk?q=hello")


def test_a_damaged_gate_is_a_message(root, client):
    folder = root / "trained" / "gate"
    folder.mkdir(exist_ok=True)
    (folder / "gate.json").write_text("{}")
    assert 'role="alert"' in main(client, "/training/trained/walk?q=hello")
    main(client, "/training/trained/walk?q=" + "x" * 3000, 422)


# ---- arena ----------------------------------------------------------------------------------------------------------
def test_contests_of_every_source_are_listed(client):
    page = main(client, "/arena")
    for url in ("/arena/crossfit/cf", "/arena/training/quick", "/arena/skills/pipeline", "/arena/runs/"):
        assert url in page


def test_the_matrix_is_antisymmetric_and_readable_without_colour(client, root):
    contest = contests.crossfit(root / "cf", "cf", "cf", "known")
    there, back = contest.cell("sft_trace", "tuned_threshold"), contest.cell("tuned_threshold", "sft_trace")
    assert back["value"] == -there["value"] and (back["low"], back["high"]) == (-there["high"], -there["low"])
    assert (back["only_row"], back["only_column"]) == (2, 9)
    assert contest.hub == "sft_trace"  # nothing else was compared, so it is a list and no matrix
    page = main(client, "/arena/crossfit/cf")
    assert "<b>+1.60</b>" in page and "+1.30 to +1.90" in page and "▲" in page and "no clear difference" in page
    assert "SFT + TRACE is ahead" in page and re.search(r"Clearly better than:\s+tuned threshold", page)
    assert re.search(r"Not clearly better than:\s+SFT\.", page)
    main(client, "/arena/crossfit/cf?split=nothing", 404)
    main(client, "/arena/nothing/cf", 404)
    main(client, "/arena/crossfit/worse", 422)


def test_runs_of_the_same_tasks_meet_and_lead_to_their_comparison(client):
    url = next(u for u in re.findall(r"/arena/runs/\w+", main(client, "/arena")))
    for metric in ("reward", "success"):
        page = main(client, f"{url}?metric={metric}")
        assert "▲ +" in page and "▼ −" in page and "/runs/-/compare?a=worse&amp;b=better" in page
    assert "only row" in page
    main(client, f"{url}?metric=nothing", 422)
    main(client, "/arena/runs/000000000000", 404)


def test_the_arena_and_the_comparison_have_the_same_interval(client):
    url = next(u for u in re.findall(r"/arena/runs/\w+", main(client, "/arena")))
    arena = main(client, f"{url}?metric=reward")
    span = re.search(r"compare\?a=worse&amp;b=better.*?<small>(.*?)</small>", arena, re.S)[1]
    low, high = span.split(" to ")
    page = client.get("/runs/-/compare?a=worse&b=better&metric=reward").text
    assert f"95 % interval {low} to {high}" in page


def test_arms_without_intervals_have_no_column_for_them(client, root):
    page = main(client, "/arena/skills/pipeline")
    assert "Values with 95" not in page and page.partition("</table>")[0].count("95 %") == 0
    assert contests.skills(root / "pipeline", "pipeline", "pipeline").unpaired is False  # two arms, one pair
    of = contests.Contest("skills", "x", "x", (0, 1), [], {("all", "none"): {}, ("selected", "none"): {}})
    assert of.unpaired and not of.with_intervals


def test_a_ceiling_is_out_of_contest_and_empty_columns_are_left_out(client):
    page = main(client, "/arena/training/quick")
    assert "out of contest" in page and "only the other right" not in page
    assert "only the other right" in main(client, "/arena/crossfit/cf")


# ---- skills ---------------------------------------------------------------------------------------------------------
def test_banks_gates_and_what_was_edited_by_hand(client):
    page = main(client, "/skills")
    assert page.count("/skills/banks/") >= 2 and "/skills/gates/pipeline~gate" in page
    assert "bank-edited.json" in page and "the file was edited" in page


def banks(client):
    links = list(dict.fromkeys(re.findall(r"/skills/banks/[0-9a-f]{16}", main(client, "/skills"))))
    return {name: url for url in links for name in ("one", "two") if f"<h1>{name} " in main(client, url)}


def test_a_bank_shows_effects_reviews_evidence_and_cards(client):
    page = main(client, banks(client)["two"])
    assert "▲ +0.100 [+0.050, +0.150]" in page and "not reviewed" in page and "parent: one" in page
    assert "/runs/nested~runs~deep/episodes/task-000000__sample-000#step-0" in page
    cards = main(client, re.search(r"/skills/banks/\w+/cards/first", page)[0])
    assert "/runs/nested~runs~deep/episodes/task-000000__sample-000" in cards and "SECRET" not in cards
    main(client, "/skills/banks/0000000000000000", 404)


def test_two_banks_differ_in_words(client):
    urls = banks(client)
    old, new = (urls[name].rpartition("/")[2][:12] for name in ("one", "two"))
    page = main(client, f"/skills/diff?old={old}&new={new}")
    assert "<del>Old</del>" in page and "<ins>New</ins>" in page and "1 added" in page
    assert "hold the same" in main(client, f"/skills/diff?old={old}&new={old}")
    main(client, "/skills/diff")
    main(client, f"/skills/diff?old={old}&new=ffffffffffff", 404)


def test_a_gate_shows_each_effect_with_its_interval(client):
    page = main(client, "/skills/gates/pipeline~gate")
    assert "▲ +0.100" in page and "+0.050 to +0.150" in page and "= −0.100" in page
    assert "−1.000 to +1.000" in main(client, "/skills/gates/pipeline~gate?metric=r_option")
    main(client, "/skills/gates/pipeline~gate?metric=nothing", 404)
    main(client, "/skills/gates/worse", 422)


def test_a_gate_says_how_it_selects_and_what_its_figures_mean(root, client):
    path = root / "pipeline" / "gate" / "contributions.json"
    before = path.read_text()
    found = json.loads(before)
    looks = [
        {"pairs": 50, "accepted": [], "open": ["first"], "dropped": ["bad"]},
        {"pairs": 90, "accepted": ["first"], "open": []},
    ]
    figures = {"refit_spearman": 0.3, "reliability": None, "split_half_spearman": 0.4}
    try:
        path.write_text(json.dumps(found | {"looks": looks, "stability": figures}))
        english = main(client, "/skills/gates/pipeline~gate?lang=en")
        assert '<td class="wrap">bad</td>' in english and "Dropped as harmful" in english
        assert "look 2, after 90 pairs" in english and "Benjamini-Hochberg" in english
        assert "This gate looked 2 times" in english and "was not confirmed on other tasks" in english
        chinese = main(client, "/skills/gates/pipeline~gate?lang=zh")
        assert "第 2 次查看，90 对之后" in chinese and "没有在其他任务上确认" in chinese
        for page in (english, chinese):
            assert not any(name in page for name in figures if "_" in name)
        for one in found["contributions"]:
            one["adjusted_p"] = None
        path.write_text(json.dumps(found))
        assert "without a test" in main(client, "/skills/gates/pipeline~gate?lang=en")
    finally:
        path.write_text(before)


# ---- help -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["glossary", "faq"])
def test_help_is_whole_in_both_languages(client, name):
    english, chinese = texts.entries(name, "en"), texts.entries(name, "zh")
    assert [e.anchor for e in english] == [e.anchor for e in chinese] and len(english) > 10
    for a, b in zip(english, chinese, strict=True):
        assert a.html.strip() and re.search(r"[\u4e00-\u9fff]", b.title + b.html)
        links = [sorted(re.findall(r'href="([^"]+)"', entry.html)) for entry in (a, b)]
        assert links[0] == links[1]
    for entry in english:
        assert f'id="{entry.anchor}"' in main(client, f"/help/{name}?lang=zh")


def test_every_question_mark_leads_to_a_term():
    known = {entry.anchor for entry in texts.entries("glossary", "en")}
    used = set()
    for path in (HERE / "templates").rglob("*.html"):
        used |= set(re.findall(r"parts\.about\('([\w-]+)'\)", path.read_text(encoding="utf-8")))
    assert used and used <= known


def test_links_within_the_help_lead_somewhere(client):
    pages, seen = ["/help", "/help?lang=zh", "/help/glossary", "/help/faq"], set()
    pages += [f"/help/docs/{name}" for name, _ in texts.doc_titles()]
    assert len(pages) > 12
    for url in pages:
        page = main(client, url)
        for link in re.findall(r'(?:href|src)="(/[^"#]*)', page):
            seen.add(link.split("?")[0])
    for link in sorted(link for link in seen if not link.startswith("/static")):
        assert client.get(link, follow_redirects=True).status_code == 200, link
    for bad in (
        "/help/nothing",
        "/help/docs/nothing",
        "/help/docs/..%2ftraining",
        "/help/figures/x.svg",
        "/help/figures/x",
    ):
        assert client.get(bad).status_code == 404, bad


def test_markdown_keeps_no_html_and_no_foreign_address():
    html = texts.render(
        "# a <b>x</b>\n\n<script>x</script>\n\n[a](javascript:x) [b](../../etc) [c](//evil) [d](https://x.y) [e](skills.md#z)\n\n"
        "![p](http://evil/x.png) ![f](figures/x.svg)\n\n# a b\n\n# a b\n"
    )
    assert "<script" not in html and "<b>" not in html and "javascript:" not in re.findall(r'href="([^"]*)"', html)
    assert set(re.findall(r'(?:href|src)="([^"]*)"', html)) == {
        "https://x.y",
        "/help/docs/skills#z",
        "/help/figures/x.svg",
    }
    assert 'id="a-b"' in html and 'id="a-b-1"' in html


def test_the_contents_name_every_page_of_the_documentation(client):
    page = main(client, "/help")
    for name, title in texts.doc_titles():
        assert f'href="/help/docs/{name}"' in page and title
