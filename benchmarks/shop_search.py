"""The shop's in-memory BM25 beside SQLite's FTS5 on the same queries: ``python -m benchmarks.shop_search``.

Both answer the same random queries of 2 to 7 catalogue terms, top 150, no cache, in alternating rounds; the table gives
the median milliseconds per query and the ratio.
"""

from __future__ import annotations

import argparse
import random
import sqlite3
import statistics
import time

from rayrl.shop.catalogue import build_catalogue
from rayrl.shop.generator import generate_catalogue
from rayrl.shop.search import COLUMNS, WEIGHTS, SearchIndex, document
from rayrl.shop.text import terms


def fts5(documents: list[tuple[str, list[str]]]) -> sqlite3.Connection:
    """An FTS5 table in memory with the protocol's columns."""
    db = sqlite3.connect(":memory:")
    db.execute(f"create virtual table docs using fts5(id unindexed, {', '.join(COLUMNS)})")
    marks = ", ?" * len(COLUMNS)
    db.executemany(f"insert into docs values (?{marks})", [(asin, *texts) for asin, texts in documents])
    return db


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rank = f"bm25(docs, 0, {', '.join(map(str, WEIGHTS))})"
    print("products  FTS5 ms/query  in memory ms/query  ratio")
    for n in (300, 20_000):
        products = list(build_catalogue(generate_catalogue(n, 0)).products.values())
        documents = [(p.asin, [" ".join(terms(text)) for text in document(p)]) for p in products]
        index, db = SearchIndex(products, cache_size=0), fts5(documents)
        vocabulary = sorted({term for _, texts in documents for text in texts for term in text.split()})
        rng = random.Random(1)
        queries = [rng.sample(vocabulary, rng.randint(2, 7)) for _ in range(args.queries)]
        ours, theirs = [], []
        for _ in range(args.rounds):
            clock = time.perf_counter()
            for words in queries:
                match = " OR ".join(f'"{word}"' for word in words)
                sql = f"select id from docs where docs match ? order by {rank}, id limit 150"
                db.execute(sql, (match,)).fetchall()
            theirs.append((time.perf_counter() - clock) / len(queries) * 1e3)
            clock = time.perf_counter()
            for words in queries:
                index.search(" ".join(words))
            ours.append((time.perf_counter() - clock) / len(queries) * 1e3)
        a, b = statistics.median(theirs), statistics.median(ours)
        print(f"{n:8d}  {a:13.3f}  {b:18.3f}  {a / b:5.1f}")


if __name__ == "__main__":
    main()
