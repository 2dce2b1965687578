"""Visits of a studio that runs as ``rayrl studio`` in a process of its own, by a plain client and by Chromium.

A first visit finds a studio that has this moment begun to answer: templates, figures, records, nothing is in its
memory. A visit by Chromium does too, with an empty browser cache; its time is that of ``first-contentful-paint``, from
the start of the navigation. So every first visit of every page has a process of its own.
"""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import orjson

HTML = {"accept": "text/html"}
NOT_YET = ("data-poll", "◐")
"""What a page holds while something of it is still being computed."""
_PAINT = """() => new Promise(resolve => new PerformanceObserver(list => {
  for (const entry of list.getEntries()) if (entry.name === "first-contentful-paint") resolve(entry.startTime);
}).observe({type: "paint", buffered: true}))"""


class Studio:
    """A studio over a store and a folder of runs; killed with everything it started at the end."""

    def __init__(self, root: Path, runs: Path) -> None:
        command = [sys.executable, "-m", "jobs.cli", "studio", "--json", "--port", "0"]
        command += ["--root", str(root), "--runs", str(runs)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)

    def __enter__(self) -> Studio:
        said = b""
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            said += line
            if line.startswith(b"}") or line.rstrip().endswith(b"}"):
                break
        self.url = str(orjson.loads(said)["url"])
        self.ask("/api/health")  # the address is open before the server is up: this waits for it
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def ask(self, path: str) -> tuple[float, str]:
        """Milliseconds of one request, and the text of the answer."""
        began = time.perf_counter()
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=120)
        connection.request("GET", quote(path, safe="/?&=.-_~%"), headers=HTML)
        answer = connection.getresponse()
        text = answer.read().decode()
        took = 1000 * (time.perf_counter() - began)
        connection.close()
        if answer.status != 200:
            raise SystemExit(f"{path} answered {answer.status}: {text[:300]}")
        return took, text


@dataclass(frozen=True)
class Visit:
    """Times of one page: milliseconds, and seconds until all of its figures are there."""

    first_ms: float
    paint_ms: float | None
    ready_s: float
    later_ms: float


def visit(start: Callable[[], Studio], browser: Any, path: str) -> Visit:
    """Measure a page; ``start`` makes a studio in the state a first visit is to find."""
    with start() as studio:
        began = time.perf_counter()
        first, text = studio.ask(path)
        while working(text) and time.perf_counter() - began < 120:
            time.sleep(0.2)
            _, text = studio.ask(path)
        ready = time.perf_counter() - began
        later = statistics.median(studio.ask(path)[0] for _ in range(5))
    return Visit(first, paint(start, browser, path), ready, later)


def working(text: str) -> bool:
    """Whether something of a page is still being computed."""
    main = text.partition("<main")[2]
    return any(mark in main for mark in NOT_YET)


def paint(start: Callable[[], Studio], browser: Any, path: str) -> float | None:
    """Milliseconds until Chromium shows the first content of a page of a studio just started."""
    if browser is None:
        return None
    with start() as studio:
        context = browser.new_context()
        page = context.new_page()
        page.goto(studio.url + quote(path, safe="/?&=.-_~%"), wait_until="commit")
        found = float(page.evaluate(_PAINT))
        context.close()
    return found


@contextmanager
def chromium() -> Iterator[Any]:
    """A headless Chromium that has already shown a page; ``None`` where there is none (``RAYRL_CHROMIUM`` names one)."""
    path = os.environ.get("RAYRL_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        print("no Chromium: times until something is shown are left out", file=sys.stderr)
        with nullcontext() as nothing:
            yield nothing
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        page = browser.new_page()
        page.set_content("<p>ready</p>")
        page.close()
        yield browser
        browser.close()


def table(rows: dict[str, Visit]) -> str:
    """The times as text, a page a line."""
    lines = [f"{'first ms':>9} {'paint ms':>9} {'ready s':>8} {'later ms':>9}  page"]
    for name, one in rows.items():
        shown = f"{one.paint_ms:9.0f}" if one.paint_ms is not None else f"{'-':>9}"
        lines.append(f"{one.first_ms:9.0f} {shown} {one.ready_s:8.1f} {one.later_ms:9.0f}  {name}")
    return "\n".join(lines)
