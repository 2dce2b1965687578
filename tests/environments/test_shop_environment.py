"""The client against the embedded server: whole episodes, leases, faults on the way, several servers."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rayrl.environments.base import Environment, EnvironmentFactory
from rayrl.environments.seeding import require_same_first_observation
from rayrl.environments.shop import EmbeddedShopConfig, ShopEnvironmentConfig, ShopEnvironmentFactory
from rayrl.errors import EnvironmentFaultError, LeaseLostError
from rayrl.schemas import EpisodeJob, Observation, ResetResult, StepResult

from .servers import TOKEN, Flaky, call, factory_for, job, listening, shop, until


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
