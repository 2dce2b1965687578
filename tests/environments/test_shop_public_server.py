"""The client against the public server's own recorded answers."""

from __future__ import annotations

from typing import Any

import pytest

from rayrl.environments.shop import ShopEnvironmentConfig, ShopEnvironmentFactory
from rayrl.errors import EnvironmentFaultError, LeaseLostError
from rayrl.schemas import EpisodeJob, ToolCall

from .servers import PublicServer, listening, recorded


def call(text: str) -> ToolCall:
    name, _, rest = text.partition("[")
    return ToolCall(id="1", name=name, arguments={"query" if name == "search" else "value": rest[:-1]})


def job(task_id: int) -> EpisodeJob:
    return EpisodeJob(task_id=task_id, sample_id=0, seed=1, split="train")


def config(url: str, **more: Any) -> ShopEnvironmentConfig:
    return ShopEnvironmentConfig(base_urls=[url], **{"persona": True, "backoff_s": 0.01, "step_timeout_s": 5.0, **more})


async def test_a_recorded_episode_from_reset_to_release() -> None:
    pairs = [p for p in recorded("reset_persona", "release") if p["response"]["http_status"] == 200]
    # actions whose text only a hand could send are not among what tool calls become
    pairs = [
        p for p in pairs if p["label"] not in ("action_no_brackets", "two_actions", "search_via_thought_action_text")
    ]
    server = PublicServer(pairs)
    events: list[dict[str, Any]] = []
    async with listening(server.handle) as url:
        factory = ShopEnvironmentFactory(config(url), on_event=events.append)
        environment = factory.open()
        start = await environment.reset(job(4))
        assert start.instruction == "想买电饭煲，963元以内"
        assert start.persona["用户ID"] == "u2"
        assert [tool["function"]["name"] for tool in start.observation.tools] == ["search"]
        assert factory.leases_open == 1
        result = None
        for pair in pairs[1:-1]:
            result = await environment.step(call(pair["request"]["json"]["response"]), seed=0)
            want = pair["response"]["json"]["result"]
            assert result.action == pair["request"]["json"]["response"]
            assert result.observation.text == want["observation"]
            assert result.observation.state == want["observation_state"]
            assert (result.done, result.reward, result.feedback) == (
                want["done"],
                want["reward"],
                want["action_feedback"],
            )
            if not result.done:
                enum = [
                    t["function"]["parameters"]["properties"]["value"]["enum"]
                    for t in result.observation.tools[-1:]
                    if t["function"]["name"] == "click"
                ]
                assert enum == ([want["observation_state"]["actions"]] if want["observation_state"]["actions"] else [])
        assert result is not None and result.done
        assert (result.reward, result.termination_reason) == (1.0, "purchase")
        assert result.observation.tools == []
        # the goal that the public server sends is handed out apart from everything public
        assert result.private is not None and result.private["goal"]["asin"] == "700000000074"
        assert "goal" not in result.public and "700000000074" not in str(result.public)
        await environment.close()
        await environment.close()
        assert factory.leases_open == 0
        await factory.aclose()
    assert server.mismatches == []
    assert server.pairs == []
    assert [body["action"] for body in server.requests].count("heartbeat") == 0
    assert all("request_id" not in body for body in server.requests)
    assert not [e for e in events if e["event"] == "release_failed"]


async def test_the_recorded_action_limit() -> None:
    pairs = recorded("reset_for_action_limit", "release_one")
    server = PublicServer(pairs)
    async with listening(server.handle) as url:
        factory = ShopEnvironmentFactory(config(url))
        environment = factory.open()
        await environment.reset(job(6))
        results = [await environment.step(call("click[nope]"), seed=0) for _ in range(30)]
        assert [r.done for r in results] == [False] * 29 + [True]
        assert results[-1].termination_reason == "action_limit"
        # the page still looks playable; done decides
        assert results[-1].observation.state["search_available"] is True
        assert results[-1].observation.tools == []
        await environment.close()
        await factory.aclose()
    assert server.mismatches == []


