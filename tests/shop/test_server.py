"""Leases over HTTP, request ids, metrics, pages of the debugging form."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from typing import Any

import aiohttp

from .conftest import key, running


async def test_an_expired_lease_frees_its_slot_and_answers_410() -> None:
    async with running(slots=1, lease_ttl_s=0.2) as (server, raw):
        lease = await raw.reset()
        await asyncio.sleep(0.35)
        assert server.leases.free == 1
        for body in (
            {"action": "interact", "response": "search[x]"},
            {"action": "terminate"},
            {"action": "release_one"},
            {"action": "heartbeat"},
        ):
            status, got = await raw.post({**body, **key(lease)})
            assert (status, got["result"]["code"]) == (410, "lease_expired"), body
        await raw.reset()
        assert (await raw.act(lease, "search[x]"))[0] == 410


async def test_calls_and_heartbeats_keep_a_lease() -> None:
    async with running(slots=3, lease_ttl_s=0.4) as (server, raw):
        acting, beating, many = await raw.reset(4), await raw.reset(6), await raw.reset(8)
        for _ in range(8):
            await asyncio.sleep(0.1)
            assert (await raw.act(acting, "click[nope]"))[0] == 200
            assert (await raw.post({"action": "heartbeat", **key(beating)}))[0] == 200
            leases = [[many["env_idx"], many["lease_id"]], [0, "unknown"]]
            status, body = await raw.post({"action": "heartbeat", "leases": leases})
            assert (status, body["result"]["lost"]) == (200, ["unknown"])
        assert server.leases.free == 0


async def test_killing_a_client_gives_its_slots_back_within_the_ttl() -> None:
    async with running(slots=2, lease_ttl_s=1.0) as (server, raw):
        child = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import sys, json, time, urllib.request\n"
                "for idx in (4, 6):\n"
                "    body = json.dumps({'action': 'reset', 'idx': idx}).encode()\n"
                "    urllib.request.urlopen(sys.argv[1] + '/api/shop_agent', body).read()\n"
                "print('holding', flush=True)\n"
                "time.sleep(60)\n",
                raw.base,
            ],
            stdout=subprocess.PIPE,
        )
        try:
            assert child.stdout is not None
            await asyncio.to_thread(child.stdout.readline)
            assert server.leases.free == 0
        finally:
            child.kill()
            child.wait()
        began = time.monotonic()
        # a reset that waits in the queue gets the slot as soon as the lease is over
        assert (await asyncio.wait_for(raw.reset(8), 5))["idx"] == 8
        assert time.monotonic() - began < 1.5
        await asyncio.sleep(0.2)
        assert server.leases.free == 1


async def test_a_repeated_request_id_acts_once() -> None:
    async with running(slots=1) as (server, raw):
        lease = await raw.reset()
        first = await raw.act(lease, "search[台灯]", request_id="a")
        again = await raw.act(lease, "search[台灯]", request_id="a")
        assert first == again
        other = await raw.act(lease, "search[台灯]", request_id="b")
        assert other[1]["action_feedback"]["reason"] == "search_unavailable"
        episode = server.leases.live(lease["lease_id"])
        assert episode is not None and episode.holder.used == 2


async def test_a_repeated_mistake_gets_the_stored_mistake() -> None:
    async with running(slots=1) as (_, raw):
        lease = await raw.reset()
        bad = {"action": "interact", **key(lease), "request_id": "a"}
        first = await raw.post(bad)
        assert first[0] == 400
        assert await raw.post({**bad, "response": "search[x]"}) == first


async def test_an_old_request_id_is_refused_rather_than_acted_on_again() -> None:
    async with running(slots=1) as (server, raw):
        lease = await raw.reset()
        for number in range(12):
            assert (await raw.act(lease, "click[nope]", request_id=f"r{number}"))[0] == 200
        status, result = await raw.act(lease, "click[nope]", request_id="r0")
        assert (status, result["code"]) == (409, "stale_request_id")
        held = server.leases.live(lease["lease_id"])
        assert held is not None and held.holder.used == 12
        assert sum(answer is not None for answer in held.answers.values()) <= 8


async def test_a_repeated_reset_gives_the_same_lease() -> None:
    async with running(slots=2) as (server, raw):
        body = {"action": "reset", "idx": 4, "request_id": "once"}
        first, again = await raw.post(body), await raw.post(body)
        assert first == again
        assert server.leases.free == 1
        await raw.release(first[1]["result"])
        later = await raw.post(body)
        assert later[0] == 200 and later[1]["result"]["lease_id"] != first[1]["result"]["lease_id"]


async def test_a_reset_id_that_is_still_waiting_takes_one_slot() -> None:
    async with running(slots=1) as (server, raw):
        lease = await raw.reset()
        body = {"action": "reset", "idx": 6, "request_id": "once"}
        waiting = asyncio.create_task(raw.post(body))
        while server.leases.queued == 0:
            await asyncio.sleep(0.005)
        status, got = await raw.post(body)
        assert (status, got["result"]["code"]) == (409, "request_in_flight")
        await raw.release(lease)
        assert (await waiting)[0] == 200


async def test_concurrent_calls_on_one_lease_never_interleave() -> None:
    async with running(slots=1) as (_, raw):
        lease = await raw.reset(interaction_mode="multi_turn")
        results = await asyncio.gather(*(raw.act(lease, "search[台灯]") for _ in range(20)))
        executed = [r for _, r in results if r["action_feedback"]["valid"]]
        # one of them found the home page, all others the results it led to
        assert len(executed) == 1
        assert all(r["observation_state"]["page_type"] == "search_results" for _, r in results)


async def test_health_names_the_server() -> None:
    async with running(slots=3) as (server, raw):
        status, health = await raw.get("/healthz")
        assert status == 200
        assert health["server"] == "rayrl-shop"
        assert {"lease_ttl", "heartbeat", "request_id", "private_goal"} <= set(health["capabilities"])
        assert health["catalogue_sha256"] == server.shop.catalogue.sha256
        assert (health["environment_slots"], health["free_slots"], health["queued_resets"]) == (3, 3, 0)


async def test_metrics_count_requests_and_leases() -> None:
    async with running(slots=2) as (_, raw):
        lease = await raw.reset()
        await raw.act(lease, "search[台灯]")
        await raw.act(lease, "nonsense")
        await raw.post({"action": "x" * 50})
        _, text = await raw.get("/metrics")
        values = dict(re.findall(r"^(rayrl_shop\S+) (\S+)$", text, re.MULTILINE))
        assert values["rayrl_shop_slots"] == "2"
        assert values["rayrl_shop_leases_open"] == "1"
        assert values['rayrl_shop_requests_total{action="interact",status="200"}'] == "2"
        assert values['rayrl_shop_requests_total{action="other",status="400"}'] == "1"
        assert values['rayrl_shop_request_seconds_count{action="interact"}'] == "2"
        assert values['rayrl_shop_request_seconds_bucket{action="interact",le="+Inf"}'] == "2"
        assert float(values["rayrl_shop_lease_age_seconds_max"]) > 0


async def test_other_paths_and_methods() -> None:
    async with running(slots=1) as (_, raw):
        for path in ("/debug-ui", "/", "/replay-ui"):
            status, page = await raw.get(path)
            assert status == 200 and page.startswith("<!doctype html>")
        assert (await raw.get("/nowhere"))[0] == 404
        assert (await raw.get("/api/shop_agent"))[0] == 405
        async with raw.session.post(f"{raw.base}/healthz") as response:
            assert response.status == 405


async def test_page_size_and_query_limit_are_obeyed() -> None:
    async with running(slots=1, page_size=5, max_query_length=8) as (_, raw):
        lease = await raw.reset()
        _, result = await raw.act(lease, "search[123456789]")
        assert result["action_feedback"]["reason"] == "query_too_long"
        _, result = await raw.act(lease, "search[电饭煲]")
        state = result["observation_state"]
        assert (len(state["products"]), state["total_pages"]) == (5, 6)
        _, result = await raw.act(lease, "click[next >]")
        assert [p["rank"] for p in result["observation_state"]["products"]] == [6, 7, 8, 9, 10]


async def test_a_fault_of_the_server_is_a_500_with_a_code_and_nothing_else(monkeypatch: Any, caplog: Any) -> None:
    async with running(slots=1) as (server, raw):
        lease = await raw.reset()

        def broken(*args: Any) -> Any:
            raise RuntimeError("inner detail")

        monkeypatch.setattr(server.shop, "step", broken)
        status, result = await raw.act(lease, "search[x]")
        assert (status, result["code"]) == (500, "internal_error")
        assert "inner detail" not in str(result)
        assert "inner detail" in caplog.text
        assert (await raw.release(lease))[0] == 200


async def test_many_clients_at_once_share_the_slots() -> None:
    async with running(slots=4, queue_timeout_s=30) as (server, raw):

        async def episode(idx: int) -> str:
            lease = await raw.reset(idx)
            _, result = await raw.act(lease, "search[台灯]")
            await raw.release(lease)
            return str(result["idx"])

        names: list[Any] = await asyncio.gather(*(episode(2 * n) for n in range(40)))
        assert [name.rsplit("-", 1)[1] for name in names] == [str(2 * n) for n in range(40)]
        assert server.leases.free == 4


async def test_two_servers_can_run_in_one_process() -> None:
    async with running(slots=1) as (one, _), running(slots=1) as (two, _):
        assert one.port != two.port
        async with aiohttp.ClientSession() as session, session.get(f"{two.base_url}/healthz") as response:
            assert response.status == 200
