"""Runs: the index over traces, lists and filters, the replay, and the comparison, over small synthetic runs."""

import re
import shutil
import time

import orjson
import pytest

from rayrl.errors import UserError
from rayrl.evaluation.diagnosis import label_record
from rayrl.evaluation.label_rates import label_rates
from rayrl.export.filters import Filter
from rayrl.studio.pages.language import translator
from rayrl.studio.pages.places import resolve, walk
from rayrl.studio.pages.runs.comparing import job_counts, metric_rows, partner, undeclared
from rayrl.studio.pages.runs.episodes import Choice, positions
from rayrl.studio.pages.runs.index import RunIndex
from rayrl.studio.pages.runs.lists import by_harm
from rayrl.testing.traces import TraceRecipe, write_run
from rayrl.traces.manifest import make_manifest
from rayrl.traces.store import RunReader
from rayrl.workbench.store import MissingError
from tests.studio.pages.conftest import served


def get(client, url, status=200):
    client.cookies.clear()  # a language once asked for is kept
    answer = client.get(url)
    assert answer.status_code == status, (url, answer.text[-2000:])
    return answer.text


def main(text):
    return text.partition("<main")[2]


# ---- places ---------------------------------------------------------------------------------------------------------
def test_places_are_found_and_names_do_not_lead_out(root, tmp_path):
    found = {place.slug for place in walk(root) if place.is_run()}
    assert found == {"worse", "better", "nested~runs~deep", "damaged", "hostile"}
    assert resolve(root, "nested~runs~deep") == root / "nested" / "runs" / "deep"
    (tmp_path / "outside").mkdir()
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link").symlink_to(tmp_path / "outside")
    for slug in ("..", "a~..~..", "", "~", ".hidden", "nothing", "link", "x\0y", "-", "a" * 5000):
        with pytest.raises(MissingError):
            resolve(inside, slug)


# ---- index ----------------------------------------------------------------------------------------------------------
def index_over(run_dir, tmp_path):
    return RunIndex(run_dir, tmp_path / "index.sqlite")


def results(index):
    return dict(index.query("SELECT episode, position FROM attempts WHERE result"))


def test_index_has_the_results_the_reader_has(root, tmp_path):
    for name in ("worse", "better"):
        index = RunIndex(root / name, tmp_path / f"{name}.sqlite")
        assert index.update(30)
        wanted = {r["episode_id"]: r.get("attempt") for r in RunReader(root / name).results()}
        found = dict(index.query("SELECT episode, attempt FROM attempts WHERE result"))
        assert {k: found[k] for k in wanted} == wanted
    assert index.meta()["torn_size"] != "-1"


