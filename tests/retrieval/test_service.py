"""Features without labels, baselines, comparison, gate, skills, answers."""

import asyncio

import numpy as np
import orjson
import pytest
import torch

from jobs.train import run_training
from learners.exact import stop_probabilities
from rayrl.errors import ConfigError, RunIncompleteError
from rayrl.retrieval import answers
from rayrl.retrieval import baselines as base
from rayrl.retrieval.compare import Units, bootstrap, weighted
from rayrl.retrieval.encoders import HashEncoder
from rayrl.retrieval.features import TopicPrior, compute, make_text_check, split_sentences
from rayrl.retrieval.gate import RetrievalGate
from rayrl.retrieval.index import build_index
from rayrl.retrieval.mdp import MdpConfig
from rayrl.retrieval.plans import all_plans, counts_as_plans, expected_returns, play_plans
from rayrl.retrieval.pools import Kind, Memory, save_pool
from rayrl.retrieval.score import detect_collapse, score
from rayrl.retrieval.skills import GateSkillProvider, bank_as_pool
from rayrl.schemas import EpisodeJob, PublicContext, Skill
from tests.jobs.training_configs import small_config
from tests.retrieval.worlds import one_hot_world, tiny_world


def small_index():
    texts = [f"memory number {i} about {'roof' if i % 2 else 'tax'}. Second sentence {i}." for i in range(20)]
    memories = [Memory(id=str(i), text=t, category=t.split()[4], domain="d") for i, t in enumerate(texts)]
    encoder = HashEncoder()
    return build_index(memories, encoder), encoder


@pytest.mark.parametrize("group", list("SLCMNEPX"))
def test_groups_switch_off(group):
    index, encoder = small_index()
    texts = ["roof memory 3?", "something else entirely"]
    q = encoder.encode(texts, "query")
    prior = TopicPrior(np.tile(q, (10, 1)), np.array([True, False] * 10), tuple(f"p{i}" for i in range(20)))
    check = make_text_check(index, encoder, HashEncoder(48))
    second = HashEncoder(48).encode(texts, "query")
    common = {"prior": prior, "check": check, "second_queries": second}
    every = compute(index, q, texts, ["a", "b"], groups="SLCMNEPX", **common)
    without = compute(index, q, texts, ["a", "b"], groups="SLCMNEPX".replace(group, ""), **common)
    names = set(every.static_names + every.candidate_names)
    fewer = set(without.static_names + without.candidate_names)
    assert fewer < names
    assert all(np.isfinite(x).all() for x in (every.static, every.candidate))


def test_a_question_never_sees_itself_in_the_topic_prior():
    index, encoder = small_index()
    texts = [f"question {i} of many" for i in range(20)]
    q = encoder.encode(texts, "query")
    ids = [f"q{i}" for i in range(20)]
    outcomes = []
    for flipped in (False, True):
        inside = np.array([i % 2 == 0 for i in range(20)])
        inside[0] ^= flipped
        features = compute(index, q[:1], texts[:1], ids[:1], groups="N", prior=TopicPrior(q, inside, tuple(ids)))
        outcomes.append(features.static)
    assert np.array_equal(*outcomes)


def test_sentences_of_both_scripts():
    assert split_sentences("One is here. Two is there! 3 is") == ["One is here.", "Two is there!", "3 is"]
    assert split_sentences("第一句在这里。第二句在那里。") == ["第一句在这里。", "第二句在那里。"]


def test_plans_expectation_is_the_mean_of_played_returns():
    for actions in (2, 3):
        config = MdpConfig(actions=actions)
        world = one_hot_world()
        plans = all_plans(world.k, actions)
        played = torch.stack(
            [play_plans(world, config, torch.full((world.rows,), i), plans).returns for i in range(len(plans))], 1
        ).numpy()
        p_a, p_slot = np.array([0.8]), np.array([[0.0, 0.25, 0.25, 0.25, 0.25]])
        expected = expected_returns(p_a, p_slot, config, plans)[0]
        weights = np.array([0.2, 0.2, 0.2, 0.2, 0.2])
        assert np.allclose(expected, weights @ played, atol=1e-5)


def test_stop_probabilities_sum_to_one():
    logs = torch.log_softmax(torch.randn(7, 5, 2), -1)
    p = stop_probabilities(logs)
    assert p.shape == (7, 6)
    torch.testing.assert_close(p.sum(1), torch.ones(7))


def test_tuned_threshold_is_at_least_as_good_as_any_fixed_rule_on_its_rows():
    world = tiny_world([[True, False, False]] * 30 + [[False] * 3] * 30, [Kind.A] * 30 + [Kind.FAR_B] * 30)
    world.candidate[:30] += 0.3
    config, weight = MdpConfig(), torch.full((60,), 1 / 60)
    choice = base.tune_threshold(world, config, weight)
    returns = base.plan_table(world, config)
    tuned = returns.gather(1, base.threshold_plan(world, choice.gate, choice.bar)[:, None]).mean()
    for n in range(4):
        assert tuned >= returns[:, n].mean() - 1e-6


