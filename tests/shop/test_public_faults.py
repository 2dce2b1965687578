"""Every fault of the public server has a test here for what this server does instead."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from .conftest import key, running


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"action": "reset", "idx": 999_999}, 404, "reset_bad_task"),
        ({"action": "reset", "idx": "4"}, 400, "reset_string_task"),
        ({"action": "reset", "idx": True}, 400, "reset_string_task"),
        ({"action": "reset", "idx": 4.0}, 400, "reset_string_task"),
        ({"action": "reset"}, 400, "reset_no_task"),
        ({"action": "reset", "idx": 4, "interaction_mode": "weird"}, 400, "reset_bad_mode"),
        ({"action": "reset", "idx": 4, "interaction_mode": ["single_turn"]}, 400, "reset_bad_mode"),
    ],
)
async def test_a_bad_reset_is_a_4xx_with_a_code_and_takes_no_slot(body: Any, status: int, code: str) -> None:
    async with running(slots=1) as (server, raw):
        got_status, got = await raw.post(body)
        assert (got_status, got["result"]["code"]) == (status, code)
        assert got["result"]["error"]
        assert server.leases.free == 1


@pytest.mark.parametrize("raw_body", [b"hello", b"", b"[1,2]", b"null", b'"x"', b"\xff\xfe"])
async def test_a_body_that_is_no_json_object_is_a_400(raw_body: bytes) -> None:
    async with running(slots=1) as (_, raw), raw.session.post(f"{raw.base}/api/shop_agent", data=raw_body) as response:
        assert response.status == 400
        assert (await response.json())["result"]["code"] == "not_json"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"action": "interact"}, "interact_missing_response"),
        ({"action": "interact", "response": 7}, "interact_missing_response"),
        ({"action": "terminate", "termination_reason": "user_quit"}, "terminate_bad_reason"),
        ({"action": "terminate", "termination_reason": ["action_limit"]}, "terminate_bad_reason"),
    ],
)
async def test_a_bad_call_on_a_lease_is_a_400_and_uses_no_action(body: Any, code: str) -> None:
    async with running(slots=1) as (_, raw):
        lease = await raw.reset()
        status, got = await raw.post({**body, **key(lease)})
        assert (status, got["result"]["code"]) == (400, code)
        for _ in range(29):
            _, result = await raw.act(lease, "click[nope]")
            assert not result["done"]
        _, result = await raw.act(lease, "click[nope]")
        assert result["termination_reason"] == "action_limit"


async def test_acting_after_the_end_is_a_409() -> None:
    async with running(slots=1) as (_, raw):
        lease = await raw.reset()
        assert (await raw.post({"action": "terminate", **key(lease)}))[0] == 200
        status, result = await raw.act(lease, "search[x]")
        assert (status, result["code"]) == (409, "step_after_done")
        status, body = await raw.post({"action": "terminate", **key(lease)})
        assert (status, body["result"]["code"]) == (409, "terminate_after_done")


async def test_no_client_mistake_is_a_5xx() -> None:
    odd: list[Any] = [None, True, -1, 1e9, "", "x" * 1000, [], {}, "0" * 32]
    async with running(slots=1, queue_timeout_s=0.05) as (_, raw):
        for action in (*odd, "reset", "interact", "terminate", "release_one", "heartbeat"):
            for value in odd:
                body = {
                    "action": action,
                    "env_idx": value,
                    "lease_id": value,
                    "idx": value,
                    "leases": value,
                    "request_id": value,
                    "response": value,
                }
                status, got = await raw.post({k: v for k, v in body.items() if action != "reset" or k != "env_idx"})
                assert status < 500, (action, value, got)


async def test_releasing_ones_own_lease_twice_is_200_both_times() -> None:
    async with running(slots=1) as (server, raw):
        lease = await raw.reset()
        assert await raw.release(lease) == await raw.release(lease)
        assert server.leases.free == 1
        other = await raw.reset()
        # the old lease gives no right to the slot's new holder
        assert (await raw.release(lease))[0] == 200
        assert (await raw.act(other, "search[x]"))[0] == 200


async def test_a_strangers_lease_cannot_be_released() -> None:
    async with running(slots=1) as (server, raw):
        lease = await raw.reset()
        assert (await raw.release({**lease, "lease_id": "0" * 32}))[0] == 409
        assert server.leases.free == 0


@pytest.mark.parametrize(
    "query", ["<r>", "<a> x", "<c> 家居用品›床上用品›枕头", "<q> x", "search_results 台灯", "item_page 台灯", "done"]
)
async def test_no_query_is_special_and_none_breaks_the_next_click(query: str) -> None:
    async with running(slots=2) as (_, raw):
        pages = []
        for _ in range(2):
            lease = await raw.reset()
            status, result = await raw.act(lease, f"search[{query}]")
            assert status == 200
            state = result["observation_state"]
            assert (state["page_type"], state["search_text"]) == ("search_results", query)
            pages.append(state["products"])
            for product in state["products"][:1]:
                status, result = await raw.act(lease, f"click[{product['asin']}]")
                assert (status, result["observation_state"]["product"]["asin"]) == (200, product["asin"])
            status, result = await raw.act(lease, "click[back to search]")
            assert result["observation_state"]["page_type"] == "search_home"
        assert pages[0] == pages[1]


async def test_an_abandoned_reset_takes_no_slot() -> None:
    async with running(slots=1) as (server, raw):
        lease = await raw.reset()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(raw.post({"action": "reset", "idx": 4}), 0.2)
        await _until(lambda: server.leases.queued == 0)
        await raw.release(lease)
        assert server.leases.free == 1


async def test_an_abandoned_reset_does_not_stop_those_behind_it() -> None:
    async with running(slots=1) as (server, raw):
        lease = await raw.reset()
        gone = asyncio.create_task(raw.post({"action": "reset", "idx": 4}))
        await _until(lambda: server.leases.queued == 1)
        waiting = asyncio.create_task(raw.reset(6))
        await _until(lambda: server.leases.queued == 2)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        await raw.release(lease)
        assert (await asyncio.wait_for(waiting, 5))["idx"] == 6


async def test_a_full_house_answers_503_with_retry_after() -> None:
    async with running(slots=1, queue_timeout_s=0.1) as (server, raw):
        lease = await raw.reset()
        async with raw.session.post(f"{raw.base}/api/shop_agent", json={"action": "reset", "idx": 4}) as response:
            assert response.status == 503
            assert float(response.headers["Retry-After"]) > 0
            assert (await response.json())["result"]["code"] == "queue_timeout"
        await raw.release(lease)
        assert server.leases.free == 1


async def test_a_full_queue_turns_resets_away_at_once() -> None:
    async with running(slots=1, queue_timeout_s=60, max_queue=0) as (_, raw):
        await raw.reset()
        assert (await asyncio.wait_for(raw.post({"action": "reset", "idx": 4}), 5))[0] == 503


async def test_the_goal_does_not_leave_with_a_finished_episode() -> None:
    async with running(slots=1) as (_, raw):
        lease = await raw.reset()
        status, body = await raw.post({"action": "terminate", **key(lease), "termination_reason": "generation_length"})
        assert (status, body["result"]["goal"]) == (200, {})
        assert body["result"]["done"] is True


async def test_the_private_goal_is_for_the_admin_token_only() -> None:
    async with running(admin_token="secret-token", slots=1) as (_, raw):
        assert (await raw.get("/api/private/goal?idx=4"))[0] == 403
        assert (await raw.get("/api/private/goal?idx=4", headers={"X-Admin-Token": "wrong"}))[0] == 403
        admin = {"X-Admin-Token": "secret-token"}
        status, body = await raw.get("/api/private/goal?idx=4", headers=admin)
        assert (status, body["result"]["goal"]["asin"]) == (200, "700000000074")
        lease = await raw.reset(6)
        _, by_lease = await raw.get(f"/api/private/goal?lease_id={lease['lease_id']}", headers=admin)
        assert by_lease["result"]["idx"] == 6
        assert (await raw.get("/api/private/goal?idx=5", headers=admin))[0] == 404
        assert (await raw.get("/api/private/goal?idx=x", headers=admin))[0] == 400
        # nor does it come with a reset then
        assert (await raw.post({"action": "reset", "idx": 4, "include_private_goal": True}))[0] == 403


async def test_without_a_token_no_goal_is_served() -> None:
    async with running(slots=1) as (_, raw):
        assert (await raw.get("/api/private/goal?idx=4"))[0] == 403
        assert (await raw.get("/api/private/goal?idx=4", headers={"X-Admin-Token": ""}))[0] == 403


async def test_release_all_needs_the_token_once_there_is_one() -> None:
    async with running(admin_token="secret-token", slots=1) as (server, raw):
        await raw.reset()
        assert (await raw.post({"action": "release_all"}))[0] == 403
        assert server.leases.free == 0
        assert (await raw.post({"action": "release_all"}, headers={"X-Admin-Token": "secret-token"}))[0] == 200
        assert server.leases.free == 1


async def test_release_all_without_a_token_is_for_loopback_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    from rayrl.shop import server as module

    async with running(slots=1) as (_, raw):
        assert (await raw.post({"action": "release_all"}))[0] == 200
        monkeypatch.setattr(module, "_is_loopback", lambda remote: False)
        assert (await raw.post({"action": "release_all"}))[0] == 403
    assert module._is_loopback("127.0.0.7") is False  # patched


@pytest.mark.parametrize(
    ("remote", "is_loopback"),
    [("127.0.0.1", True), ("::1", True), ("10.0.0.1", False), ("8.8.8.8", False), (None, False), ("unix", False)],
)
def test_loopback(remote: str | None, is_loopback: bool) -> None:
    from rayrl.shop.server import _is_loopback

    assert _is_loopback(remote) is is_loopback


async def _until(condition: Any, timeout: float = 5.0) -> None:
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.005)
