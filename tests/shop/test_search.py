"""The in-memory index against SQLite's FTS5, which the protocol's ranking is defined by."""

from __future__ import annotations

import random
import sqlite3
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrl.shop.catalogue import build_catalogue, load_products
from rayrl.shop.generator import generate_catalogue
from rayrl.shop.search import COLUMNS, WEIGHTS, SearchIndex, document
from rayrl.shop.text import terms

from .conftest import PRODUCTS

RECORDED = build_catalogue(load_products(PRODUCTS))
GENERATED = build_catalogue(generate_catalogue(600, 3))
INDEX = SearchIndex(list(RECORDED.products.values()))


def fts5(products: list[object]) -> sqlite3.Connection:
    db = sqlite3.connect(":memory:")
    db.execute(f"create virtual table docs using fts5(id unindexed, {', '.join(COLUMNS)})")
    for product in products:
        texts = [" ".join(terms(text)) for text in document(product)]  # type: ignore[arg-type]
        db.execute(f"insert into docs values (?{', ?' * len(COLUMNS)})", (product.asin, *texts))  # type: ignore[attr-defined]
    return db


@pytest.mark.parametrize("catalogue", [RECORDED, GENERATED], ids=["recorded", "generated"])
def test_ranking_equals_fts5(catalogue: object) -> None:
    products = list(catalogue.products.values())  # type: ignore[attr-defined]
    index, db = SearchIndex(products), fts5(products)
    rng = random.Random(1)
    vocabulary = sorted({t for p in products for text in document(p) for t in terms(text)})
    rank = f"bm25(docs, 0, {', '.join(map(str, WEIGHTS))})"
    for _ in range(300):
        words = rng.sample(vocabulary, rng.randint(1, 7))
        match = " OR ".join(f'"{word}"' for word in words)
        found = db.execute(f"select id from docs where docs match ? order by {rank}, id limit 150", (match,))
        # the query is given to the index as text, so Han bigrams must come apart and together again
        assert index.search(" ".join(words)) == tuple(row[0] for row in found), words


@pytest.mark.parametrize(
    "query", ["<r>", "<a> x", "<c> y", "search_results 台灯", "OR AND NOT", '"', "*", "NEAR(台灯)"]
)
def test_odd_queries_are_deterministic_and_only_words(query: str) -> None:
    fresh = SearchIndex(list(RECORDED.products.values()))
    assert INDEX.search(query) == INDEX.search(query) == fresh.search(query)
    assert INDEX.search(query) == INDEX.search(" ".join(terms(query)))


def test_order_of_products_does_not_matter() -> None:
    products = list(GENERATED.products.values())
    shuffled = products[:]
    random.Random(2).shuffle(shuffled)
    for query in ("电饭煲", "rice cooker", "沐川 台灯 护眼"):
        assert SearchIndex(products).search(query) == SearchIndex(shuffled).search(query)


def test_ties_go_by_asin_and_the_limit_keeps_the_best() -> None:
    everything = INDEX.search("旗舰店", limit=300)
    assert len(everything) == 300
    assert INDEX.search("旗舰店") == everything[:150]
    assert INDEX.search("旗舰店", limit=7) == everything[:7]
    # products with equally long texts tie; within each tie asins ascend
    lengths = {a: sum(len(terms(t)) for t in document(p)) for a, p in RECORDED.products.items()}
    for left, right in pairwise(everything):
        brand_left, brand_right = (len(terms(RECORDED.products[a].brand)) for a in (left, right))
        if lengths[left] == lengths[right] and brand_left == brand_right:
            assert left < right


def test_unknown_words_find_nothing() -> None:
    assert INDEX.search("zzz") == ()
    assert INDEX.search("") == ()


@settings(deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_a_query(query: str) -> None:
    found = INDEX.search(query)
    assert len(found) == len(set(found)) <= 150
    assert set(found) <= RECORDED.products.keys()


def test_an_endless_query_is_answered_and_not_kept() -> None:
    index = SearchIndex(list(RECORDED.products.values()))
    assert index.search("台灯 " + " ".join(f"w{n}" for n in range(10_000))) == INDEX.search("台灯")
    assert len(index._cache) == 0


def test_the_cache_is_bounded_and_does_not_change_answers() -> None:
    index = SearchIndex(list(RECORDED.products.values()), cache_size=2)
    queries = ["台灯", "枕头", "咖啡机", "台灯"]
    assert [index.search(q) for q in queries] == [INDEX.search(q) for q in queries]
    assert len(index._cache) == 2
