"""The client against the embedded server: whole episodes, leases, faults on the way, several servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rayrl.environments.base import Environment, EnvironmentFactory
from rayrl.environments.seeding import require_same_first_observation
from rayrl.environments.shop import EmbeddedShopConfig, ShopEnvironmentConfig, ShopEnvironmentFactory
from rayrl.errors import EnvironmentFaultError, LeaseLostError
from rayrl.schemas import EpisodeJob, Observation, ResetResult, StepResult, ToolCall
from rayrl.shop.config import ShopServerConfig
from rayrl.shop.server import ShopServer

from .servers import Drop, Flaky, listening, until

TOKEN = "admin-for-tests"


def call(text: str) -> ToolCall:
    name, _, rest = text.partition("[")
    return ToolCall(id="1", name=name, arguments={"query" if name == "search" else "value": rest[:-1]})


def job(task_id: int = 0, seed: int = 1) -> EpisodeJob:
    return EpisodeJob(task_id=task_id, sample_id=0, seed=seed, split="train")


@contextlib.asynccontextmanager
async def shop(**options: Any) -> AsyncIterator[ShopServer]:
    server = ShopServer(ShopServerConfig(**{"generate": 60, "slots": 4, **options}), admin_token=TOKEN)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def factory_for(
    *urls: str, events: list[dict[str, Any]] | None = None, token: str | None = None, **more: Any
) -> AsyncIterator[ShopEnvironmentFactory]:
    config = ShopEnvironmentConfig(base_urls=list(urls), **{"backoff_s": 0.01, "step_timeout_s": 3.0, **more})
    factory = ShopEnvironmentFactory(config, on_event=events.append if events is not None else None, admin_token=token)
    try:
        yield factory
    finally:
        await factory.aclose()


async def buy(environment: Any, instruction: str) -> StepResult:
    result = await environment.step(call(f"search[{instruction}]"), seed=0)
    result = await environment.step(call(f"click[{result.observation.state['products'][0]['asin']}]"), seed=0)
    for axis, values in result.observation.state["available_options"].items():
        result = await environment.step(call(f"click[{axis}={values[0]}]"), seed=0)
    bought: StepResult = await environment.step(call("click[buy now]"), seed=0)
    return bought


async def test_an_episode() -> None:
    async with shop() as server, factory_for(server.base_url, token=TOKEN) as factory:
        assert isinstance(factory, EnvironmentFactory)
        environment = factory.open()
        assert isinstance(environment, Environment)
        start = await environment.reset(job())
        assert start.public["task_mode"] == "standard"
        assert server.leases.free == 3 and factory.leases_open == 1
        result = await buy(environment, start.instruction)
        assert result.done and result.termination_reason == "purchase"
        assert result.reward == result.reward_detail["r_strict"]
        assert result.private is not None and result.private["goal"]["task_id"] == 0
        assert "lease_id" not in json.dumps([start.model_dump(), result.model_dump()])
        await environment.close()
        assert server.leases.free == 4 and factory.leases_open == 0


async def test_without_a_token_there_is_no_goal_and_no_error() -> None:
    events: list[dict[str, Any]] = []
    async with shop() as server, factory_for(server.base_url, events=events) as factory:
        environment = factory.open()
        await environment.reset(job())
        assert (await environment.terminate("action_limit")).private is None
        await environment.close()
    assert events == []


async def test_a_wrong_token_is_an_event_that_does_not_show_it() -> None:
    events: list[dict[str, Any]] = []
    async with shop() as server, factory_for(server.base_url, events=events, token="wrong-token") as factory:
        environment = factory.open()
        await environment.reset(job())
        assert (await environment.terminate("action_limit")).private is None
        await environment.close()
    assert [e["event"] for e in events] == ["private_goal_unavailable"]
    assert "wrong-token" not in str(events)


async def test_the_admin_token_comes_from_the_named_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SHOP_TOKEN", TOKEN)
    async with shop() as server, factory_for(server.base_url, admin_token_env="MY_SHOP_TOKEN") as factory:
        environment = factory.open()
        await environment.reset(job())
        assert (await environment.terminate("action_limit")).private is not None
        await environment.close()


async def test_tools_follow_the_page() -> None:
    async with shop() as server, factory_for(server.base_url, max_query_length=None) as factory:
        environment = factory.open()
        start = await environment.reset(job())
        (search,) = start.observation.tools
        assert search["function"]["parameters"]["additionalProperties"] is False
        result = await environment.step(call("search[台灯]"), seed=0)
        (click,) = result.observation.tools
        parameters = click["function"]["parameters"]
        assert parameters["properties"]["value"]["enum"] == result.observation.state["actions"]
        assert parameters["additionalProperties"] is False and parameters["required"] == ["value"]
        # an illegal click is the environment's to answer, and costs an action
        illegal = await environment.step(call("click[buy now]"), seed=0)
        assert (illegal.feedback["valid"], illegal.feedback["reason"]) == (False, "unavailable_action")
        assert illegal.observation.tools == result.observation.tools
        await environment.close()


async def test_the_query_limit_stands_in_the_schema_and_must_be_the_servers() -> None:
    async with shop(max_query_length=10) as server:
        async with factory_for(server.base_url, max_query_length=10) as factory:
            environment = factory.open()
            start = await environment.reset(job())
            assert start.observation.tools[0]["function"]["parameters"]["properties"]["query"]["maxLength"] == 10
            await environment.close()
        async with factory_for(server.base_url) as factory:
            with pytest.raises(EnvironmentFaultError, match="max_query_length is 10"):
                await factory.start()


async def test_a_query_cannot_smuggle_a_second_action() -> None:
    async with shop() as server, factory_for(server.base_url) as factory:
        environment = factory.open()
        await environment.reset(job())
        result = await environment.step(call("search[台灯\nAction: click[buy now]"), seed=0)
        assert result.observation.state["page_type"] == "search_results"
        await environment.close()


async def test_persona_mode() -> None:
    async with shop() as server, factory_for(server.base_url, persona=True) as factory:
        task = next(t for t in server.shop.catalogue.tasks.values() if t.persona)
        environment = factory.open()
        start = await environment.reset(job(task.task_id))
        assert (start.instruction, start.persona) == (task.instruction_simple, task.persona)
        await environment.close()


async def test_every_exit_path_gives_the_lease_back() -> None:
    async with shop() as server, factory_for(server.base_url) as factory:

        async def episode(how: str) -> None:
            environment = factory.open()
            try:
                await environment.reset(job())
                if how == "raise":
                    raise RuntimeError(how)
                if how == "hang":
                    await asyncio.sleep(60)
            finally:
                await environment.close()

        await episode("normal")
        with pytest.raises(RuntimeError):
            await episode("raise")
        hanging = asyncio.create_task(episode("hang"))
        await until(lambda: server.leases.free == 3)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        assert server.leases.free == 4 and factory.leases_open == 0


async def test_closing_finishes_even_when_cancelled() -> None:
    async with shop() as server:

        def slow(number: int, body: dict[str, Any]) -> None:
            return None

        flaky = Flaky(server.base_url, slow)

        async def delayed(request: web.BaseRequest) -> web.StreamResponse:
            if b"release_one" in await request.read():
                await asyncio.sleep(0.2)
            return await flaky.handle(request)

        async with listening(delayed) as url, factory_for(url) as factory:
            environment = factory.open()
            await environment.reset(job())
            closing = asyncio.create_task(environment.close())
            await asyncio.sleep(0.05)
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
            assert server.leases.free == 4 and factory.leases_open == 0


async def test_a_reset_cancelled_while_queued_takes_no_slot() -> None:
    async with shop(slots=1) as server, factory_for(server.base_url) as factory:
        holder = factory.open()
        await holder.reset(job())
        waiting = asyncio.create_task(factory.open().reset(job(1)))
        await until(lambda: server.leases.queued == 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await holder.close()
        await factory.aclose()
        await until(lambda: server.leases.free == 1 and server.leases.queued == 0)


async def test_a_full_house_is_waited_for() -> None:
    async with shop(slots=1, queue_timeout_s=0.05) as server, factory_for(server.base_url) as factory:
        holder = factory.open()
        await holder.reset(job())
        waiting = asyncio.create_task(factory.open().reset(job(1)))
        await asyncio.sleep(0.2)
        await holder.close()
        await asyncio.wait_for(waiting, 5)


async def test_no_slot_in_time_is_a_fault_with_its_own_code() -> None:
    async with (
        shop(slots=1, queue_timeout_s=0.05) as server,
        factory_for(server.base_url, reset_timeout_s=0.3) as factory,
    ):
        holder = factory.open()
        await holder.reset(job())
        with pytest.raises(EnvironmentFaultError) as caught:
            await factory.open().reset(job(1))
        assert caught.value.code in ("no_free_slot", "timeout")
        await holder.close()


async def test_an_unknown_task_is_a_fault_at_once() -> None:
    async with shop() as server, factory_for(server.base_url) as factory:
        with pytest.raises(EnvironmentFaultError) as caught:
            await factory.open().reset(job(999_999))
        assert (caught.value.code, caught.value.detail) == ("reset_bad_task", {"status": 404})
        assert server.leases.free == 4


# ---- heartbeat and lease loss


async def test_a_thinking_policy_keeps_its_lease() -> None:
    async with shop(lease_ttl_s=0.4) as server, factory_for(server.base_url) as factory:
        environments = [factory.open() for _ in range(3)]
        for number, environment in enumerate(environments):
            await environment.reset(job(number))
        await asyncio.sleep(1.2)
        assert server.leases.expired_total == 0
        for environment in environments:
            await environment.step(call("search[台灯]"), seed=0)
            await environment.close()
        text = server.metrics.render({})
        count = int(text.split('requests_total{action="heartbeat",status="200"} ')[1].split()[0])
        assert count <= 12, "one call renews all leases of a server"


async def test_a_lease_taken_by_the_operator_is_lost() -> None:
    events: list[dict[str, Any]] = []
    async with shop(lease_ttl_s=0.3) as server, factory_for(server.base_url, events=events) as factory:
        environment = factory.open()
        await environment.reset(job())
        server.leases.release_all()
        with pytest.raises(LeaseLostError):
            await environment.step(call("search[台灯]"), seed=0)
        other = factory.open()
        await other.reset(job())
        server.leases.release_all()
        # the heartbeat finds out by itself
        await until(lambda: factory.leases_open == 0)
        with pytest.raises(LeaseLostError):
            await other.step(call("search[台灯]"), seed=0)
        await environment.close()
        await other.close()
        assert factory.leases_open == 0
    assert [e["event"] for e in events] == ["lease_lost", "lease_lost"]


async def test_killing_a_client_process_gives_its_slot_back_within_the_ttl() -> None:
    async with shop(slots=1, lease_ttl_s=1.0) as server:
        child = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import asyncio, sys\n"
                "from rayrl.environments.shop import ShopEnvironmentConfig, ShopEnvironmentFactory\n"
                "from rayrl.schemas import EpisodeJob\n"
                "async def main():\n"
                "    factory = ShopEnvironmentFactory(ShopEnvironmentConfig(base_urls=[sys.argv[1]]))\n"
                "    await factory.open().reset(EpisodeJob(task_id=0, sample_id=0, seed=1, split='x'))\n"
                "    print('holding', flush=True)\n"
                "    await asyncio.sleep(60)\n"
                "asyncio.run(main())\n",
                server.base_url,
            ],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        try:
            assert child.stdout is not None
            assert await asyncio.to_thread(child.stdout.readline) == b"holding\n"
            await asyncio.sleep(1.3)
            assert server.leases.free == 0, "alive, it beats"
        finally:
            child.kill()
            child.wait()
        began = time.monotonic()
        await until(lambda: server.leases.free == 1)
        assert time.monotonic() - began < 1.5


# ---- what goes wrong on the way


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


async def test_the_factory_starts_and_stops_embedded_servers() -> None:
    config = ShopEnvironmentConfig(embedded=EmbeddedShopConfig(generate=24, servers=2, slots=2))
    factory = ShopEnvironmentFactory(config)
    await factory.start()
    processes = list(factory._processes)
    assert len(factory.base_urls) == 2 and all(p.running for p in processes)
    environment = factory.open()
    await environment.reset(job())
    # the token of an embedded server is known to the one who started it
    assert (await environment.terminate("action_limit")).private is not None
    await environment.close()
    await factory.aclose()
    await factory.aclose()
    assert not any(p.running for p in processes)


# ---- seeds


async def test_the_same_job_twice_starts_the_same() -> None:
    async with shop() as server, factory_for(server.base_url) as factory:
        first = await require_same_first_observation(factory, job(0, seed=1))
        assert first.instruction == server.shop.catalogue.tasks[0].instruction
        assert server.leases.free == 4


async def test_a_server_that_starts_a_task_differently_is_a_fault() -> None:
    async with shop() as server:
        count = [0]

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            raw = await request.read()
            response = await Flaky(server.base_url, lambda number, body: None).handle(request)
            if b'"reset"' in raw:
                assert isinstance(response, web.Response) and isinstance(response.body, bytes)
                body = json.loads(response.body)
                count[0] += 1
                body["result"]["observation"] += f" {count[0]}"
                return web.json_response(body)
            return response

        async with listening(handle) as url, factory_for(url) as factory:
            environment = factory.open()
            await environment.reset(job())
            await environment.close()
            with pytest.raises(EnvironmentFaultError) as caught:
                await factory.open().reset(job())
            assert caught.value.code == "not_deterministic"
            assert server.leases.free == 4 and factory.leases_open == 0


async def test_a_seed_that_is_ignored_stops_a_seeded_run() -> None:
    class Moody:
        """Accepts a seed, uses a counter."""

        count = 0

        async def reset(self, job: EpisodeJob) -> ResetResult:
            Moody.count += 1
            observation = Observation(text=str(Moody.count), state={}, version="1", tools=[])
            return ResetResult(instruction="x", observation=observation, environment_version="1")

        async def close(self) -> None:
            pass

    class Factory:
        def open(self) -> Any:
            return Moody()

    with pytest.raises(EnvironmentFaultError, match="differ in observation") as caught:
        await require_same_first_observation(Factory(), job())  # type: ignore[arg-type]
    assert caught.value.code == "not_deterministic"


# ---- misuse


async def test_one_environment_plays_one_episode() -> None:
    async with shop() as server, factory_for(server.base_url) as factory:
        environment = factory.open()
        with pytest.raises(EnvironmentFaultError, match="no episode is running"):
            await environment.step(call("search[x]"), seed=0)
        await environment.reset(job())
        with pytest.raises(EnvironmentFaultError, match="plays one episode"):
            await environment.reset(job())
        await environment.close()
        with pytest.raises(EnvironmentFaultError, match="plays one episode"):
            await environment.reset(job())
        assert server.leases.free == 4
