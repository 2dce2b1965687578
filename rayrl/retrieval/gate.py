"""The trained policy in service: one question in, a decision with probabilities and the nearest memories out.

A gate folder is self-contained: ``gate.json`` (what it is), ``gate.safetensors`` (weights and vectors),
``memories.jsonl`` and ``prior.jsonl``. Loading checks the encoder's identity; embedding the memory again is not needed.
Beyond the encoders a decision is a few matrix products (:mod:`rayrl.retrieval.serving`); decision processes that those
do not cover are played in the batch environment, with the same result.

Modes: ``off`` never retrieves and computes nothing, ``shadow`` decides and reports but says "do not act", ``enforce``
is meant to be obeyed.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson
import torch
from safetensors.numpy import load, save_file

from rayrl.errors import DataError, RunConflictError
from rayrl.retrieval.encoders import Encoder, make_encoder
from rayrl.retrieval.features import TextCheck, TopicPrior, compute
from rayrl.retrieval.index import Floats, build_index
from rayrl.retrieval.mdp import MdpConfig, RetrievalEnv
from rayrl.retrieval.policy import MeanPolicy, PolicySpec, RetrievalPolicy, checksum
from rayrl.retrieval.pools import Memory, read_records
from rayrl.retrieval.regressions import Regressions
from rayrl.retrieval.serving import SERVED_GROUPS, QuestionFeatures, Walk, can_walk
from rayrl.retrieval.task import Material, TaskConfig, View
from rayrl.retrieval.world import World
from rayrl.schemas import sha256_hex

SCHEMA = "rayrl-retrieval-gate-v2"
FILES = ("gate.safetensors", "memories.jsonl", "prior.jsonl")
GateMode = Literal["off", "shadow", "enforce"]


@dataclass(frozen=True)
class Found:
    """One retrieved memory."""

    id: str
    text: str
    cosine: float
    category: str


@dataclass(frozen=True)
class Decision:
    """What the gate says about one question."""

    retrieve: int
    """How many of the nearest memories to use; 0 answers without."""
    probability: float
    """Probability of the first retrieval."""
    continue_probabilities: tuple[float, ...]
    """Probability of each further retrieval as it came up."""
    memories: tuple[Found, ...]
    """The memories to use (empty when none)."""
    nearest: tuple[Found, ...]
    """The nearest memories, used or not."""
    act: bool
    """Whether the mode wants this obeyed."""
    encode_ms: float
    """Until the last encoder was done."""
    decide_ms: float
    """From then on."""


def export_gate(
    folder: Path, material: Material, config: TaskConfig, mdp: MdpConfig, view: View, policy: RetrievalPolicy
) -> Path:
    """Write a gate folder (replaced as a whole)."""
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    arrays: dict[str, Any] = {
        "memory/vectors": view.index.vectors,
        "memory/density": view.index.density,
        "memory/hubness": view.index.hubness,
    }
    arrays.update({f"policy/{k}": v.numpy() for k, v in policy.state_dict().items()})
    if view.prior is not None:
        arrays["prior/vectors"] = view.prior.vectors
        arrays["prior/inside"] = view.prior.inside.astype(np.int8)
    if view.basis is not None:
        arrays["basis"] = view.basis
    if view.check is not None:
        arrays["check/sentences"], arrays["check/owner"] = view.check.sentences, view.check.owner
        if view.check.second is not None:
            arrays["check/second"] = view.check.second
    if view.regressions is not None:
        arrays.update(view.regressions.arrays())
    save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, temporary / "gate.safetensors")
    (temporary / "memories.jsonl").write_bytes(
        b"".join(orjson.dumps(m.model_dump()) + b"\n" for m in view.index.memories)
    )
    prior_ids = view.prior.ids if view.prior is not None else ()
    (temporary / "prior.jsonl").write_bytes(b"".join(orjson.dumps({"id": i}) + b"\n" for i in prior_ids))
    meta = {
        "schema": SCHEMA,
        "files": {name: sha256_hex((temporary / name).read_bytes()) for name in FILES},
        "encoder": config.encoder,
        "encoder_identity": material.encoder.identity(),
        "check_encoder": config.check_encoder if material.check_encoder is not None else "",
        "check_identity": material.check_encoder.identity() if material.check_encoder is not None else None,
        "groups": config.groups,
        "k": config.k,
        "mdp": mdp.model_dump(mode="json"),
        "policy": policy.spec.model_dump(),
        "policy_checksum": checksum(policy),
        "reveal": view.reveal,
    }
    (temporary / "gate.json").write_bytes(orjson.dumps(meta, option=orjson.OPT_INDENT_2))
    shutil.rmtree(folder, ignore_errors=True)
    temporary.replace(folder)
    return folder


class RetrievalGate:
    """Decides per question; thread-compatible (no shared state is written after loading)."""

    def __init__(
        self, folder: Path, *, mode: GateMode = "enforce", encoder: Encoder | None = None, check: Encoder | None = None
    ) -> None:
        """Load a gate folder.

        Raises:
            DataError: not a gate folder, or damaged weights.
            RunConflictError: the encoder is not the one it was trained with.
        """
        self.mode: GateMode = mode
        try:
            meta = orjson.loads((folder / "gate.json").read_bytes())
        except (OSError, orjson.JSONDecodeError):
            raise DataError(
                f"{folder} is no gate (gate.json is missing or damaged); `rayrl train` writes one"
            ) from None
        if meta.get("schema") != SCHEMA:
            raise DataError(f"{folder}: schema {meta.get('schema')!r}, expected {SCHEMA!r}; train it again")
        files = {name: _intact(folder / name, meta["files"].get(name)) for name in FILES}
        self.meta: dict[str, Any] = meta
        self.encoder = encoder or make_encoder(meta["encoder"], cached=False)
        _same_encoder(folder, meta["encoder_identity"], self.encoder)
        self.check_encoder = None
        if meta["check_encoder"]:
            self.check_encoder = check or make_encoder(meta["check_encoder"], cached=False)
            _same_encoder(folder, meta["check_identity"], self.check_encoder)
        self._encoders = ThreadPoolExecutor(1, "gate-encoder") if self.check_encoder is not None else None
        # column by column: a product with one vector then reads memory in order, twice as fast when the cache is cold
        arrays = {k: np.asfortranarray(v) for k, v in load(files["gate.safetensors"]).items()}
        self._mdp = MdpConfig.model_validate(meta["mdp"])
        self._policy = RetrievalPolicy(PolicySpec.model_validate(meta["policy"])).eval()
        self._policy.load_state_dict(
            {
                k.removeprefix("policy/"): torch.from_numpy(v).contiguous()
                for k, v in arrays.items()
                if k.startswith("policy/")
            }
        )
        if checksum(self._policy) != meta["policy_checksum"]:
            raise DataError(f"{folder}: the weights do not match their checksum")
        memories = read_records(folder / "memories.jsonl", Memory)
        known = (arrays["memory/density"], arrays["memory/hubness"]) if "memory/density" in arrays else None
        self.index = build_index(memories, self.encoder, arrays["memory/vectors"], known)
        self._prior = None
        if "prior/vectors" in arrays:
            ids = tuple(orjson.loads(line)["id"] for line in files["prior.jsonl"].splitlines())
            self._prior = TopicPrior(arrays["prior/vectors"], arrays["prior/inside"].astype(bool), ids)
        self._basis: Floats | None = arrays.get("basis")
        self._check = None
        if "check/sentences" in arrays:
            self._check = TextCheck(arrays["check/sentences"], arrays["check/owner"], arrays.get("check/second"))
        self._regressions = Regressions.from_arrays(arrays, self._mdp.rewards)
        self._fast: tuple[QuestionFeatures, Walk] | None = None
        if can_walk(self._mdp) and set(meta["groups"]) <= SERVED_GROUPS:
            features = QuestionFeatures(
                self.index,
                groups=meta["groups"],
                k=meta["k"],
                prior=self._prior,
                basis=self._basis,
                check=self._check,
                regressions=self._regressions,
            )
            self._fast = features, Walk(self._policy, self._mdp)
        self._warm = threading.Lock()

    def warm_up(self, *, wait: bool = True) -> None:
        """Load the encoders and touch every array, so that the first question is answered as fast as the others.

        Without ``wait`` this happens in a thread; a question that comes meanwhile waits for the encoder as it would
        have anyway.
        """
        if not wait:
            threading.Thread(target=self.warm_up, name="gate-warm-up", daemon=True).start()
            return
        with self._warm:
            self.decide(self.index.memories[0].text[:200])

    def decide(self, question: str) -> Decision:
        """Decide about one question."""
        if self.mode == "off":
            return Decision(0, 0.0, (), (), (), act=False, encode_ms=0.0, decide_ms=0.0)
        start = time.perf_counter()
        # both encoders at once, and what the first one suffices for while the second is at work
        pending = self._encoders.submit(self._encode_second, question) if self._encoders is not None else None
        vector = self.encoder.encode([question], "query")
        encoded = time.perf_counter()
        retrieve, probabilities, rows, cosines = self._decide(
            question, vector, None if pending is None else lambda: pending.result()[0]
        )
        if pending is not None:
            encoded = max(encoded, pending.result()[1])
        found = tuple(self._found(r, c) for r, c in zip(rows, cosines, strict=True))
        decided = time.perf_counter()
        return Decision(
            retrieve=retrieve,
            probability=probabilities[0],
            continue_probabilities=tuple(probabilities[1:]),
            memories=found[:retrieve],
            nearest=found,
            act=self.mode == "enforce",
            encode_ms=(encoded - start) * 1e3,
            decide_ms=(decided - encoded) * 1e3,
        )

    def decide_vector(
        self, question: str, vector: Floats, second: Floats | None
    ) -> tuple[int, list[float], list[int], list[float]]:
        """Number of retrievals, probabilities of retrieving step by step, memory rows and cosines of the queue.

        Args:
            question: its text.
            vector: ``[1, d]`` its unit vector.
            second: ``[1, d2]`` under the second encoder, where the gate has one.
        """
        return self._decide(question, vector, None if second is None else lambda: second)

    def _decide(
        self, question: str, vector: Floats, second: Callable[[], Floats] | None
    ) -> tuple[int, list[float], list[int], list[float]]:
        if self._fast is None:
            return self.decide_in_batch(question, vector, None if second is None else second())
        features, walk = self._fast
        seen = features.of(question, vector[0], None if second is None else lambda: second()[0])
        retrieve, probabilities = walk.play(seen)
        return retrieve, probabilities, seen.rows.tolist(), seen.cosine.tolist()

    def _encode_second(self, question: str) -> tuple[Floats, float]:
        if self.check_encoder is None:
            raise RuntimeError("this gate has one encoder")
        return self.check_encoder.encode([question], "query"), time.perf_counter()

    def decide_in_batch(
        self, question: str, vector: Floats, second: Floats | None
    ) -> tuple[int, list[float], list[int], list[float]]:
        """As :meth:`decide_vector`, by the code of training and evaluation: any decision process, and the reference."""
        features = compute(
            self.index,
            vector,
            [question],
            [""],
            groups=self.meta["groups"],
            k=self.meta["k"],
            prior=self._prior,
            basis=self._basis,
            check=self._check,
            second_queries=second,
            reveal=self.meta["reveal"],
        )
        k = features.candidates.shape[1]
        world = World(
            static=torch.from_numpy(features.static),
            candidate=torch.from_numpy(features.candidate),
            reveal=torch.from_numpy(features.reveal),
            agreement=torch.from_numpy(features.agreement),
            right=torch.zeros(1, k, dtype=torch.bool),
            item=torch.from_numpy(features.candidates),
            n_right=torch.zeros(1, dtype=torch.int64),
            kind=torch.zeros(1, dtype=torch.int64),
            question=torch.zeros(1, dtype=torch.int64),
            part=torch.zeros(1, dtype=torch.int64),
            static_names=features.static_names,
            candidate_names=features.candidate_names,
            reveal_names=features.reveal_names,
        )
        if self._regressions is not None:
            world = self._regressions.extend(world)
        env = RetrievalEnv(world, self._mdp)
        policy = MeanPolicy(self._policy)
        probabilities: list[float] = []
        with torch.inference_mode():
            dynamic = env.reset(torch.zeros(1, dtype=torch.int64))
            projected = policy.project(world.static)
            while bool(env.alive[0]):
                p = torch.softmax(policy.act_logits(projected, dynamic), -1)[0]
                action = int(p.argmax())
                probabilities.append(float(p[0]))
                env.step(torch.tensor([action]))
                dynamic = env.observe()
        rows = features.candidates[0].tolist()
        held = env.held[0]
        kept = [r for r, h in zip(rows, held.tolist(), strict=True) if h]
        order = kept + [r for r in rows if r not in kept]
        cosine = dict(zip(rows, features.quality[0].tolist(), strict=True))
        return len(kept), probabilities, order, [cosine[r] for r in order]

    def _found(self, row: int, cosine: float) -> Found:
        memory = self.index.memories[row]
        return Found(memory.id, memory.text, cosine, memory.category)


def _intact(path: Path, expected: str | None) -> bytes:
    try:
        data = path.read_bytes()
    except OSError:
        data = b""
    if sha256_hex(data) != expected:
        raise DataError(f"{path} is missing or damaged; copy the gate again, or train it again")
    return data


def _same_encoder(folder: Path, stored: dict[str, Any], encoder: Encoder) -> None:
    if encoder.identity() != stored:
        raise RunConflictError(
            f"{folder} was trained with the encoder {stored}, not {encoder.identity()}; cosines of different "
            "encoders do not compare. Use that encoder, or train again"
        )