async def test_termination_in_standard_mode_keeps_persona_and_goal_apart() -> None:
    pairs = [p for p in recorded("reset_standard_private_goal", "release_one") if p["label"] != "terminate_bad_reason"]
    for pair in pairs[:1]:
        pair["request"]["json"]["include_private_goal"] = False
    server = PublicServer(pairs)
    async with listening(server.handle) as url:
        factory = ShopEnvironmentFactory(config(url, persona=False))
        environment = factory.open()
        start = await environment.reset(job(4))
        # the recorded answer carries persona and private fields all the same
        assert start.persona == {}
        assert not {"private_task_instruction", "goal_options", "reason_key"} & start.public.keys()
        assert start.private is None
        result = await environment.terminate("generation_length")
        assert (result.done, result.reward, result.termination_reason) == (True, 0.0, "generation_length")
        assert result.private is not None and result.private["goal"]["task_id"] == 4
        await environment.close()
        await factory.aclose()
    assert server.mismatches == []


@pytest.mark.parametrize(("label", "task_id"), [("reset_bad_task", 999_999), ("reset_bad_mode", 4)])
async def test_a_500_for_a_mistake_is_not_repeated(label: str, task_id: int) -> None:
    (pair,) = recorded(label, label)
    server = PublicServer([pair])
    async with listening(server.handle) as url:
        factory = ShopEnvironmentFactory(config(url, persona=False))
        with pytest.raises(EnvironmentFaultError) as caught:
            await factory.open().reset(job(task_id))
        assert (caught.value.code, caught.value.stage) == ("http_500", "reset")
        assert factory.leases_open == 0
        await factory.aclose()
    assert len(server.requests) == 1


@pytest.mark.parametrize("label", ["step_after_done", "legacy_keyword_a_500", "url_substring_click_product_500"])
async def test_a_500_on_a_step_is_not_repeated(label: str) -> None:
    (failing,) = recorded(label, label)
    reset = next(p for p in recorded("reset_persona", "reset_persona"))
    release = recorded("release", "release")
    server = PublicServer([reset, failing, *release])
    async with listening(server.handle) as url:
        factory = ShopEnvironmentFactory(config(url))
        environment = factory.open()
        await environment.reset(job(4))
        with pytest.raises(EnvironmentFaultError) as caught:
            await environment.step(call("search[x]"), seed=0)
        assert caught.value.code == "http_500"
        await environment.close()
        assert factory.leases_open == 0
        await factory.aclose()
    assert [body["action"] for body in server.requests] == ["reset", "interact", "release_one"]


async def test_a_lease_taken_away_is_a_lost_lease_and_its_release_is_tolerated() -> None:
    reset = recorded("reset_persona", "reset_persona")
    stale = recorded("interact_after_release", "interact_after_release")
    server = PublicServer([*reset, *stale])
    events: list[dict[str, Any]] = []
    async with listening(server.handle) as url:
        factory = ShopEnvironmentFactory(config(url), on_event=events.append)
        environment = factory.open()
        await environment.reset(job(4))
        with pytest.raises(LeaseLostError) as caught:
            await environment.step(call("search[x]"), seed=0)
        assert caught.value.code == "lease_lost"
        await environment.close()
        assert factory.leases_open == 0 and factory.release_failures == 0
        await factory.aclose()
    assert [e["event"] for e in events] == ["lease_lost"]


async def test_a_double_release_is_tolerated() -> None:
    reset = recorded("reset_persona", "reset_persona")
    double = recorded("double_release", "double_release")
    server = PublicServer([*reset, *double])
    events: list[dict[str, Any]] = []
    async with listening(server.handle) as url:
        factory = ShopEnvironmentFactory(config(url), on_event=events.append)
        environment = factory.open()
        await environment.reset(job(4))
        await environment.close()
        assert factory.leases_open == 0
        await factory.aclose()
    assert events == []


async def test_an_unverifiable_catalogue_is_an_event_not_an_error() -> None:
    server = PublicServer([])
    events: list[dict[str, Any]] = []
    async with listening(server.handle) as url:
        factory = ShopEnvironmentFactory(config(url, catalogue_sha256="0" * 64), on_event=events.append)
        await factory.start()
        await factory.aclose()
    assert [e["event"] for e in events] == ["catalogue_unverified"]