def test_index_grows_with_the_file_and_never_touches_the_run(tmp_path):
    whole = tmp_path / "whole"
    write_run(whole, TraceRecipe(tasks=8, samples=2, failure_rate=0.4))
    data = (whole / "traces.jsonl").read_bytes()
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    before = sorted(p.name for p in run.iterdir())
    index = index_over(run, tmp_path)
    for cut in range(0, len(data), len(data) // 7 + 1):
        (run / "traces.jsonl").write_bytes(data[:cut])
        assert index.update(30)
    (run / "traces.jsonl").write_bytes(data)
    assert index.update(30) and index.share() == 1.0
    afresh = RunIndex(whole, tmp_path / "other.sqlite")
    afresh.update(30)
    columns = "SELECT position, episode, attempt, result, success, labels FROM attempts ORDER BY 1"
    assert index.query(columns) == afresh.query(columns)
    assert sorted(p.name for p in run.iterdir()) == before


@pytest.mark.slow
def test_a_large_file_is_read_in_a_process_of_its_own_and_the_index_is_the_same(tmp_path, monkeypatch):
    run = tmp_path / "run"
    write_run(run, TraceRecipe(tasks=6, samples=2, failure_rate=0.4))
    here = RunIndex(run, tmp_path / "here.sqlite")
    assert here.update(30)
    monkeypatch.setattr("rayrl.studio.pages.runs.index.LARGE", 0)
    away = RunIndex(run, tmp_path / "away.sqlite")
    assert not away.update(30)  # nobody waits for a process to start
    until = time.monotonic() + 60
    while not away.update(0.1):
        assert time.monotonic() < until and away.problem is None
        time.sleep(0.05)
    columns = "SELECT position, episode, attempt, result, success, labels, facts FROM attempts ORDER BY 1"
    assert away.query(columns) == here.query(columns) and len(results(away)) == 12


def test_index_begins_anew_for_another_file_and_survives_a_damaged_cache(tmp_path):
    run = tmp_path / "run"
    write_run(run, TraceRecipe(tasks=6))
    index = index_over(run, tmp_path)
    index.update(30)
    (run / "traces.jsonl").unlink()
    write_run(run, TraceRecipe(tasks=3, failure_rate=0.0))
    assert index.update(30) and len(results(index)) == 3
    index.file.write_bytes(b"not a database" * 100)
    for wal in tmp_path.glob("index.sqlite-*"):
        wal.unlink()
    with pytest.raises(UserError, match="again"):
        index.update(30)
    assert index.update(30) and len(results(index)) == 3


def test_filters_on_the_index_choose_what_they_choose_on_records(root, tmp_path):
    index = index_over(root / "worse", tmp_path)
    index.update(30)
    records = {r["episode_id"]: r for r in RunReader(root / "worse").results()}
    for text in (
        "reward < 1 and steps > 3",
        "success",
        "not completed",
        "reward_detail.r_price == 1",
        "tokens >= 4000",
    ):
        wanted = {name for name, record in records.items() if Filter(text)(record)}
        chosen = positions(index, Choice(filter=text))
        names = dict(index.query("SELECT position, episode FROM attempts"))
        assert {names[p] for p in chosen if names[p] in records} == wanted, text
    by_reward = [
        r
        for p in positions(index, Choice(sort="reward"))
        for (r,) in index.query("SELECT reward FROM attempts WHERE position=?", (p,))
    ]
    known = [r for r in by_reward if r is not None]
    assert known == sorted(known) and by_reward[len(known) :] == [None] * (len(by_reward) - len(known))


def test_label_rates_are_those_of_the_evaluation(root, client):
    page = main(get(client, "/runs/nested~runs~deep"))
    reader = RunReader(root / "nested" / "runs" / "deep")
    goals = {int(name[5:11]): goal for name, goal in reader.private_goals().items()}
    done = [r for r in reader.results() if r["status"] == "completed"]
    rates = label_rates([label_record(r, goals.get(r["job"]["task_id"])) for r in done])
    for name, item in rates["labels"].items():
        link = f'/runs/nested~runs~deep/episodes?label={name}"'
        assert (link in page) == bool(item["episodes"]), name
        if item["episodes"]:
            row = page.partition(link)[2].partition("</tr>")[0]
            assert f"{100 * item['low']:.1f} to {100 * item['high']:.1f}" in row


# ---- pages ----------------------------------------------------------------------------------------------------------
def test_labels_that_cost_most_success_come_first():
    def item(n, inside, outside):
        return {"episodes": n, "success_with": inside, "success_without": outside}

    labels = {
        "common": item(90, 0.30, 0.31),
        "sure": item(5, 0.0, None),
        "rare": item(6, 0.0, 0.3),
        "never": item(0, None, 0.3),
    }
    labels |= {"often": item(60, 0.0, 0.3), "good": item(9, 0.9, 0.2)}
    assert [name for name, _ in by_harm(labels)] == ["often", "rare", "common", "good", "sure"]


def test_list_shows_every_run_also_the_damaged(client):
    page = main(get(client, "/runs"))
    for name in ("worse", "better", "nested/runs/deep", "damaged"):
        assert f">{name}</a>" in page
    assert page.count("damaged</span>") == 1
    assert ">better</a>" not in main(get(client, "/runs?q=worse"))
    assert main(get(client, "/runs?state=running")).count("data-rows") == 0


def test_run_page_has_intervals_and_warnings(root, client):
    page = main(get(client, "/runs/better"))
    assert page.count("95 %") >= 2 and 'class="whisker"' in page
    done = len({r["episode_id"] for r in RunReader(root / "better").results() if r["status"] == "completed"})
    assert f"{done} of 48 episodes" in page
    assert "cut off" in page and "ignored" in page
    assert "不完整" in main(get(client, "/runs/better?lang=zh"))


def test_damaged_and_missing_runs_say_so(client):
    assert "damaged" in main(get(client, "/runs/damaged")) and "left out" in get(client, "/runs/damaged")
    get(client, "/runs/damaged/episodes")
    get(client, "/runs/damaged/manifest")
    for url in (
        "/runs/nothing",
        "/runs/worse~..",
        "/runs/worse/episodes/none",
        "/runs/worse/text?episode=none&part=call",
    ):
        get(client, url, 404)
    get(client, "/runs/quick", 422)


def test_episodes_page_filters_and_pages_through_every_one(client):
    url, seen = "/runs/worse/episodes?outcome=failed&sort=-steps", []
    while url:
        page = main(get(client, url))
        seen += re.findall(r'<td class="nowrap"><a href="/runs/worse/episodes/([^"?]+)', page)
        following = re.search(r'href="([^"]+)" rel="next"', page)
        url = following[1].replace("&amp;", "&") if following else None
    total = int(re.search(r"of ([\d,]+)</p>", main(get(client, "/runs/worse/episodes?outcome=failed")))[1])
    assert len(seen) == len(set(seen)) == total > 0
    wrong = main(get(client, "/runs/worse/episodes?filter=reward <"))
    assert 'value="reward &lt;"' in wrong and 'role="alert"' in wrong
    get(client, "/runs/worse/episodes?sort=; drop")
    assert "No episode matches" in main(get(client, "/runs/worse/episodes?filter=steps > 9999"))


def failed_episode(root, run="worse"):
    return next(r for r in RunReader(root / run).results() if r["status"] == "completed" and r["final"]["reward"] == 0)


def test_failed_episode_says_why_with_its_steps(root, client):
    record = failed_episode(root, "nested/runs/deep")
    name = record["episode_id"]
    goals = RunReader(root / "nested/runs/deep").private_goals()
    labels = label_record(record, goals.get(name))["labels"]
    page = main(get(client, f"/runs/nested~runs~deep/episodes/{name}"))
    why = page.partition('id="why"')[2].partition('class="split"')[0]
    assert labels and "Why it failed" in page
    for label in labels:
        for step in label["steps"][:12]:
            assert f"#step-{step}" in why and f'id="step-{step}"' in page
    assert goals[name]["asin"] not in why or goals[name]["asin"] in orjson.dumps(labels).decode()
    assert "reasoning" in page.lower() and "<details><summary" in page


def test_foreign_records_and_attempts_are_shown(root, client):
    lines = [orjson.loads(line) for line in (root / "worse" / "traces.jsonl").read_bytes().splitlines()]
    foreign = next(r for r in lines if "schema_version" in r)
    assert 'id="step-0"' in get(client, f"/runs/worse/episodes/{foreign['episode_id']}?attempt={foreign['attempt']}")
    failed = next(r for r in lines if r["status"] == "failed")
    page = main(get(client, f"/runs/worse/episodes/{failed['episode_id']}?attempt={failed['attempt']}"))
    assert 'class="problem"' in page


def test_neighbours_follow_the_filter(client):
    chosen = main(get(client, "/runs/worse/episodes?outcome=failed&sort=reward"))
    links = [u.replace("&amp;", "&") for u in re.findall(r'<td class="nowrap"><a href="([^"]+)"', chosen)][:3]
    page = get(client, links[1]).replace("&amp;", "&")
    assert f'rel="prev" href="{links[0]}"' in page and f'rel="next" href="{links[2]}"' in page


def test_long_transcripts_are_paged(tmp_path):
    run = tmp_path / "runs" / "long"
    write_run(run, TraceRecipe(experiment="long", tasks=1, failure_rate=0.0))
    record = orjson.loads((run / "traces.jsonl").read_bytes().splitlines()[0])
    first = record["steps"][0]
    record["steps"] = [{**first, "index": i} for i in range(100)]
    record["interned"] = {"texts": ["start " + "x" * 300_000 + " end"], "states": [{}], "toolsets": [[]]}
    reference = {"text": 0, "state": 0, "version": "1"}
    for step in record["steps"]:
        step.update(observation=reference, tools=0)
        step["environment"] = {"observation": reference, "done": False, "reward": 0.0}
    record["reset"]["observation"], record["conversation"] = reference, []
    (run / "traces.jsonl").write_bytes(orjson.dumps(record) + b"\n")
    with served(tmp_path / "runs", tmp_path / "store") as client:
        name = record["episode_id"]
        page = get(client, f"/runs/long/episodes/{name}?from=85")
        assert len(page) < 600_000 and 'id="step-80"' in page and 'id="step-79"' not in page
        assert "more characters" in page
        pieces = get(client, f"/runs/long/text?episode={name}&step=80&part=observation&piece=99")
        assert "piece 6 of 6" in pieces and " end</pre>" in pieces


def test_comparison_answers_in_one_sentence(client):
    page = main(get(client, "/runs/-/compare?a=worse&b=better"))
    assert re.search(r"better is better than worse on reward: 0\.\d+ against 0\.\d+ \(\+0\.\d+, 95 % interval \+", page)
    won = int(re.search(r"won (\d+)</a>", page)[1])
    rows = page.partition('id="cases"')[2]
    assert rows.count("/runs/-/side?") == min(won, 50) > 0
    turned = main(get(client, "/runs/-/compare?a=better&b=worse"))
    assert "worse is worse than better" in turned and f"lost {won}</a>" in turned
    assert "比较" in get(client, "/runs/-/compare?lang=zh") or "对比" in get(client, "/runs/-/compare?lang=zh")
    assert 'role="alert"' in get(client, "/runs/-/compare?a=worse&b=better&metric=nothing")
    get(client, "/runs/-/compare?a=worse&b=nothing", 404)


def test_a_few_equal_pairs_are_too_few_to_say_equal(client):
    page = main(get(client, "/runs/-/compare?a=nested~runs~deep&b=nested~runs~deep"))
    assert "cannot be told apart" in page and "too few pairs" in page and "No difference" not in page
    assert "配对太少" in get(client, "/runs/-/compare?a=nested~runs~deep&b=nested~runs~deep&lang=zh")


def test_what_is_not_there_is_said_in_the_readers_language(client, root):
    page = main(client.get("/runs/nope?lang=zh", headers={"accept": "text/html"}).text)
    assert f"运行根目录 {root} 下没有文件夹 nope" in page and 'href="/runs"' in page and 'href="/"' not in page
    page = main(client.get("/runs/worse/episodes/nope?lang=en", headers={"accept": "text/html"}).text)
    assert "This run has no episode nope." in page and "To the list: Runs" in page
    assert "below the runs root" in get(client, "/runs/nope", 404)


def test_a_run_may_be_named_as_the_list_shows_it(client):
    assert "too few pairs" in main(get(client, "/runs/-/compare?a=nested/runs/deep&b=nested~runs~deep"))


def test_the_suggested_partner_shares_most_episodes(client):
    page = main(get(client, "/runs/-/compare?b=worse"))
    assert '<option value="better" selected>' in page.partition("</select>")[0]


def test_other_jobs_are_counted_and_without_common_ones_nobody_is_suggested(tmp_path):
    def run(name, tasks):
        jobs = [[task, 0, 7 + (name == "c"), "train"] for task in tasks]
        (tmp_path / name).mkdir()
        manifest = make_manifest(experiment=name, semantic={"jobs": jobs}, operational={}, versions={})
        (tmp_path / name / "manifest.json").write_bytes(orjson.dumps(manifest))
        return {"slug": name, "path": tmp_path / name, "split": "train", "inside": None}

    a, b, c = run("a", range(4)), run("b", range(10, 14)), run("c", range(3, 9))
    assert partner(a, [a, b]) == "" and partner(a, [a, b, c]) == "c"
    jobs = [orjson.loads((one["path"] / "manifest.json").read_bytes())["semantic"]["jobs"] for one in (a, c)]
    assert job_counts(*jobs) == {"a": 3, "b": 5, "both": 1, "seeds": 1}
    said = undeclared(translator("en"), {"manifest_differences": [("jobs", *jobs), ("x", list(range(9)), None)]})
    assert (
        "3 only in A, 5 only in B" in said[0]
        and "1 of them have another seed" in said[0]
        and "a list of 9 in A, (none) in B" in said[1]
    )


def test_two_episodes_beside_each_other(root, client):
    name = failed_episode(root)["episode_id"]
    page = main(get(client, f"/runs/-/side?left=worse/{name}&right=better/{name}"))
    assert page.count('class="mark') >= 1 and ("They part at step" in page or "same actions" in page)
    get(client, f"/runs/-/side?left=worse/{name}&right=nothing/{name}", 404)
    get(client, f"/runs/-/side?left=worse&right={name}", 404)


def test_events_end_where_nothing_is_going_on(client):
    with client.stream("GET", "/runs/worse/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        text = "".join(answer.iter_text())
    assert "event: progress" in text and text.rstrip().endswith("data: {}")


def test_the_comparison_names_unexpected_differences(root, tmp_path, client):
    path = root / "worse" / "manifest.json"
    kept = path.read_bytes()
    manifest = orjson.loads(kept)
    manifest["semantic"]["limits"] = {"max_actions": 3}
    path.write_bytes(orjson.dumps({**manifest, "fingerprint": "0" * 64}))
    try:
        assert "also differ in limits" in get(client, "/runs/-/compare?a=worse&b=better")
    finally:
        path.write_bytes(kept)


def test_no_mark_where_the_adjusted_p_says_nothing():
    def item(p, p_holm):
        return {"mean_a": 1.0, "mean_b": 2.0, "difference": {"mean": 1.0, "low": 0.1, "high": 1.9}, "p": p, "p_holm": p_holm}  # fmt: skip

    rows = metric_rows({"metrics": {"reward": item(0.01, 0.03), "prompt_tokens": item(0.04, 0.1)}})
    assert [row["sure"] for row in rows] == [True, False]
