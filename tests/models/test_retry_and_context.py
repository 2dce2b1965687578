from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrl.models.context import is_context_error, prompt_floor
from rayrl.models.retry import backoff_s, parse_retry_after
from rayrl.testing.mock_faults import CONTEXT_ERRORS

NOW = datetime(2024, 5, 1, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("2", 2.0),
        (" 1.5 ", 1.5),
        ("-3", 0.0),
        ("soon", None),
        ("nan", None),
        ("inf", None),
        ("", None),
        (format_datetime(NOW + timedelta(seconds=90), usegmt=True), 90.0),
        (format_datetime(NOW - timedelta(seconds=90), usegmt=True), 0.0),
        ("Wed, 01 May 2024 12:00:30 -0000", 30.0),
    ],
)
def test_retry_after_in_both_forms(value, seconds):
    assert parse_retry_after(value, NOW) == seconds


@given(st.integers(1, 200), st.integers(0, 2**32 - 1), st.floats(0, 10), st.floats(0, 60))
def test_backoff_is_bounded_jittered_and_a_function_of_the_call(attempt, seed, initial, most):
    wait = backoff_s(attempt, seed=seed, initial_s=initial, max_s=most)
    step = min(most, initial * 2.0 ** min(attempt - 1, 60))
    assert step / 2 <= wait <= step
    assert wait == backoff_s(attempt, seed=seed, initial_s=initial, max_s=most)


def test_calls_that_failed_together_do_not_come_back_together():
    waits = {backoff_s(1, seed=seed, initial_s=1, max_s=30) for seed in range(100)}
    assert len(waits) == 100


@pytest.mark.parametrize(
    "text",
    [
        *(orjson.dumps(body).decode() for _, body in CONTEXT_ERRORS.values()),
        "The decoder prompt (length 9000) is longer than the maximum model length of 8192.",
        "Requested token count exceeds the model's maximum context length of 8192 tokens.",
        "length of prompt_tokens (9000) must be less than max_seq_len (8192).",
        "`inputs` tokens + `max_new_tokens` must be <= 8192. Given: 9000 `inputs` tokens",
        "the request exceeds the available context size (8192 tokens), try increasing it",
    ],
)
def test_context_errors_of_many_servers(text):
    assert is_context_error(text)


@pytest.mark.parametrize(
    "text",
    [
        '{"error": {"message": "Invalid value for temperature: must be less than 2"}}',
        '{"error": {"message": "The model `x` does not exist", "code": "model_not_found"}}',
        '{"error": {"message": "Rate limit reached: 40000 tokens per minute", "code": "rate_limit_exceeded"}}',
        "",
    ],
)
def test_other_errors_are_no_context_errors(text):
    assert not is_context_error(text)


def test_the_floor_never_exceeds_real_token_counts():
    # measured with common tokenizers: 3.5 to 4.8 UTF-8 bytes a token on English, Chinese and JSON
    assert prompt_floor(48_000) == 8000 < 48_000 / 4.8
