"""What a decision of the retrieval gate costs: the encoder, and everything beyond it.

The first question after loading stands apart (with and without a warm-up), then every question of the FAQ in turn, each
through :meth:`RetrievalGate.decide`, so that the encoders have just swept the caches as they do in service. Of two
encoders the slower ends last, and what the other one sufficed for is done by then: "beyond" is what is left. ``alone``
is all of it, with the vectors given and nothing else at work, as where a gate has one encoder. Larger memories
are synthetic: 10,000 or 50,000 texts of FAQ words with random unit vectors, one passage each, and the same features; an
encoder is not part of their figures, and the caches are swept by hand between questions. ``batch`` is the code of
training and evaluation on the same questions.

    rayrl train train/serve
    python -m benchmarks.gate [--gate runs/train-serve/gate] [--sizes 10000 50000] [--questions 300]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rayrl.retrieval.encoders import HashEncoder
from rayrl.retrieval.gate import RetrievalGate, export_gate
from rayrl.retrieval.mdp import MdpConfig
from rayrl.retrieval.policy import PolicySpec, RetrievalPolicy
from rayrl.retrieval.pools import Memory, Question
from rayrl.retrieval.regressions import fit_regressions
from rayrl.retrieval.sources import pool_by_name
from rayrl.retrieval.task import Material, TaskConfig, build_view, world_of

GROUPS = "SLCMNPXR"
DIM = 384


def summary(milliseconds: list[float]) -> dict[str, float]:
    """Median, 95th percentile and largest."""
    return {
        "median_ms": round(statistics.median(milliseconds), 3),
        "p95_ms": round(float(np.percentile(milliseconds, 95)), 3),
        "max_ms": round(max(milliseconds), 3),
    }


def shipped(folder: Path, questions: int) -> dict[str, Any]:
    """A trained gate with its own encoders."""
    began = time.perf_counter()
    gate = RetrievalGate(folder)
    loaded = time.perf_counter()
    first = gate.decide("How long does a building permit take?")
    began_warm = time.perf_counter()
    warm = RetrievalGate(folder)
    warm.warm_up()
    warmed = time.perf_counter()
    after = warm.decide("How long does a building permit take?")
    texts = [q.text for q in pool_by_name("zaragoza").questions] + [q.text for q in pool_by_name("trivia").questions]
    decisions = [warm.decide(text) for text in texts[:: max(1, len(texts) // questions)]]
    alone, batch = [], []
    for text in texts[:: max(1, len(texts) // questions)]:
        vector = gate.encoder.encode([text], "query")
        second = gate.check_encoder.encode([text], "query") if gate.check_encoder is not None else None
        alone.append(timed(lambda v=vector, s=second, t=text: gate.decide_vector(t, v, s)))  # type: ignore[misc]
    for text in texts[:: max(1, len(texts) // questions)]:
        vector = gate.encoder.encode([text], "query")
        second = gate.check_encoder.encode([text], "query") if gate.check_encoder is not None else None
        batch.append(timed(lambda v=vector, s=second, t=text: gate.decide_in_batch(t, v, s)))  # type: ignore[misc]
    return {
        "memories": len(gate.index.memories),
        "groups": gate.meta["groups"],
        "load_ms": round((loaded - began) * 1e3, 1),
        "first_call": {"encoder_ms": round(first.encode_ms, 1), "beyond_ms": round(first.decide_ms, 3)},
        "load_and_warm_up_ms": round((warmed - began_warm) * 1e3, 1),
        "first_call_after_warm_up": {"encoder_ms": round(after.encode_ms, 1), "beyond_ms": round(after.decide_ms, 3)},
        "questions": len(decisions),
        "encoder": summary([d.encode_ms for d in decisions]),
        "beyond_the_encoder": summary([d.decide_ms for d in decisions]),
        "alone": both(alone),
        "batch": both(batch),
    }


def synthetic(size: int, questions: int, folder: Path) -> dict[str, Any]:
    """An untrained gate over ``size`` made-up memories."""
    rng = np.random.default_rng(0)
    words = sorted({w for m in pool_by_name("zaragoza").memories for w in m.text.lower().split()})
    texts = [" ".join(words[i] for i in row) for row in rng.zipf(1.3, size=(size, 20)) % len(words)]
    memories = tuple(Memory(id=f"m{i}", text=t, category=f"c{i % 40}", domain="d") for i, t in enumerate(texts))
    asked = tuple(
        Question(id=f"q{i}", text=" ".join(texts[i].split()[:8]), answer_ids=(f"m{i}",), domain="d")
        for i in range(questions)
    )
    encoder = HashEncoder(DIM)

    def unit(n: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        rows = rng.normal(size=(n, DIM)).astype(np.float32)
        return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), np.float32)

    class Random:
        """Vectors by chance: what they mean does not matter for the time."""

        dim = DIM
        identity = encoder.identity

        def encode(self, texts: Any, role: str) -> Any:
            return unit(len(texts))

    random = Random()
    material = Material(
        memories=memories,
        distractors=(),
        questions=asked,
        memory_vectors=unit(size),
        distractor_vectors=np.zeros((0, DIM), np.float32),
        question_vectors=unit(questions),
        domains=frozenset({"d"}),
        encoder=random,
        check_encoder=random,
        second_questions=unit(questions),
    )
    config = TaskConfig(groups=GROUPS, far="", distractors=(), encoder="hash", check_encoder="hash")
    began = time.perf_counter()
    view = build_view(material, config, range(size), range(questions))
    built = time.perf_counter()
    regressions = fit_regressions(world_of(material, config, view, range(questions)), MdpConfig().rewards)
    view = replace(view, regressions=regressions)
    world = world_of(material, config, view, range(4))
    spec = PolicySpec(
        static_dim=world.static.shape[1],
        dynamic_dim=world.k + 3 + world.candidate.shape[2],
        actions=2,
        width=64,
        layers=3,
        members=4,
        plan_weight=0.4,
        plan_column=world.k + 3 + world.candidate.shape[2] - 1,
    )
    export_gate(folder, material, config, MdpConfig(), view, RetrievalPolicy(spec).eval())
    began_load = time.perf_counter()
    gate = RetrievalGate(folder, encoder=random, check=random)
    loaded = time.perf_counter()
    sweep = np.zeros(4_000_000, np.float32)
    times: list[tuple[float, float]] = []
    batch: list[tuple[float, float]] = []
    for i in range(questions):
        given = asked[i].text, material.question_vectors[i : i + 1], unit(1)
        sweep += 1.0  # as an encoder does: 16 MB through the caches
        times.append(timed(lambda g=given: gate.decide_vector(*g)))  # type: ignore[misc]
        if i < 20:
            batch.append(timed(lambda g=given: gate.decide_in_batch(*g)))  # type: ignore[misc]
    return {
        "memories": size,
        "vectors_mb": round(3 * size * DIM * 4 / 2**20),
        "index_s": round(built - began, 1),
        "load_s": round(loaded - began_load, 2),
        "first_call_ms": round(times[0][0], 3),
        "alone": both(times[1:]),
        "batch": both(batch),
    }


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of one call on the wall, and of this thread's processor time."""
    began, worked = time.perf_counter(), time.thread_time()
    call()
    return (time.perf_counter() - began) * 1e3, (time.thread_time() - worked) * 1e3


def both(times: list[tuple[float, float]]) -> dict[str, dict[str, float]]:
    """Summaries of wall and processor time; the second hardly notices what else the machine does."""
    return {"wall": summary([w for w, _ in times]), "cpu": summary([c for _, c in times])}


def main() -> None:
    """Run and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gate", type=Path, default=Path("runs/train-serve/gate"))
    parser.add_argument("--sizes", type=int, nargs="*", default=[10_000, 50_000])
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    load = os.getloadavg()
    result: dict[str, Any] = {"threads": args.threads, "load": [round(x, 1) for x in load]}
    if (args.gate / "gate.json").is_file():
        result["shipped"] = shipped(args.gate, args.questions)
    else:
        result["left_out"] = f"{args.gate} is no gate; `rayrl train train/serve` makes one"
    with tempfile.TemporaryDirectory() as folder:
        result["synthetic"] = [synthetic(n, min(args.questions, 200), Path(folder) / str(n)) for n in args.sizes]
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
