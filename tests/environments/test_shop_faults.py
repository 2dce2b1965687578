"""The client when something goes wrong between it and the server, and with several servers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from rayrl.errors import EnvironmentFaultError

from .servers import Drop, Flaky, call, factory_for, job, listening, shop


@pytest.mark.parametrize("after", [False, True], ids=["request lost", "answer lost"])
@pytest.mark.parametrize("action", ["reset", "interact", "terminate", "release_one"])
async def test_a_cut_connection_neither_acts_twice_nor_loses_the_episode(action: str, after: bool) -> None:
    cut: list[int] = []

    def before(number: int, body: dict[str, Any]) -> None:
        if body["action"] == action and not cut:
            cut.append(number)
            raise Drop(after=after)

    async with shop(slots=1) as server:
        flaky = Flaky(server.base_url, before)
        async with listening(flaky.handle) as url, factory_for(url) as factory:
            environment = factory.open()
            await environment.reset(job())
            result = await environment.step(call("search[台灯]"), seed=0)
            assert result.observation.state["page_type"] == "search_results"
            (episode,) = server.leases._leases.values()
            assert episode.holder.used == 1
            assert (await environment.terminate("generation_length")).done
            await environment.close()
            assert cut and factory.leases_open == 0 and factory.release_failures == 0
        assert server.leases.free == 1


async def test_a_late_answer_is_not_taken_for_the_next_one() -> None:
    """The first search is answered after its time-out; the retry gets that answer, the next call its own."""
    async with shop() as server:
        flaky = Flaky(server.base_url, lambda number, body: None)
        slow = [True]

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            if b"interact" in await request.read() and slow:
                slow.clear()
                response = await flaky.handle(request)
                await asyncio.sleep(0.6)
                return response
            return await flaky.handle(request)

        async with listening(handle) as url, factory_for(url, step_timeout_s=0.3) as factory:
            environment = factory.open()
            await environment.reset(job())
            first = await environment.step(call("search[台灯]"), seed=0)
            second = await environment.step(call("click[back to search]"), seed=0)
            await asyncio.sleep(0.5)
            third = await environment.step(call("search[咖啡机]"), seed=0)
            pages = [r.observation.state.get("search_text", "home") for r in (first, second, third)]
            assert pages == ["台灯", "home", "咖啡机"]
            assert [r.feedback["valid"] for r in (first, second, third)] == [True, True, True]
            await environment.close()


async def test_a_500_is_not_repeated_but_503_with_retry_after_is() -> None:
    statuses = [503, 503, 500]

    def before(number: int, body: dict[str, Any]) -> web.Response | None:
        if body["action"] != "interact" or not statuses:
            return None
        status = statuses.pop(0)
        headers = {"Retry-After": "0.01"} if status == 503 else {}
        return web.json_response({"result": {"error": "no"}}, status=status, headers=headers)

    async with shop() as server:
        flaky = Flaky(server.base_url, before)
        async with listening(flaky.handle) as url, factory_for(url) as factory:
            environment = factory.open()
            await environment.reset(job())
            with pytest.raises(EnvironmentFaultError) as caught:
                await environment.step(call("search[台灯]"), seed=0)
            assert caught.value.code == "http_500"
            assert [c["action"] for c in flaky.calls].count("interact") == 3
            assert len({c["request_id"] for c in flaky.calls if c["action"] == "interact"}) == 1
            await environment.close()


async def test_attempts_are_bounded() -> None:
    def before(number: int, body: dict[str, Any]) -> None:
        if body["action"] == "interact":
            raise Drop

    async with shop() as server:
        flaky = Flaky(server.base_url, before)
        async with listening(flaky.handle) as url, factory_for(url, max_attempts=3) as factory:
            environment = factory.open()
            await environment.reset(job())
            with pytest.raises(EnvironmentFaultError) as caught:
                await environment.step(call("search[台灯]"), seed=0)
            assert (caught.value.code, caught.value.stage) == ("connection_lost", "step")
            assert [c["action"] for c in flaky.calls].count("interact") == 3
            await environment.close()
            assert factory.leases_open == 0


async def test_a_failed_release_is_an_event_a_count_and_tried_again_at_the_end() -> None:
    events: list[dict[str, Any]] = []
    broken = [True]

    def before(number: int, body: dict[str, Any]) -> web.Response | None:
        if body["action"] == "release_one" and broken:
            return web.json_response({"result": {"error": "disk on fire"}}, status=500)
        return None

    async with shop() as server:
        flaky = Flaky(server.base_url, before)
        async with listening(flaky.handle) as url, factory_for(url, events=events) as factory:
            environment = factory.open()
            await environment.reset(job())
            await environment.close()
            assert (factory.release_failures, factory.leases_open) == (1, 1)
            assert [(e["event"], e["code"]) for e in events] == [("release_failed", "http_500")]
            broken.clear()
            await factory.aclose()
            assert factory.leases_open == 0
            assert server.leases.free == 4


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("observation_state", None, "protocol"),
        ("observation", 7, "protocol"),
        ("environment_version", "other-v1", "environment_version"),
        ("task_instruction", "", "protocol"),
        ("lease_id", None, "protocol"),
        ("observation_state", {"observation_version": "v0"}, "observation_version"),
    ],
)
async def test_an_answer_against_the_protocol_is_the_environments_fault(field: str, value: Any, code: str) -> None:
    async with shop() as server:

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            flaky = Flaky(server.base_url, lambda number, body: None)
            raw = await request.read()
            response = await flaky.handle(request)
            if b'"reset"' in raw:
                assert isinstance(response, web.Response) and isinstance(response.body, bytes)
                body = json.loads(response.body)
                body["result"][field] = value
                return web.json_response(body)
            return response

        async with listening(handle) as url, factory_for(url) as factory:
            with pytest.raises(EnvironmentFaultError) as caught:
                await factory.open().reset(job())
            assert caught.value.code == code
            if field != "lease_id":
                assert server.leases.free == 4
            assert factory.leases_open == 0


# ---- several servers, start-up checks


async def test_episodes_spread_over_servers() -> None:
    async with shop() as one, shop() as two, factory_for(one.base_url, two.base_url) as factory:
        environments = [factory.open() for _ in range(8)]
        await asyncio.gather(*(e.reset(job()) for e in environments))
        assert (one.leases.free, two.leases.free) == (0, 0)
        await asyncio.gather(*(e.close() for e in environments))
        assert (one.leases.free, two.leases.free) == (4, 4)


async def test_an_unreachable_server_is_passed_over_and_found_again() -> None:
    events: list[dict[str, Any]] = []
    async with shop() as one:
        async with shop() as two:
            port, dead = two.port, two.base_url
        async with factory_for(dead, one.base_url, events=events) as factory:
            await factory.start()
            for number in range(4):
                environment = factory.open()
                await environment.reset(job(number))
                await environment.close()
            assert "server_down" in {e["event"] for e in events}
            async with shop(port=port) as again:
                async with asyncio.timeout(10):
                    while "server_up" not in {e["event"] for e in events}:
                        environment = factory.open()
                        await environment.reset(job())
                        await environment.close()
                        await asyncio.sleep(0.05)
                held = [factory.open() for _ in range(2)]
                for environment in held:
                    await environment.reset(job())
                assert again.leases.free == 3
                for environment in held:
                    await environment.close()


async def test_no_server_at_all_is_a_fault_that_names_it() -> None:
    async with shop() as server:
        dead = server.base_url
    async with factory_for(dead) as factory:
        with pytest.raises(EnvironmentFaultError, match=r"no shop server answers.*cannot be reached") as caught:
            await factory.start()
        assert caught.value.code == "unreachable"


async def test_a_server_with_another_catalogue_is_refused() -> None:
    async with shop(seed=5) as server:
        config = {"embedded": {"generate": 60, "seed": 6}}
        async with factory_for(server.base_url, **config) as factory:
            with pytest.raises(EnvironmentFaultError, match="is another shop: catalogue_sha256") as caught:
                await factory.open().reset(job())
            assert caught.value.code == "wrong_server"
        async with factory_for(server.base_url, embedded={"generate": 60, "seed": 5, "page_size": 7}) as factory:
            with pytest.raises(EnvironmentFaultError, match="page_size"):
                await factory.start()
        async with factory_for(server.base_url, embedded={"generate": 60, "seed": 5}) as factory:
            await factory.start()


async def test_a_reset_waits_for_a_server_that_is_restarting() -> None:
    async with shop() as server:
        port, url = server.port, server.base_url
        async with factory_for(url) as factory:
            await factory.start()
            await server.stop()
            waiting = asyncio.create_task(factory.open().reset(job()))
            await asyncio.sleep(0.3)
            assert not waiting.done()
            async with shop(port=port) as again:
                await asyncio.wait_for(waiting, 10)
                assert again.leases.free == 3


async def test_a_server_that_stays_away_fails_the_reset_in_bounded_time() -> None:
    async with shop() as server:
        url = server.base_url
        async with factory_for(url, unreachable_timeout_s=0.3) as factory:
            await factory.start()
            await server.stop()
            with pytest.raises(EnvironmentFaultError) as caught:
                await asyncio.wait_for(factory.open().reset(job()), 5)
            assert (caught.value.code, caught.value.stage) == ("unreachable", "reset")


async def test_an_unanswered_reset_without_request_ids_is_not_repeated() -> None:
    """A server that keeps no answers may have given the slot: asking again would take a second one."""
    events: list[dict[str, Any]] = []
    resets = 0

    async def public(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal resets
        if request.path == "/healthz":
            versions = {"environment_version": "shopsimulator-paper-aligned-v8"}
            return web.json_response({"ready": True, "observation_version": "shopping-observation-v7", **versions})
        resets += 1
        if request.transport is not None:
            request.transport.abort()
        return web.Response()

    async with listening(public) as url, factory_for(url, events=events) as factory:
        with pytest.raises(EnvironmentFaultError) as caught:
            await factory.open().reset(job())
        assert caught.value.code == "connection_lost"
    assert resets == 1
    assert [e["event"] for e in events] == ["lease_may_leak"]
