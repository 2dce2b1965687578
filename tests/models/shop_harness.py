"""Plays the scripted shopper in the embedded shop without HTTP, exactly as the runtime converses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import orjson

from rayrl.config import configs_root
from rayrl.environments.shop_tools import action_text, page_tools
from rayrl.models.scripted import ScriptedModel
from rayrl.prompts import PromptBuilder, PromptConfig, load_prompt
from rayrl.schemas import Observation, Skill, episode_seed, step_seed
from rayrl.shop.catalogue import build_catalogue
from rayrl.shop.generator import generate_catalogue
from rayrl.shop.pages import Shop
from rayrl.shop.session import ShopEpisode


@dataclass(frozen=True)
class Played:
    actions: tuple[str, ...]
    success: bool
    reason: str
    invalid: int


@lru_cache(maxsize=1)
def shop() -> Shop:
    return Shop(build_catalogue(generate_catalogue(480, 0)))


@lru_cache(maxsize=1)
def prompts() -> PromptBuilder:
    return PromptBuilder(load_prompt(configs_root() / "prompts" / "shop_v1.yaml"), PromptConfig())


def observation(answer: dict[str, Any]) -> Observation:
    state = answer["observation_state"]
    return Observation(text=answer["observation"], state=state, version="v", tools=page_tools(state))


def play(model: ScriptedModel, task_id: int, *, sample: int = 0, skills: tuple[str, ...] = ()) -> Played:
    task = shop().catalogue.tasks[task_id]
    persona = bool(task.persona)
    episode = ShopEpisode(shop(), task, interaction_mode="single_turn", persona=persona)
    answer = episode.start()
    page = observation(answer)
    conversation = prompts().start(
        instruction=answer["task_instruction"],
        persona=answer["user_persona"] if persona else {},
        observation=page,
        skills=[Skill(skill_id=f"s{i}", content=text) for i, text in enumerate(skills)],
        max_actions=30,
    )
    seed, actions, invalid = episode_seed(0, task_id, sample), [], 0
    for step in range(30):
        output = model.answer(conversation, page.tools, seed=step_seed(seed, step))
        if output.protocol_error is not None:
            conversation.append({"role": "assistant", "content": output.content})
            feedback = prompts().protocol_feedback(output.protocol_error, page.tools)
            conversation.append({"role": "user", "content": feedback})
            continue
        call = output.tool_calls[0]
        actions.append(action_text(call))
        answer = episode.interact(actions[-1])
        invalid += not answer["action_feedback"]["valid"]
        page = observation(answer)
        made = {"name": call.name, "arguments": orjson.dumps(call.arguments).decode()}
        conversation.append(
            {"role": "assistant", "content": "", "tool_calls": [{"id": call.id, "type": "function", "function": made}]}
        )
        conversation.append({"role": "tool", "tool_call_id": call.id, "content": page.text})
        if answer["done"]:
            break
    detail = answer["reward_detail"]
    return Played(tuple(actions), bool(detail.get("r_success")), str(answer.get("termination_reason")), invalid)


def success_rate(model: ScriptedModel, tasks: int, skills: tuple[str, ...] = ()) -> float:
    ids = sorted(shop().catalogue.tasks)[:tasks]
    return sum(play(model, task_id, skills=skills).success for task_id in ids) / len(ids)
