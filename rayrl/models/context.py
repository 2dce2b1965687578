"""Recognising that a conversation does not fit the model's context.

Servers say it in their own words; :func:`is_context_error` knows those of OpenAI, vLLM, SGLang, llama.cpp, SiliconFlow
and TGI. :func:`prompt_floor` is a lower bound that lets a hopeless request be refused before it is sent.
"""

from __future__ import annotations

import re

_CODES = ("context_length_exceeded", "exceed_context_size_error", "context_window_exceeded")
_PHRASES = re.compile(
    r"maximum context length"  # OpenAI, vLLM, SGLang
    r"|longer than the (?:model'?s context|maximum model) length"  # SGLang, vLLM
    r"|exceeds? the (?:model'?s |available |maximum )*context (?:size|length|window)"  # llama.cpp and others
    r"|context (?:length|window|size) (?:is |has been )?exceeded"
    r"|prompt is too long|input is too long|input is too large to process"
    r"|(?:prompt_tokens|`?inputs?`? tokens?)\b.{0,80}\bmust (?:be|have) (?:less|<|at most)",  # SiliconFlow, TGI
    re.IGNORECASE | re.DOTALL,
)

BYTES_PER_TOKEN_AT_MOST = 6.0
"""Longer average tokens than any common tokenizer reaches on mixed JSON, English and Chinese text (3.5 to 4.8)."""


def is_context_error(text: str) -> bool:
    """Whether an error body says that the conversation is too long."""
    return any(code in text for code in _CODES) or _PHRASES.search(text) is not None


def prompt_floor(body_bytes: int) -> int:
    """A lower bound of the prompt's tokens from the size of the UTF-8 request; never an over-estimate in practice."""
    return int(body_bytes / BYTES_PER_TOKEN_AT_MOST)
