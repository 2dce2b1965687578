"""The workbench's pages over a small finished experiment: every view, form, filter, error and empty state."""

import html
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import unquote_plus

import numpy as np
import pytest
from starlette.testclient import TestClient

from rayrl.studio.app import create_app
from rayrl.studio.config import StudioConfig
from rayrl.studio.pages.background import Background
from rayrl.studio.pages.language import translator
from rayrl.studio.pages.workbench.analysis import bootstrap, f1s, kappas, rules
from rayrl.studio.pages.workbench.common import shown_status
from rayrl.studio.pages.workbench.comparing import difference, sentence
from rayrl.studio.pages.workbench.lists import make_sample
from rayrl.studio.pages.workbench.said import said as in_words
from rayrl.workbench.launcher import Supervisor
from rayrl.workbench.metrics import kappa
from rayrl.workbench.readers.rows import Table, unique_columns
from rayrl.workbench.results import Filter, counts, neighbours, page
from rayrl.workbench.reviews import list_reviews
from rayrl.workbench.samples import SKILL, sample_file, skill_folder
from rayrl.workbench.workbench import Workbench
from tests.studio.conftest import ThreadDriver

HTML = {"accept": "text/html"}
N = 60


class Studio:
    def __init__(self, root):
        self.bench = Workbench(root)
        config = StudioConfig(root=str(root), skills={SKILL: str(skill_folder(1)), "v2": str(skill_folder(2))})
        supervisor = Supervisor(self.bench.store, lambda e: ThreadDriver(root, e), poll_s=0.1)
        self.app = create_app(self.bench, config, supervisor=supervisor)

    def run(self, experiment_id):
        until = time.monotonic() + 60
        while self.bench.experiments.get(experiment_id)["state"] == "running":
            assert time.monotonic() < until
            time.sleep(0.05)

    def get(self, url, status=200):
        answer = self.client.get(url, headers=HTML)
        assert answer.status_code == status, re.sub("<[^>]+>", "", answer.text)[-800:]
        return answer.text

    def post(self, url, data=None, status=303, **more):
        answer = self.client.post(url, data=data, headers=HTML, follow_redirects=False, **more)
        assert answer.status_code == status, re.sub("<[^>]+>", "", answer.text)[-800:]
        return answer.headers.get("location", "") if status == 303 else answer.text


@pytest.fixture(scope="module")
def studio(tmp_path_factory):
    made = Studio(tmp_path_factory.mktemp("pages") / "store")
    with TestClient(made.app, base_url="http://127.0.0.1") as made.client:
        made.first = make_sample(made.app.state.context, N)["id"]
        made.run(made.first)
        # the second version, cloned through its form
        location = made.post(f"/workbench/experiments/{made.first}/clone", {"snapshot": "deployed:v2"})
        made.second = re.search(r"ex_\w{16}", location)[0]
        made.run(made.second)
        yield made
    made.bench.close()


def test_every_page_in_both_languages(studio):
    base = f"/workbench/experiments/{studio.first}"
    dataset = studio.bench.datasets.all()[0]
    skills = [row["id"] for row in studio.bench.snapshots.all()]
    urls = ["/workbench", "/workbench/new", "/workbench/datasets", f"/workbench/datasets/{dataset['id']}"]
    urls += [f"/workbench/configure?dataset={dataset['id']}", "/workbench/models", "/workbench/sessions"]
    urls += ["/workbench/skills", f"/workbench/skills/{skills[0]}?against={skills[1]}", "/workbench/matrix"]
    urls += [f"/workbench/skills/{skills[0]}/file?path=SKILL.md&at=默认", f"/workbench/matrix?id={studio.first}"]
    urls += ["/workbench/compare", f"/workbench/compare?a={studio.first}&b={studio.second}"]
    urls += [f"/workbench/uploads/{dataset['upload_sha256']}"]
    urls += [base + rest for rest in ("", "?view=ambiguous_removed", "/disagreements", "/cases", "/versions", "/clone")]
    urls += [base + "/cases/3", base + "/cases/0?list=cases&sort=confidence"]
    for url in urls:
        for language in ("en", "zh"):
            text = studio.get(f"{url}{'&' if '?' in url else '?'}lang={language}")
            assert text.count("<h1>") == 1 and "</html>" in text, url
            assert not re.search(r">\s*(workbench|shell)\.\w+", text), url


