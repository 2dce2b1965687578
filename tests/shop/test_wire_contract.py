"""All recorded request/response pairs of the public server, replayed in order over HTTP against the embedded one.

Where the public server is at fault, ``FAULTS`` says what ours does instead; everything else must be equal, status and
JSON.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from .conftest import WIRE, running

PAIRS = [json.loads(line) for line in WIRE.read_text(encoding="utf-8").splitlines()]

# label -> (status, code) of the better answer
CLIENT_MISTAKES = {
    "not_json": (400, "not_json"),
    "reset_bad_task": (404, "reset_bad_task"),
    "reset_string_task": (400, "reset_string_task"),
    "reset_no_task": (400, "reset_no_task"),
    "reset_bad_mode": (400, "reset_bad_mode"),
    "interact_missing_response": (400, "interact_missing_response"),
    "terminate_bad_reason": (400, "terminate_bad_reason"),
    "step_after_done": (409, "step_after_done"),
    "terminate_after_done": (409, "terminate_after_done"),
}
DOUBLE_RELEASE = {"double_release"}
ORDINARY_SEARCHES = {"legacy_keyword_a_500", "legacy_keyword_c", "legacy_keyword_r_random"}
ORDINARY_CLICKS = {"url_substring_click_product_500"}
ABANDONED = "healthz_after_abandoned_queue"
HANGS_UP = "queued_reset_client_gives_up"
WAITS = "queued_reset_waits"
RELEASES_FOR_WAITER = "release_to_unblock"


def test_the_recording_is_complete() -> None:
    labels = {pair["label"] for pair in PAIRS}
    assert len(PAIRS) == 104
    listed = {*CLIENT_MISTAKES, *DOUBLE_RELEASE, *ORDINARY_SEARCHES, *ORDINARY_CLICKS, ABANDONED, HANGS_UP, WAITS}
    assert listed <= labels


class Replay:
    """Sends recorded requests with the lease ids of this server in place of the recorded ones."""

    def __init__(self, session: aiohttp.ClientSession, base: str) -> None:
        self.session = session
        self.base = base
        self.leases: dict[str, str] = {}

    async def send(self, request: dict[str, Any]) -> tuple[int, Any]:
        url = self.base + request["path"]
        if request["method"] == "GET":
            async with self.session.get(url) as response:
                return response.status, await response.json()
        if request["json"] is None:
            kwargs: dict[str, Any] = {"data": request["raw"].encode(), "headers": {"Content-Type": "application/json"}}
        else:
            body = dict(request["json"])
            if "lease_id" in body:
                body["lease_id"] = self.leases.get(body["lease_id"], body["lease_id"])
            kwargs = {"json": body}
        async with self.session.post(url, **kwargs) as response:
            return response.status, await response.json()

    def recorded(self, pair: dict[str, Any], got: Any) -> Any:
        """The recorded answer in this server's terms: lease ids mapped, the private goal gone."""
        want = json.loads(json.dumps(pair["response"]["json"]))
        result = want.get("result") if isinstance(want, dict) else None
        if result is None:
            return want
        if pair["request"]["json"] and pair["request"]["json"].get("action") == "reset" and "lease_id" in result:
            self.leases[result["lease_id"]] = got["result"]["lease_id"]
        if "lease_id" in result:
            result["lease_id"] = self.leases[result["lease_id"]]
        if result.get("goal"):
            result["goal"] = {}
        return want


async def test_every_recorded_pair() -> None:
    compared = 0
    # two slots, as recorded
    async with running(slots=2) as (_, raw):
        replay = Replay(raw.session, raw.base)
        waiting: asyncio.Task[tuple[int, Any]] | None = None
        for position, pair in enumerate(PAIRS):
            label, request = pair["label"], pair["request"]
            if label == HANGS_UP:
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(replay.send(request), 0.2)
                continue
            if label == RELEASES_FOR_WAITER:
                # the recorded reset was sent while both slots were busy and answered after this release
                assert PAIRS[position + 1]["label"] == WAITS
                waiting = asyncio.create_task(replay.send(PAIRS[position + 1]["request"]))
                await asyncio.sleep(0.1)
                assert not waiting.done()
            if label == WAITS:
                assert waiting is not None
                status, got = await waiting
            else:
                status, got = await replay.send(request)
            where = f"pair {position} [{label}]"
            if label in CLIENT_MISTAKES:
                want_status, code = CLIENT_MISTAKES[label]
                recorded = pair["response"]["json"]["result"]["error"]
                assert status == want_status, where
                assert got["result"] == {"error": recorded.strip("'"), "code": code}, where
                continue
            if label in DOUBLE_RELEASE:
                assert (status, got) == (200, {"result": {"message": "Environment 0 has been released"}}), where
                continue
            if label in ORDINARY_SEARCHES:
                assert status == 200, where
                state = got["result"]["observation_state"]
                assert state["page_type"] == "search_results", where
                # the next recorded action of these episodes needs the page the public server would have been on
                if label == "legacy_keyword_a_500":
                    await replay.send({**request, "json": {**request["json"], "response": "click[back to search]"}})
                continue
            if label in ORDINARY_CLICKS:
                assert status == 200, where
                assert got["result"]["observation_state"]["product"]["asin"] in request["json"]["response"], where
                continue
            want = replay.recorded(pair, got)
            assert status == pair["response"]["http_status"], where
            if request["path"] == "/healthz":
                if label == ABANDONED:
                    want["free_slots"] = 2  # the caller who hung up holds nothing
                got = {name: got[name] for name in want}
            assert got == want, where
            compared += 1
    assert compared == 104 - len(CLIENT_MISTAKES) - len(DOUBLE_RELEASE) - len(ORDINARY_SEARCHES) - 2