@pytest.mark.parametrize("actions", [2, 3])
def test_rules_retrieve_as_many_as_they_say_and_keep_them(actions):
    config, plans = MdpConfig(actions=actions), all_plans(3, actions)
    world = tiny_world([[False, True, False]] * 4, [Kind.A] * 4)
    counts = torch.arange(4)
    played = play_plans(world, config, counts_as_plans(counts, plans), plans)
    assert torch.equal(played.retrievals, counts)
    assert torch.equal(played.held, counts)
    assert torch.equal(base.count_table(world, config)[torch.arange(4), counts], played.returns)


def test_collapse_is_seen():
    world = tiny_world([[True, False]] * 4 + [[False, False]] * 4, [Kind.A] * 4 + [Kind.NEAR_B] * 4)
    never = score(play_plans(world, MdpConfig(), torch.zeros(8, dtype=torch.int64), all_plans(2, 2)), world.kind)
    always = score(play_plans(world, MdpConfig(), torch.ones(8, dtype=torch.int64), all_plans(2, 2)), world.kind)
    assert "never retrieves" in detect_collapse(never, entropy=0.1, kl=0.0).reasons[0]
    assert "always retrieves" in detect_collapse(always, entropy=0.1, kl=0.0).reasons[0]
    assert detect_collapse(never, entropy=0.1, kl=9.0).collapsed


def test_bootstrap_covers_the_mean_and_categories_are_wider():
    rng = np.random.default_rng(0)
    category = np.repeat([f"c{i}" for i in range(20)], 10)
    effect = np.repeat(rng.normal(size=20), 10)
    values = np.full((200 + 50, 3), np.nan)
    values[:200, 0] = effect + rng.normal(size=200)
    values[:200, 1] = effect + rng.normal(size=200)
    values[200:, 2] = rng.normal(size=50)
    units = Units(values, np.concatenate([category, np.full(50, "trivia")]))
    low, high = bootstrap(units, by="question", resamples=800)
    wide = bootstrap(units, by="category", resamples=800)
    assert low < weighted(values) < high
    assert wide[1] - wide[0] > high - low


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gate")
    run_training(small_config(folder / "run"), quiet=True)
    return folder / "run" / "gate"


def test_gate_modes(trained):
    question = "慢查询治理之后 p99 是多少？"
    assert RetrievalGate(trained, mode="off").decide(question).retrieve == 0
    shadow, enforce = (RetrievalGate(trained, mode=m).decide(question) for m in ("shadow", "enforce"))
    assert not shadow.act
    assert enforce.act
    assert shadow.probability == enforce.probability
    assert len(enforce.memories) == enforce.retrieve


def test_gate_over_http_says_what_the_gate_says(trained, tmp_path):
    from starlette.testclient import TestClient

    from rayrl.studio.app import create_app
    from rayrl.studio.config import StudioConfig
    from rayrl.workbench.workbench import Workbench

    gate, question = RetrievalGate(trained), "慢查询治理之后 p99 是多少？"
    app = create_app(Workbench(tmp_path), StudioConfig(root=str(tmp_path)), gate=gate)
    with TestClient(app, base_url="http://localhost:8765") as client:
        answer = client.post("/api/gate", json={"question": question})
        assert client.post("/api/gate", json={"question": ""}).status_code == 422
    own, said = gate.decide(question), answer.json()
    assert answer.status_code == 200 and said["retrieve"] == own.retrieve
    assert said["probability"] == pytest.approx(own.probability)
    assert [m["id"] for m in said["nearest"]] == [m.id for m in own.nearest]


def test_gate_gives_what_the_policy_gave_in_evaluation(trained):
    """Serving one question computes the same probabilities as the batch evaluation did."""
    from learners.methods import first_step_probability
    from learners.training import build_run

    run = build_run(small_config(trained.parent))
    gate = RetrievalGate(trained)
    numbers = run.task.test.question.tolist()[:10]
    expected = first_step_probability(gate._policy, run.task.test, run.config.mdp)[:10]
    served = [gate.decide(run.material.questions[n].text).probability for n in numbers]
    assert served == pytest.approx(expected.tolist(), abs=1e-4)


