"""Counters and latency histograms of the server, in Prometheus text form.

Invariant: observing a request is two dictionary look-ups and a bisection; all formatting happens when ``/metrics`` is
read.
"""

from __future__ import annotations

from bisect import bisect_left

BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Metrics:
    """Requests by action and status, latency by action."""

    def __init__(self) -> None:
        self._requests: dict[tuple[str, int], int] = {}
        self._latency: dict[str, list[float]] = {}

    def observe(self, action: str, status: int, seconds: float) -> None:
        """Count one answered request."""
        key = (action, status)
        self._requests[key] = self._requests.get(key, 0) + 1
        row = self._latency.get(action)
        if row is None:
            row = self._latency[action] = [0.0] * (len(BUCKETS_S) + 2)
        row[bisect_left(BUCKETS_S, seconds)] += 1
        row[-1] += seconds

    def total(self) -> int:
        """Requests answered."""
        return sum(self._requests.values())

    def render(self, gauges: dict[str, tuple[str, float]]) -> str:
        """Prometheus exposition text. ``gauges``: name -> (help, value)."""
        lines: list[str] = []
        for name, (description, value) in gauges.items():
            lines += [f"# HELP {name} {description}", f"# TYPE {name} gauge", f"{name} {value:g}"]
        name = "rayrl_shop_requests_total"
        lines += [f"# HELP {name} Requests answered.", f"# TYPE {name} counter"]
        for (action, status), count in sorted(self._requests.items()):
            lines.append(f'{name}{{action="{action}",status="{status}"}} {count}')
        name = "rayrl_shop_request_seconds"
        lines += [f"# HELP {name} Time to answer, queueing included.", f"# TYPE {name} histogram"]
        for action, row in sorted(self._latency.items()):
            running = 0.0
            for bound, in_bucket in zip((*map(str, BUCKETS_S), "+Inf"), row[:-1], strict=True):
                running += in_bucket
                lines.append(f'{name}_bucket{{action="{action}",le="{bound}"}} {running:g}')
            lines.append(f'{name}_sum{{action="{action}"}} {row[-1]:.9g}')
            lines.append(f'{name}_count{{action="{action}"}} {running:g}')
        return "\n".join(lines) + "\n"
