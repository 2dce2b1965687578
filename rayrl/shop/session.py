"""One episode on the server: a task, the page the shopper is on, the actions used, and how it ended.

Invariants: synchronous (a call runs to its end, so calls on one lease cannot interleave); every action, valid or not,
uses one of the budget; after the end nothing changes any more; nothing private is in any answer.
"""

from __future__ import annotations

from typing import Any

from rayrl.shop.actions import parse_action
from rayrl.shop.catalogue import Task
from rayrl.shop.pages import Feedback, Home, Page, Shop, Terminal
from rayrl.shop.pricing import resolve_price
from rayrl.shop.render import render
from rayrl.shop.reward import purchase_reward, zero_reward
from rayrl.shop.versions import ACTION_LIMITS, ENVIRONMENT_VERSION


class EpisodeOverError(Exception):
    """An action or termination after the end. The message is what the protocol answers."""


class ShopEpisode:
    """State of one running episode.

    Args:
        shop: catalogue and page rules, shared by all episodes.
        task: the task to play.
        interaction_mode: a key of :data:`~rayrl.shop.versions.ACTION_LIMITS`.
        persona: play the short instruction with the persona, if the task has one.
    """

    def __init__(self, shop: Shop, task: Task, *, interaction_mode: str, persona: bool) -> None:
        self.shop = shop
        self.task = task
        self.interaction_mode = interaction_mode
        self.persona = persona
        self.page: Page = Home()
        self.used = 0
        self.done = False
        self._feedback: Feedback | None = None

    def start(self) -> dict[str, Any]:
        """The public part of the reset answer."""
        state = self.shop.state(self.page, None)
        simple = self.persona and bool(self.task.persona)
        return {
            "task_instruction": self.task.instruction_simple if simple else self.task.instruction,
            "observation": render(state),
            "observation_state": state,
            "message": f"Task {self.task.task_id} started",
            "idx": self.task.task_id,
            "task_mode": "persona" if self.persona else "standard",
            "interaction_mode": self.interaction_mode,
            "environment_version": ENVIRONMENT_VERSION,
            "user_persona": self.task.persona,
        }

    def interact(self, text: str) -> dict[str, Any]:
        """Act once.

        Raises:
            EpisodeOverError: the episode has ended.
        """
        if self.done:
            raise EpisodeOverError("episode is already terminated; reset before stepping")
        self.page, feedback = self.shop.step(self.page, parse_action(text))
        self._feedback = feedback
        self.used += 1
        message = "Continue interaction" if feedback.valid else "Invalid action"
        out = self._answer(message)
        out["action_feedback"] = feedback.as_dict()
        if isinstance(self.page, Terminal):
            self._finish(out, self._purchase_detail(self.page), "purchase")
            out["purchase"] = self._purchase(self.page)
        elif self.used >= ACTION_LIMITS[self.interaction_mode]:
            self._finish(out, zero_reward("action_limit"), "action_limit")
        elif not feedback.valid:
            out["reward"] = 0
        return out

    def terminate(self, reason: str) -> dict[str, Any]:
        """End the episode from outside with zero reward; the page stays what it is.

        Raises:
            EpisodeOverError: it has ended before.
        """
        if self.done:
            raise EpisodeOverError("episode is already terminated")
        out = self._answer(f"Episode terminated: {reason}")
        self._finish(out, zero_reward(reason), reason)
        return out

    def _answer(self, message: str) -> dict[str, Any]:
        state = self.shop.state(self.page, self._feedback)
        return {
            "done": False,
            "over": False,
            "reward": 0.0,
            "reward_detail": {},
            "purchase": {},
            "goal": {},
            "observation": render(state),
            "observation_state": state,
            "message": message,
        }

    def _finish(self, out: dict[str, Any], detail: dict[str, Any], reason: str) -> None:
        self.done = True
        out["done"] = out["over"] = True
        out["reward"] = detail["r_strict"]
        out["reward_detail"] = detail
        out["termination_reason"] = reason

    def _purchase_detail(self, page: Terminal) -> dict[str, Any]:
        products = self.shop.catalogue.products
        return purchase_reward(self.task, products[self.task.asin], products[page.asin], dict(page.selected))

    def _purchase(self, page: Terminal) -> dict[str, Any]:
        product = self.shop.catalogue.products[page.asin]
        selected = dict(page.selected)
        return {
            "asin": product.asin,
            "attributes": list(product.attributes),
            "category": product.category,
            "name": product.title,
            "product_category": product.product_category,
            "instruction_text": self.task.instruction,
            "price": resolve_price(product.pricing, product.axes, selected)["price"],
            "options": selected,
        }