def test_overview_shows_figures_with_their_intervals(studio):
    text = studio.get(f"/workbench/experiments/{studio.first}?lang=en")
    metrics = studio.client.get(f"/api/evaluations/{studio.first}/metrics").json()["overall"]
    accuracy = metrics["accuracy"]
    assert f"{100 * accuracy['value']:.1f} %" in text
    assert f"95 %: {100 * accuracy['low']:.1f} to {100 * accuracy['high']:.1f}" in text
    assert text.count('class="whisker"') > 10
    for row in metrics["confusion"]["matrix"]:
        for n in row:
            assert re.search(rf"\D{n}\D", text)


def test_bootstrap_agrees_with_the_formula_and_has_width():
    matrix = np.array([[40, 10, 0, 0], [5, 45, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    found = bootstrap(matrix, kappas)
    assert found["value"] == pytest.approx(kappa(matrix)) and found["low"] < found["value"] < found["high"]
    assert 0.1 < found["high"] - found["low"] < 0.5
    assert f1s(matrix, 2).tolist() == pytest.approx([80 / 95, 90 / 105])
    assert bootstrap(np.zeros((4, 4), dtype=int), kappas)["value"] is None
    assert bootstrap(np.diag([7, 0, 0, 0]), kappas)["value"] is None  # chance agreement is perfect


def test_difference_has_width_even_where_nothing_changed():
    found = difference({"n": 100, "fixed": 0, "regressed": 0, "delta": {"accuracy": 0.0}})
    assert found["low"] < 0 < found["high"]
    found = difference({"n": 600, "fixed": 31, "regressed": 11, "delta": {"accuracy": 20 / 600}})
    assert 0 < found["low"] < 20 / 600 < found["high"]


def test_rules_name_what_errors_rest_on(studio):
    text = studio.get(f"/workbench/experiments/{studio.first}/disagreements?lang=en")
    wrong = page(studio.bench, studio.first, Filter(agrees=False, repeat=0), limit=500)["items"]
    refs = {ref for row in wrong for ref in row["evidence_refs"]}
    assert refs or any(row["evidence"] == "none" for row in wrong)
    for ref in refs:
        assert ref in text
    if refs:
        ref = sorted(refs)[0]
        only = studio.client.get(
            f"/workbench/experiments/{studio.first}/disagreements", params={"rule": ref}, headers=HTML
        )
        mine = {row["case_id"] for row in wrong if ref in row["evidence_refs"]}
        shown = set(re.findall(r"/cases/\d+\?[^>]*>(\w+)<", only.text))
        assert shown == mine


def test_errors_without_a_rule_are_divided_by_what_was_read(studio):
    wrong = page(studio.bench, studio.first, Filter(agrees=False, evidence="none", repeat=0), limit=500)["items"]
    every = rules(studio.app.state.context, studio.bench.experiments.get(studio.first))
    found = [one for one in every if not one["ref"]]
    assert wrong and sum(one["wrong"] for one in found) == len(wrong)
    assert len({one["files"] for one in found}) == len(found) <= 6
    url = f"/workbench/experiments/{studio.first}/disagreements"
    text = unquote_plus(html.unescape(studio.get(f"{url}?lang=en")))
    seen: set[str] = set()
    named = [one for one in found if one["files"] is not None]
    assert len(named) == min(5, len(found)) and "other files were read" in text
    for one in named:
        read = json.dumps(one["files"], ensure_ascii=False)
        assert ", ".join(one["files"]) in text and f"read={read}" in text
        only = studio.client.get(url, params={"read": read}, headers=HTML)
        shown = set(re.findall(r"/cases/\d+\?[^>]*>(\w+)<", only.text))
        assert len(shown) == one["wrong"] and not shown & seen
        seen |= shown
    assert seen < {row["case_id"] for row in wrong}
    studio.get(f"{url}?read=nonsense", 422)


def test_filters_pages_and_neighbours_agree(studio):
    filters = Filter(disagreements=True, repeat=0)
    total = counts(studio.bench, studio.first, {"n": filters})["n"]
    rows = page(studio.bench, studio.first, filters, limit=500)["items"]
    assert total == len(rows) > 3
    order = [row["ordinal"] for row in rows]
    before, after = neighbours(studio.bench, studio.first, filters, order[1])
    assert (before, after) == ((order[0], 0), (order[2], 0))
    assert neighbours(studio.bench, studio.first, filters, order[0])[0] is None
    assert neighbours(studio.bench, studio.first, filters, order[-1])[1] is None
    text = studio.get(f"/workbench/experiments/{studio.first}/cases/{order[1]}?list=disagreements")
    assert f'rel="prev" href="/workbench/experiments/{studio.first}/cases/{order[0]}?' in text
    assert f'rel="next" href="/workbench/experiments/{studio.first}/cases/{order[2]}?' in text
    assert studio.get(f"/workbench/experiments/{studio.first}/cases?prediction=fast&agrees=0&lang=en")
    assert "Nothing matches" in studio.get(f"/workbench/experiments/{studio.first}/cases?search=zzz&lang=en")
    studio.get(f"/workbench/experiments/{studio.first}/cases?max_confidence=lots", 422)


def test_paging_by_keyset_reaches_every_case(studio):
    url, seen = f"/workbench/experiments/{studio.first}/cases", []
    while url:
        text = studio.get(url)
        seen += re.findall(r"/cases/(\d+)\?list=cases", text) or re.findall(r"/cases/(\d+)\?", text)
        found = re.search(r'href="([^"]+)" rel="next"', text)
        url = found[1].replace("&amp;", "&") if found else None
    assert sorted(set(map(int, seen))) == list(range(N))


def test_evidence_opens_at_the_section(studio):
    row = next(r for r in page(studio.bench, studio.first, Filter(), limit=500)["items"] if r["evidence_refs"])
    text = studio.get(f"/workbench/experiments/{studio.first}/cases/{row['ordinal']}")
    href = re.search(r'href="(/workbench/skills/[^"]+/file\?[^"]+#cited)"', text)[1].replace("&amp;", "&")
    shown = studio.get(href)
    assert shown.count('id="cited"') == 1
    heading = row["evidence_refs"][0].partition("#")[2]
    marked = re.findall(r'class="cited[^"]*"><span>.*?</span><span>(.*?)</span>', shown)
    assert heading in marked[0].replace(" ", "-")
    path = row["evidence_refs"][0].partition("#")[0]
    snapshot = studio.bench.experiments.get(studio.first)["snapshot_id"]
    gone = studio.client.get(f"/workbench/skills/{snapshot}/file", params={"path": path, "at": "gone"}, headers=HTML)
    assert gone.status_code == 200 and 'id="cited"' not in gone.text
    studio.get(f"/workbench/skills/{snapshot}/file?path=../../etc/passwd", 404)


def test_review_by_form_goes_on_and_guards_against_a_lost_update(studio):
    start = studio.client.get(f"/workbench/experiments/{studio.second}/review", headers=HTML, follow_redirects=False)
    url = start.headers["location"]
    ordinal = int(re.search(r"/cases/(\d+)", url)[1])
    text = studio.get(url)
    following = re.search(r'name="next" value="([^"]+)"', text)[1].replace("&amp;", "&")
    form = {"verdict": "ambiguous", "note": "二者皆可", "reviewer": "小美", "version": "0", "next": following}
    post = f"/workbench/experiments/{studio.second}/cases/{ordinal}/review"
    assert studio.post(post, form).startswith(following)
    stale = studio.post(post, form | {"note": "from a stale page"}, 412)
    assert "from a stale page" in stale  # what was typed is not lost
    assert [(r["note"], r["reviewer"]) for r in list_reviews(studio.bench, studio.second)] == [("二者皆可", "小美")]
    assert 'value="小美"' in studio.get(url)  # the next review is theirs too
    studio.post(post, form | {"verdict": "fine", "version": "1"}, 422)
    elsewhere = studio.post(post, form | {"version": "1", "next": "https://example.org/"})
    assert elsewhere.startswith(f"/workbench/experiments/{studio.second}")


def test_upload_map_preview_and_freeze_by_form(studio):
    name, data = sample_file("jsonl", 12)
    location = studio.post("/workbench/datasets", files={"file": (name, data)})
    text = studio.get(location)
    assert 'value="data.query"' in text and "annotation.label" in text
    fields = {"m.query": "data.query", "m.gold_route": "annotation.label", "m.domain": "nowhere.at.all"}
    fields |= {"labels": "fast = 快, 0\nslow = 慢, 1", "name": "by form", "profile_name": "by form"}
    wrong = studio.post(location, fields, 422)
    assert "nowhere.at.all" in wrong and 'class="problem"' in wrong
    fields["labels"] = "fast = 快\nslow = 快"
    assert "stands for both" in studio.post(location, fields | {"m.domain": ""}, 422)
    fields["labels"] = "fast = 快, 0\nslow = 慢, 1"
    kept = studio.post(location, fields | {"m.domain": ""})
    dataset = studio.bench.datasets.get(re.search(r"ds_\w{16}", kept)[0])
    assert (dataset["name"], dataset["n_cases"], dataset["n_labelled"]) == ("by form", 12, 12)
    assert "by form v1" in studio.get(kept)
    studio.post("/workbench/datasets", status=422, files={"file": ("empty.csv", b"")})
    broken = studio.post("/workbench/datasets", files={"file": ("x.csv", b'a,b\n"open,1\n')})
    assert 'class="problem"' in studio.get(broken, 422)


def test_rows_with_errors_are_shown_and_left_out_only_on_request(studio):
    data = "query,label\n去公司,快\n,慢\n听歌,也许\n".encode()
    location = studio.post("/workbench/datasets", files={"file": ("errors.csv", data)})
    text = studio.get(location + "?lang=en")
    assert "1 cases, 2 rows with errors" in text and "也许" in text
    fields = {"m.query": "query", "m.gold_route": "label", "labels": "fast = 快\nslow = 慢", "name": "errors"}
    assert "2 of 3 rows cannot be used" in studio.post(location, fields, 422)
    kept = studio.post(location, fields | {"skip_errors": "1"})
    assert studio.bench.datasets.get(re.search(r"ds_\w{16}", kept)[0])["n_rejected"] == 2


def test_configure_create_and_actions(studio):
    dataset = studio.bench.experiments.get(studio.first)["dataset_id"]
    bad = studio.post("/workbench/experiments", {"dataset": dataset, "snapshot": "sk_0", "model": "reader"}, 422)
    assert "problem" in bad
    form = {"dataset": dataset, "snapshot": f"deployed:{SKILL}", "model": "reader", "start": "0", "repeats": "99"}
    assert "repeats" in studio.post("/workbench/experiments", form, 422)
    made = studio.post("/workbench/experiments", form | {"repeats": "2", "name": "steady"})
    found = re.search(r"ex_\w{16}", made)[0]
    base = f"/workbench/experiments/{found}"
    assert '<details class="fold" open>' in studio.get(base)  # the configuration is open until it runs
    assert studio.post(f"{base}/pause", status=409)
    studio.post(f"{base}/concurrency", {"concurrency": "3"})
    assert studio.bench.experiments.get(found)["concurrency"] == 3
    studio.post(f"{base}/start")
    assert '<details class="fold" open>' not in studio.get(base)
    studio.run(found)
    assert "repeats that differ" in studio.get(base + "?lang=en")
    assert "note=retry_none" in studio.post(f"{base}/retry", {"which": "failed"})
    assert studio.post(f"{base}/unheard_of", status=409)
    assert "steady" in studio.get("/workbench?q=stead") and "steady" not in studio.get("/workbench?q=other")


def test_a_concurrency_out_of_bounds_is_an_error_that_names_them(studio):
    made = studio.bench.experiments.clone(studio.first, {"name": "bounds"})["id"]
    for value in ("100000", "0", "", "-1", "many"):
        for language, said in (("en", "from 1 to 256"), ("zh", "1 到 256")):
            url = f"/workbench/experiments/{made}/concurrency?lang={language}"
            assert said in studio.post(url, {"concurrency": value}, 422)
    assert (
        studio.bench.experiments.get(made)["concurrency"] == studio.bench.experiments.get(studio.first)["concurrency"]
    )
    experiment = studio.bench.experiments.get(studio.first)
    data = {
        "dataset": experiment["dataset_id"],
        "snapshot": experiment["snapshot_id"],
        "model": "reader",
        "name": "kept",
    }
    text = studio.post("/workbench/experiments?lang=en", data | {"concurrency": "300"}, 422)
    assert "from 1 to 256" in text and 'value="300"' in text and 'value="kept"' in text
    assert f"/{studio.first}/concurrency" not in studio.get(f"/workbench/experiments/{studio.first}")
    studio.post(f"/workbench/experiments/{studio.first}/concurrency", {"concurrency": "3"}, 409)
    assert f"/{made}/concurrency" in studio.get(f"/workbench/experiments/{made}")


def test_badge_and_passing_notes_go_when_the_work_has_ended(studio):
    text = studio.get(f"/workbench/experiments/{studio.first}?note=resume&lang=en")
    assert '<div id="said" data-live></div>' in text and '<span id="badge-workbench" data-live></span>' in text
    assert "Cloned and started" in studio.get(f"/workbench/experiments/{studio.first}?note=cloned&lang=en")
    made = studio.bench.experiments.clone(studio.first, {"name": "noted"})["id"]
    assert "Goes on." in studio.get(f"/workbench/experiments/{made}?note=resume&lang=en")


def test_what_an_address_names_and_is_not_there_is_said(studio):
    for name, said in (("dataset", "There is no data set nope"), ("snapshot", "There is no Skill snapshot nope")):
        assert said in studio.get(f"/workbench/configure?{name}=nope&lang=en", 422)
    assert "没有数据集 nope" in studio.get("/workbench/configure?dataset=nope&lang=zh", 422)
    cases = f"/workbench/experiments/{studio.first}/cases"
    for query in ("agrees=maybe", "max_confidence=a"):
        text = html.unescape(studio.get(f"{cases}?{query}&lang=en", 422))
        name, _, value = query.partition("=")
        assert f"{name} = '{value}'" in text


def test_one_case_runs_again_and_keeps_its_history(studio):
    row = page(studio.bench, studio.second, Filter(), limit=1)["items"][0]
    base = f"/workbench/experiments/{studio.second}"
    here = f"{base}/cases/{row['ordinal']}"
    assert studio.post(f"{base}/retry", {"which": "cases", "case": row["case_id"], "next": here}).startswith(here)
    studio.run(studio.second)
    assert len(studio.client.get(f"/api/evaluations/{studio.second}/cases/{row['ordinal']}").json()["attempts"]) == 2
    assert "attempt=1" in studio.get(here) and studio.get(f"{here}?attempt=1")


def test_repair_makes_a_data_set_to_run_on(studio):
    row = next(r for r in page(studio.bench, studio.first, Filter(agrees=False), limit=5)["items"])
    base = f"/workbench/experiments/{studio.first}"
    studio.post(f"{base}/cases/{row['ordinal']}/review", {"verdict": "model_right", "version": "0"})
    location = studio.post(f"{base}/repair")
    repaired = studio.bench.datasets.get(re.search(r"ds_\w{16}", location)[0])
    assert repaired["version"] == 2 and repaired["parent_id"]


def test_comparison_answers_in_one_sentence(studio):
    text = studio.get(f"/workbench/compare?a={studio.first}&b={studio.second}&lang=en")
    answer = re.search(r'id="answer"><b>(.*?)</b>', text)[1]
    assert "exact McNemar p = " in answer and "common cases" in answer
    same = studio.get(f"/workbench/compare?a={studio.first}&b={studio.first}&lang=en")
    assert "cannot be told apart" in same
    studio.get(f"/workbench/compare?a={studio.first}&b=ex_0000000000000000", 404)


def test_matrix_by_form(studio):
    dataset = studio.bench.experiments.get(studio.first)["dataset_id"]
    skills = [row["id"] for row in studio.bench.snapshots.all()][:2]
    assert "problem" in studio.post("/workbench/matrix", {"dataset": dataset, "model": "reader"}, 422)
    location = studio.post("/workbench/matrix", {"dataset": dataset, "snapshot": skills, "model": ["reader"]})
    ids = re.findall(r"ex_\w{16}", location)
    assert len(ids) == 2
    for one in ids:
        studio.run(one)
    assert studio.get(location).count('<td><a href="/workbench/experiments/') == 2


def test_sessions_by_form(studio):
    location = studio.post("/workbench/sessions", {"skill": SKILL, "model": "reader", "classes": "fast, slow"})
    assert studio.post(f"{location}/send", {"text": "把空调调到二十度"}).startswith(location)
    text = studio.get(location)
    assert "把空调调到二十度" in text and "read_file" in text
    studio.post(f"{location}/send", {"text": " "}, 422)
    studio.post("/workbench/sessions", {"skill": "none", "model": "reader"}, 422)
    studio.post(f"{location}/delete")
    studio.get(location, 404)


def test_models_by_form_may_not_name_code(studio):
    body = '{"kind": "openai", "base_url": "http://127.0.0.1:9/v1", "name": "m"}'
    studio.post("/workbench/models", {"name": "endpoint", "body": body})
    assert "endpoint" in studio.get("/workbench/models")
    for wrong in ("{", "[]", '{"kind": "os:system", "name": "x"}'):
        assert "problem" in studio.post("/workbench/models", {"name": "bad", "body": wrong}, 422)


@pytest.mark.parametrize(
    "body",
    ['{"kind": "nope"}', '{"kind": "os:system", "name": "m"}', '{"kind": "openai", "base_url": 5, "name": "m"}', "[1]"],
)
def test_a_model_that_is_not_valid_keeps_what_was_typed(studio, body):
    text = studio.post("/workbench/models", {"name": "typed", "body": body}, status=422)
    assert 'value="typed"' in text and html.escape(body, quote=True).replace("&quot;", "&#34;") in text


def test_a_model_name_has_a_limit_in_both_languages(studio):
    data = {"name": "n" * 81, "body": '{"kind": "scripted"}'}
    for language, said in (("en", "at most 80 characters"), ("zh", "最多 80 个字符")):
        assert said in studio.post(f"/workbench/models?lang={language}", data, status=422)
    assert all(len(row["name"]) <= 80 for row in studio.bench.models.all())


def test_nothing_in_common_is_said_without_numbers():
    overall = {"n": 0, "fixed": 0, "regressed": 0, "delta": {"accuracy": None}, "p_value": 1.0}
    overall |= {"verdict": "no_common_cases", "needed_discordant": None}
    for language in ("en", "zh"):
        text = sentence(translator(language), overall, ("old", "new"))
        assert "old" in text and "new" in text and not re.search(r"\d", text)


def test_snapshots_by_form_only_of_permitted_folders(studio):
    assert studio.post("/workbench/skills", {"skill": SKILL}).startswith("/workbench/skills/sk_")
    assert "problem" in studio.post("/workbench/skills", {"repository": "/etc"}, 422)
    inside = str(skill_folder(1))
    assert "problem" in studio.post("/workbench/skills", {"repository": inside, "path": "../../.."}, 422)
    assert studio.post("/workbench/skills", {"repository": inside}).startswith("/workbench/skills/sk_")


def test_the_permitted_folders_are_named_and_typed_fields_stay(studio):
    inside = str(skill_folder(1).resolve())
    assert f">{inside}</code>" in studio.get("/workbench/skills")
    typed = {"repository": "/etc", "ref": "v9", "path": "sub", "next": "/workbench/configure?dataset=x"}
    for language, said in (("en", "is not below a permitted folder"), ("zh", "不在允许的文件夹之下")):
        text = studio.post(f"/workbench/skills?lang={language}", typed, 422)
        problem = re.search(r'role="alert">(.*?)</div>', text)[1]
        assert said in problem and inside in problem and "--skill-root" in problem and "skill_roots" in problem
        for value in typed.values():
            assert f'value="{value}"' in text


def test_a_folder_is_called_deployed_only_where_it_is(studio):
    row = {"status": "deployed", "source": str(skill_folder(1))}
    ctx = studio.app.state.context
    assert shown_status(ctx, row) == "deployed"
    assert shown_status(ctx, row | {"source": "/somewhere/else"}) == "folder"
    assert shown_status(ctx, row | {"status": "draft"}) == "draft"


def test_forms_of_other_origins_are_refused(studio):
    headers = HTML | {"origin": "https://evil.example"}
    answer = studio.client.post("/workbench/sample", headers=headers, follow_redirects=False)
    assert answer.status_code == 403 and answer.headers["content-type"].startswith("text/html")


def test_missing_things_are_pages(studio):
    for url in ("ex_0000000000000000", "ex_0000000000000000/cases", "nonsense"):
        text = studio.get(f"/workbench/experiments/{url}", 404)
        assert "<nav" in text and "problem" in text
    studio.get(f"/workbench/experiments/{studio.first}/cases/99999", 404)
    studio.get("/workbench/datasets/ds_0000000000000000", 404)


def test_empty_store(tmp_path):
    bench = Workbench(tmp_path)
    with TestClient(create_app(bench, StudioConfig(root=str(tmp_path))), base_url="http://127.0.0.1") as client:
        assert "No experiment yet" in client.get("/workbench?lang=en", headers=HTML).text
        for url in ("datasets", "skills", "sessions", "compare", "matrix", "configure", "models", "new"):
            assert client.get(f"/workbench/{url}", headers=HTML).status_code == 200
    bench.close()


def test_background_keeps_the_last_value_while_the_next_is_made():
    import threading

    gate = threading.Event()
    background = Background()
    assert background.get("k", 1, lambda: "one", wait_s=5) == "one"
    assert background.get("k", 1, lambda: 1 / 0, wait_s=5) == "one"

    def slow():
        gate.wait(10)
        return "two"

    assert background.get("k", 2, slow, wait_s=0.01) == "one"
    assert background.get("k", 3, lambda: "three", wait_s=0.01) == "one"  # one computation at a time
    gate.set()
    assert background.get("k", 2, slow, wait_s=5) == "two"
    with pytest.raises(ZeroDivisionError):
        background.get("new", 1, lambda: 1 / 0, wait_s=5)
    assert background.get("new", 1, lambda: "again", wait_s=5) == "again"


def test_one_number_of_disagreements_throughout(studio):
    base = f"/workbench/experiments/{studio.first}"
    accuracy = studio.client.get(f"/api/evaluations/{studio.first}/metrics").json()["overall"]["accuracy"]
    wrong = accuracy["n"] - accuracy["successes"]
    wanted = {"w": Filter(disagreements=True, repeat=0), "o": Filter(agrees=False, repeat=0, review="none")}
    wide, open_ = counts(studio.bench, studio.first, wanted).values()
    assert wide > wrong > 0
    text = studio.get(f"{base}/disagreements?lang=en")
    assert f"To look at <span>{wide}</span>" in text and f"disagreements {wrong}</a>" in text
    assert f"Run {wrong} disagreements again" in text
    assert f"Review {open_} disagreements" in text
    queue = studio.client.get(f"{base}/review", headers=HTML, follow_redirects=False).headers["location"]
    assert "agrees=0" in queue and "review=none" in queue


def test_pages_say_that_they_count_while_the_numbers_are_being_made(studio, monkeypatch):
    monkeypatch.setattr("rayrl.studio.pages.workbench.common.tab_counts", lambda ctx, experiment: None)
    for part in ("", "/disagreements", "/cases", "/versions"):
        assert "data-poll" in studio.get(f"/workbench/experiments/{studio.first}{part}")


def test_a_case_that_agrees_is_not_reviewed_as_if_it_differed(studio):
    base = f"/workbench/experiments/{studio.first}/cases"
    agreed = page(studio.bench, studio.first, Filter(agrees=True, evidence="supported", repeat=0), limit=1)["items"][0]
    text = studio.get(f"{base}/{agreed['ordinal']}?list=disagreements&agrees=0&lang=en")
    assert "Label and verdict are right" in text and 'value="model_right"' not in text
    assert "not in the list: To look at" in text
    wrong = page(studio.bench, studio.first, Filter(agrees=False, repeat=0), limit=1)["items"][0]
    text = studio.get(f"{base}/{wrong['ordinal']}?list=disagreements&lang=en")
    assert "Human label is right" in text and 'value="model_right"' in text and "not in the list" not in text


def test_ragged_rows_and_foreign_labels_by_form(studio):
    data = b"id,text,category\n1,win money,spam\n2,hello,ham\n3,a,b,c\n4,hi,ham\n"
    location = studio.post("/workbench/datasets", files={"file": ("mail.csv", data)})
    text = studio.get(location + "?lang=en")
    assert "3 cases, 1 rows with errors, 0 without a label" in text and "4 fields, but the header has 3" in text
    assert "leave out 1 row with an error" in text and "ham = \nspam = " in text
    fields = {"m.query": "text", "m.gold_route": "category", "labels": "ham =\nspam =", "name": "mail"}
    assert "1 of 4 rows cannot be used" in studio.post(location, fields, 422)
    kept = studio.post(location, fields | {"skip_errors": "1"})
    made = studio.bench.datasets.get(re.search(r"ds_\w{16}", kept)[0])
    assert (made["n_cases"], made["n_labelled"], made["n_rejected"]) == (3, 3, 1)
    assert "No case has a label" in studio.get(f"{location}?lang=en&m.query=text&labels=a%0Ab")


def test_versions_can_be_told_apart_and_equal_contents_are_one_choice(studio):
    text = studio.get(f"/workbench/experiments/{studio.first}/clone?lang=en")
    choices = re.findall(r'<option value="sk_\w+"[^>]*>([^<]*)<', text)
    versions = [re.search(rf"{SKILL} (v\d) @ ", choice)[1] for choice in choices]
    assert sorted(versions) == ["v1", "v2"] and "as before" in text


def test_addresses_that_lead_nowhere_are_said_in_plain_words(studio):
    base = f"/workbench/experiments/{studio.first}"
    assert "There is no such page" in studio.get(f"{base}/figures?lang=en", 404)
    text = studio.get("/workbench/experiments/ex_1?lang=en", 404)
    assert "a mistyped or shortened id" in text and "String should match" not in text
    assert "地址中有一部分不正确" in studio.get("/workbench/experiments/ex_1?lang=zh", 404)
    assert studio.client.get("/api/evaluations/ex_1").status_code == 422


def test_what_readers_say_is_said_in_the_language_of_the_page(studio):
    name, data = sample_file("csv", 20)
    location = studio.post("/workbench/datasets", files={"file": (name, data)})
    chinese = studio.get(f"{location}?lang=zh")
    assert "已按 GB18030 读取" in chinese and "read as GB18030" not in chinese and "第 2 行" in chinese
    assert "it was read as GB18030" in studio.get(f"{location}?lang=en")
    case = f"/workbench/experiments/{studio.first}/cases/3"
    assert "结论已记录" in studio.get(f"{case}?lang=zh") and "The verdict was recorded." in studio.get(
        f"{case}?lang=en"
    )
    table = Table("csv", [], [], [])
    unique_columns(["a", "a"], table.warnings)
    zh, en = translator("zh"), translator("en")
    assert (
        in_words(zh, table.warnings[0]).startswith("第 2 列") and in_words(en, table.warnings[0]) == table.warnings[0]
    )
    assert in_words(zh, "anything else") == "anything else"


def test_an_upload_without_a_file_says_so(studio):
    for sent in ({"data": {"x": "1"}}, {"files": {"file": ("", b"")}}, {"data": {"file": "text"}}):
        for language, wanted in (("en", "Choose a file first."), ("zh", "请先选择文件")):
            answer = studio.client.post(f"/workbench/datasets?lang={language}", headers=HTML, **sent)
            assert answer.status_code == 422 and wanted in answer.text, answer.text[-500:]


def test_overview_and_comparison_lead_to_exports_and_terms(studio):
    text = studio.get(f"/workbench/experiments/{studio.first}")
    text += studio.get(f"/workbench/compare?a={studio.first}&b={studio.second}")
    assert "/cases#exports" in text and f"/api/evaluations/{studio.first}/bundle" in text
    glossary = studio.get("/help/glossary")
    linked = set(re.findall(r'href="/help/glossary#([\w-]+)"', text))
    assert {"macro-f1", "kappa", "discordant", "flips"} <= linked
    assert all(f'id="{anchor}"' in glossary for anchor in linked)


def test_a_form_sent_twice_makes_one_experiment(tmp_path):
    made = Studio(tmp_path / "store")
    made.app.state.context.supervisor = None
    made.client = TestClient(made.app, base_url="http://127.0.0.1")  # not entered: no supervisor runs it
    once = {"once": re.search(r'name="once" value="([\w-]+)"', made.get("/workbench"))[1]}
    with ThreadPoolExecutor(3) as clicks:
        (sample,) = set(clicks.map(lambda _: made.post("/workbench/sample", once), range(3)))
    (row,) = made.bench.experiments.page()
    assert row["id"] in sample

    def facts(address):
        key = re.search(r'name="once" value="([\w-]+)"', made.get(address))[1]
        return {"once": key, "dataset": row["dataset_id"], "snapshot": row["snapshot_id"], "model": "reader"}

    for address, action in (("configure", "experiments"), (f"experiments/{row['id']}/clone",) * 2):
        filled = facts(f"/workbench/{address}")
        location = made.post(f"/workbench/{action}", filled)
        assert made.post(f"/workbench/{action}", filled) == location
        assert made.post(f"/workbench/{action}", filled | {"model": "shaky-reader"}) != location, "another content"
        assert made.post(f"/workbench/{action}", facts(f"/workbench/{address}")) != location, "the form shown anew"
    assert len(made.bench.experiments.page()) == 1 + 2 * 3
    made.bench.close()