def test_skill_provider_chooses_from_its_bank(tmp_path):
    skills = [
        Skill(skill_id=f"s{i}", content=f"how to do thing {i}", metadata={"category": f"c{i % 4}"}) for i in range(24)
    ]
    questions = [(f"please do thing {i}", [f"s{i}"]) for i in range(24)] + [(f"weather {i}", []) for i in range(24)]
    save_pool(bank_as_pool("bank", skills, questions), tmp_path / "bank")
    config = small_config(tmp_path / "run", task={"pool": str(tmp_path / "bank")}, fold={"folds": 3})
    run_training(config, quiet=True)
    gate = tmp_path / "run" / "gate"
    provider = GateSkillProvider(gate, skills)
    context = PublicContext(
        job=EpisodeJob(task_id=1, sample_id=0, seed=0, split="train"),
        instruction="please do thing 3",
        persona={},
        observation_state={},
    )
    chosen = asyncio.run(provider.select(context))
    assert all(isinstance(s, Skill) for s in chosen)
    shadow = GateSkillProvider(gate, skills, mode="shadow")
    assert asyncio.run(shadow.select(context)) == []
    assert shadow.shadowed[0][1] == tuple(s.skill_id for s in chosen)
    assert provider.identity() != shadow.identity()
    with pytest.raises(ConfigError, match="does not hold"):
        GateSkillProvider(gate, skills[:3])


def test_judge_rubric_and_replies_that_are_no_scores():
    from pathlib import Path

    rubric = orjson.loads((Path(__file__).parents[1] / "fixtures" / "returns.json").read_bytes())["judge_rubric"]
    assert list(answers.WEIGHTS) == rubric["weights"]
    assert answers.overall(dict(zip(answers.DIMENSIONS, rubric["scores"], strict=True))) == pytest.approx(
        rubric["overall"]
    )
    for bad in (
        "",
        "7",
        "{}",
        '{"relevance": 11, "accuracy": 1, "completeness": 1, "depth": 1}',
        '{"relevance": true}',
    ):
        assert answers.parse_scores(bad) is None
    assert (
        answers.parse_scores('Sure: {"relevance": 1, "accuracy": 2.5, "completeness": 0, "depth": 10} ok') is not None
    )


def ask(prompt):
    if "question 3" in prompt:
        raise ConnectionError("down")
    return f"an answer to {len(prompt)} characters"


def judge(prompt):
    return "nonsense" if "question 1" in prompt else '{"relevance": 8, "accuracy": 6, "completeness": 7, "depth": 5}'


def four_items():
    references = {"no_retrieval": (), "fixed_040": ("x" * 40,), "gate": ()}
    return [answers.Item(f"q{i}", f"question {i}", None, references) for i in range(4)]


def test_answers_resume_and_missing_scores_stay_missing(tmp_path):
    store, items = tmp_path / "answers.jsonl", four_items()
    first = answers.run_items(items, ask, judge, store)
    assert first == {"done": 9, "kept": 0, "failed": 3, "unparsed": 3}
    store.write_bytes(store.read_bytes()[:-25])  # killed in the middle of the last line
    whole = answers.read_store(store)
    assert len(whole) == 8
    second = answers.run_items(items, lambda prompt: "an answer", judge, store)
    assert second == {"done": 4, "kept": 8, "failed": 0, "unparsed": 0}
    records = answers.read_store(store)
    assert records[:8] == whole
    assert len(records) == 12
    assert [r["reply"] for r in records if r["overall"] is None] == ["nonsense"] * 3
    summary = answers.summarise(answers.records_of(items, records))
    assert summary["gate"] == {"mean": pytest.approx(6.65), "scored": 3, "missing": 1}
    assert summary["judge"] == {"replies": 8, "parsed": 6, "different_scores": 1}
    saved = answers.savings(items, answers.Prices())
    assert saved["gate_saves_against_fixed_040"]["retrievals"] == 1000
    assert saved["fixed_040"]["injected_tokens"] == pytest.approx(10_000)


def test_ways_with_one_prompt_share_an_answer_and_other_models_share_nothing(tmp_path):
    store, items, calls = tmp_path / "answers.jsonl", four_items()[:1], []

    def answer(prompt):
        calls.append(prompt)
        return f"answer {len(calls)}"

    answers.run_items(items, answer, judge, store, models="a")
    by_way = {r["way"]: r for r in answers.read_store(store)}
    assert len(calls) == 2
    assert by_way["gate"]["answer"] == by_way["no_retrieval"]["answer"] != by_way["fixed_040"]["answer"]
    assert answers.run_items(items, answer, judge, store, models="b")["done"] == 3
    assert len(calls) == 4
    assert len(answers.records_of(items, answers.read_store(store), "b")) == 3


def test_an_endpoint_that_is_down_is_said_before_the_whole_set_is_tried(tmp_path):
    def down(prompt):
        raise ConnectionError("down")

    with pytest.raises(RunIncompleteError, match="first 5 calls failed, last with ConnectionError"):
        answers.run_items(four_items(), down, judge, tmp_path / "answers.jsonl")
