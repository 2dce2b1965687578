"""Which outcome of a request is retried, and after how long: pure functions, no clock of their own.

One owner per outcome: network faults and the statuses in :data:`RETRY_STATUSES` are retried here and nowhere else;
every other status of 400 and above fails at once; a 200 is never asked for again.
"""

from __future__ import annotations

import random
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

RETRY_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
THROTTLE_STATUSES = frozenset({429, 503})


def parse_retry_after(value: str | None, now: datetime) -> float | None:
    """Seconds to wait from a ``Retry-After`` header: delta-seconds or an HTTP date (RFC 9110 §10.2.3).

    Args:
        value: the header, or None.
        now: an aware time, for the date form.

    Returns:
        Seconds, never negative; None where the header is missing or makes no sense.
    """
    if value is None:
        return None
    text = value.strip()
    try:
        seconds = float(text)
    except ValueError:
        try:
            when = parsedate_to_datetime(text)
        except (TypeError, ValueError, IndexError):
            return None
        if when.tzinfo is None:
            when = when.replace(tzinfo=UTC)
        return max(0.0, (when - now).total_seconds())
    return max(0.0, seconds) if seconds == seconds and seconds != float("inf") else None


def backoff_s(attempt: int, *, seed: int, initial_s: float, max_s: float) -> float:
    """Wait after failed attempt number ``attempt`` (from 1): exponential, equal jitter, deterministic per call.

    The jitter lies in [1/2, 1] of the exponential step, so calls that failed together do not come back together, and
    none comes back at once. Its source is the call's seed: the same call waits the same time on every machine.
    """
    step = min(max_s, initial_s * 2.0 ** min(attempt - 1, 60))
    return step * (0.5 + 0.5 * random.Random(f"{seed}:{attempt}").random())
