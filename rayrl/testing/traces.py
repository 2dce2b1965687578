"""Synthetic traces that look like real ones: for tests and benchmarks of everything that reads traces.

They come from no model and no environment and say so (``provenance.model`` is ``synthetic``). A recipe and a (task,
sample) determine a record completely. Difficulty and luck of an episode depend on (seed, task, sample) alone, so two
recipes that differ only in ``competence`` are paired by common random numbers and the better one really is better.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from rayrl.schemas import (
    EPISODE_SCHEMA,
    JsonDict,
    Observation,
    canonical_json,
    episode_id,
    episode_seed,
    sha256_hex,
    step_seed,
)
from rayrl.testing.pages import Page, detail_page, home_page, make_catalogue, results_page, terminal_page, tools_of
from rayrl.traces.manifest import make_manifest, write_json_atomic
from rayrl.traces.schema import Interner, expand

MODES = (
    "never_searched",
    "target_never_surfaced",
    "not_opened",
    "wrong_variant",
    "over_budget",
    "loop",
    "repeated_query",
    "action_limit",
    "generation_length",
)
"""How an unsuccessful synthetic episode goes wrong; see :func:`plan_episode`."""


@dataclass(frozen=True)
class TraceRecipe:
    """What to generate. Rates are probabilities per episode (``protocol_error_rate``: per step)."""

    experiment: str = "synthetic"
    seed: int = 7
    tasks: int = 20
    samples: int = 1
    split: str = "val"
    competence: float = 0.0
    """Log-odds of success on a task of average difficulty."""
    failure_rate: float = 0.02
    """Attempts that fail (endpoint, environment, deadline); half of them are run again and complete."""
    protocol_error_rate: float = 0.05
    skills: tuple[str, ...] = ()
    checkpoint: str = "synthetic-0"
    reasoning: bool = True

    def task_ids(self) -> list[int]:
        """Ids with holes, as real splits have."""
        return [3 * n + (n % 2) for n in range(self.tasks)]


@dataclass(frozen=True)
class Plan:
    """What the generator decided about an episode before writing it: the ground truth for tests."""

    success: bool
    mode: str
    """``success`` or one of :data:`MODES`."""
    fails: bool
    """The first attempt ends without a result."""
    recovers: bool
    """A second attempt completes."""


def _rng(*parts: Any) -> random.Random:
    return random.Random(":".join(map(str, parts)))


def plan_episode(recipe: TraceRecipe, task: int, sample: int) -> Plan:
    """The outcome of one episode; see the module docstring about common random numbers."""
    difficulty = _rng("difficulty", recipe.seed, task).gauss(0.0, 1.5)
    luck = _rng("luck", recipe.seed, task, sample).random()
    success = luck < 1 / (1 + math.exp(difficulty - recipe.competence))
    choice = _rng("mode", recipe.seed, task, sample)
    mode = "success" if success else choice.choice(MODES)
    fate = choice.random()
    fails = fate < recipe.failure_rate
    return Plan(success, mode, fails, fails and fate < recipe.failure_rate / 2)


@lru_cache(maxsize=4)
def _catalogue(seed: int) -> list[JsonDict]:
    return make_catalogue(seed)


class _Script:
    """Collects the steps of one episode as the runtime would."""

    def __init__(self, recipe: TraceRecipe, task: int, sample: int, job_seed: int, instruction: str) -> None:
        self.recipe, self.seed, self.rng = recipe, job_seed, _rng("script", recipe.seed, task, sample)
        self.intern = Interner()
        self.steps: list[JsonDict] = []
        self.usage = {"prompt_tokens": 0, "completion_tokens": 0, "model_calls": 0}
        self.page: Page = home_page()
        skills = "\n".join(f"- [{s}] 先核对预算，再购买。" for s in recipe.skills)
        user = f"任务：{instruction}\n\n{self.page.text}"
        system = "你是购物助手。每次只调用一个工具。" * 6 + (f"\n{skills}" if skills else "")
        self.conversation: list[JsonDict] = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        self.context = 300 + len(user) // 2

    def _observe(self) -> Observation:
        return Observation(text=self.page.text, state=self.page.state, version="shopping-observation-v7", tools=[])

    def _open(self, tools: list[JsonDict], completion: int) -> JsonDict:
        index = len(self.steps)
        step: JsonDict = {
            "index": index,
            "seed": step_seed(self.seed, index),
            "observation": self.intern.observation(self._observe()),
            "tools": self.intern.toolset(tools),
        }
        usage = {"prompt_tokens": self.context, "completion_tokens": completion}
        self.usage["prompt_tokens"] += self.context
        self.usage["completion_tokens"] += completion
        self.usage["model_calls"] += 1
        self.context += completion
        step["model"] = {"usage": usage, "latency_ms": round(self.rng.lognormvariate(6.2, 0.4), 3)}
        return step

    def act(self, name: str, value: str, page: Page, *, done: bool = False, final: JsonDict | None = None) -> None:
        """One good call and the environment's answer (sometimes after a protocol error)."""
        if self.rng.random() < self.recipe.protocol_error_rate:
            self.protocol_error()
        tools = tools_of(self.page)
        step = self._open(tools, self.rng.randint(30, 120))
        call_id = f"call_{len(self.steps):02d}{self.rng.getrandbits(32):08x}"
        arguments = {"query": value} if name == "search" else {"value": value}
        valid = name == "search" or value in self.page.state["actions"]
        if self.recipe.reasoning:
            step["model"]["reasoning"] = f"当前页面是{self.page.state['page_type']}，下一步：{name} {value}。" * 3
        step["model"] |= {
            "tool_calls": [{"id": call_id, "name": name, "arguments": arguments}],
            "finish_reason": "tool_calls",
            "response_id": f"cmpl-{self.rng.getrandbits(48):012x}",
        }
        action = f"{name}[{value}]"
        reason = "executed" if valid else "unavailable_action"
        feedback = {"action": action, "valid": valid, "reason": reason, "message": "已执行" if valid else "不可用"}
        if valid:
            self.page = replace(page, state={**page.state, "last_action": feedback})
        step["action"] = action
        step["environment"] = {
            "observation": self.intern.observation(self._observe()),
            "done": done,
            "reward": final["reward"] if final else 0.0,
            **({k: final[k] for k in ("reward_detail", "purchase", "termination_reason") if final[k]} if final else {}),
        }
        step["action_feedback"] = feedback
        self.steps.append(step)
        function = {"name": name, "arguments": orjson.dumps(arguments).decode()}
        self.conversation += [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": call_id, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": call_id, "content": self.page.text},
        ]
        self.context += len(self.page.text) // 2

    def protocol_error(self) -> None:
        """A reply without a call; the page stays."""
        step = self._open(tools_of(self.page), 40)
        step["model"] |= {"content": "我想先看看。", "finish_reason": "stop"}
        step["protocol_error"] = {"code": "no_tool_call", "message": "no tool was called"}
        step["protocol_feedback"] = "Your reply could not be used (no_tool_call)."
        self.steps.append(step)
        self.conversation += [
            {"role": "assistant", "content": "我想先看看。"},
            {"role": "user", "content": step["protocol_feedback"]},
        ]

    def cut(self) -> None:
        """A completion cut by length."""
        step = self._open(tools_of(self.page), 4096)
        step["model"]["finish_reason"] = "length"
        step["policy_failure"] = {"code": "generation_length", "message": "cut before a valid call"}
        self.steps.append(step)


def _zero(reason: str) -> JsonDict:
    names = ("r_strict", "r_loose", "r_success", "r_type", "r_att", "r_option", "r_price")
    detail: JsonDict = dict.fromkeys(names, 0.0)
    detail |= {"r_success": 0, "price_verifiable": False, "target_asin_match": False, "termination_reason": reason}
    return {"done": True, "reward": 0.0, "reward_detail": detail, "purchase": {}, "termination_reason": reason}


def _purchase(product: JsonDict, options: dict[str, str], goal: JsonDict) -> JsonDict:
    price = product["prices"][next(iter(options.values()))]
    same = product["asin"] == goal["asin"]
    hits = sum(v in options.values() for v in goal["goal_options"])
    parts = {
        "r_type": 1.0 if product["category"] == goal["category"] else 0.1,
        "r_att": 1.0 if same else 0.5,
        "r_option": hits / len(goal["goal_options"]),
        "r_price": float(price <= goal["price_upper"]),
    }
    strict = math.prod(parts.values())
    loose = parts["r_type"] * (2 * parts["r_att"] + hits + parts["r_price"]) / (2 + len(goal["goal_options"]) + 1)
    detail: JsonDict = {**parts, "r_strict": strict, "r_loose": loose, "r_success": int(strict == 1.0)}
    detail |= {"target_asin_match": same, "price_verifiable": True, "termination_reason": "purchase"}
    bought = {"asin": product["asin"], "name": product["title"], "price": price, "options": options}
    return {
        "done": True,
        "reward": strict,
        "reward_detail": detail,
        "purchase": {**bought, "product_category": product["category"]},
        "termination_reason": "purchase",
    }


def _play(script: _Script, plan: Plan, target: JsonDict, goal: JsonDict, shelf: list[JsonDict]) -> JsonDict:
    rng = script.rng
    others = [p for p in shelf if p["asin"] != target["asin"]]
    word = target["title"].split(" ")[0][-6:]

    def search(products: list[JsonDict], query: str) -> None:
        script.act("search", query, results_page(query, products))

    def back() -> None:
        script.act("click", "back to search", home_page())

    def buy(product: JsonDict, value: str) -> JsonDict:
        script.act("click", product["asin"], detail_page(product, {}))
        chosen = {product["axis"]: value}
        script.act("click", f"{product['axis']}={value}", detail_page(product, chosen))
        final = _purchase(product, chosen, goal)
        script.act("click", "buy now", terminal_page(), done=True, final=final)
        return final

    good = goal["goal_options"][0]
    visible = [*others[:11], target, *others[11:19]]
    if plan.mode == "never_searched":
        for _ in range(rng.randint(3, 6)):
            script.act("click", "buy now", home_page())
        return _zero("action_limit")
    if plan.mode == "generation_length":
        search(visible, word)
        script.cut()
        return _zero("generation_length")
    for _ in range(rng.randint(0, 2)):  # a few honest detours
        search(rng.sample(others, min(20, len(others))), f"{word} {rng.choice(shelf)['attributes'][0]}")
        looked = rng.choice(script.page.state["products"])
        product = next(p for p in shelf if p["asin"] == looked["asin"])
        script.act("click", product["asin"], detail_page(product, {}))
        back()
    if plan.mode == "repeated_query":
        for _ in range(3):
            search(others[:20], word)
            back()
    if plan.mode in ("loop", "action_limit"):
        search(visible if plan.mode == "loop" else others[:20], word)
        for n in range(rng.randint(6, 9)):
            product = others[0] if plan.mode == "loop" else others[n]
            script.act("click", product["asin"], detail_page(product, {}))
            script.act("click", "< prev", results_page(word, visible if plan.mode == "loop" else others[:20]))
        return _zero("action_limit")
    hidden = plan.mode in ("target_never_surfaced", "repeated_query")
    search(others[:20] if hidden else visible, word)
    if plan.success:
        return buy(target, good)
    if plan.mode == "wrong_variant":
        return buy(target, next(v for v in target["values"] if v != good))
    if plan.mode == "over_budget":
        dear = [p for p in others if min(p["prices"].values()) > goal["price_upper"]]
        return buy(dear[0] if dear else others[0], (dear[0] if dear else others[0])["values"][0])
    return buy(others[2], others[2]["values"][0])


def _error(rng: random.Random) -> JsonDict:
    return rng.choice(
        [
            {"class": "model_transport", "code": "http_503", "stage": "model", "type": "ModelTransportError"},
            {"class": "environment", "code": "lease_lost", "stage": "step", "type": "LeaseLostError"},
            {"class": "infrastructure", "code": "deadline", "stage": "model", "type": "DeadlineExceededError"},
        ]
    )


def make_goal(recipe: TraceRecipe, task: int) -> JsonDict:
    """The private goal of a task, shaped as the shop's."""
    catalogue = _catalogue(recipe.seed)
    target = catalogue[_rng("target", recipe.seed, task).randrange(len(catalogue))]
    value = _rng("value", recipe.seed, task).choice(target["values"])
    return {
        "asin": target["asin"],
        "name": target["title"],
        "brand": target["brand"],
        "category": target["category"],
        "attributes": target["attributes"][:2],
        "goal_options": [value],
        "price_upper": round(target["prices"][value] + 15.0, 2),
        "task_id": task,
    }


def make_record(recipe: TraceRecipe, task: int, sample: int, *, attempt: int = 1, fail: bool = False) -> JsonDict:
    """One record; with ``fail`` an attempt that broke off after its first steps."""
    catalogue, goal = _catalogue(recipe.seed), make_goal(recipe, task)
    target = next(p for p in catalogue if p["asin"] == goal["asin"])
    shelf = [p for p in catalogue if p["category"] == target["category"]]
    instruction = f"我想买一个{target['category'].split('›')[-1]}，规格{goal['goal_options'][0]}，"
    instruction += f"预算{goal['price_upper']}元以内。"
    seed = episode_seed(recipe.seed, task, sample)
    script = _Script(recipe, task, sample, seed, instruction)
    first = script.intern.observation(script._observe())
    final: JsonDict | None = _play(script, plan_episode(recipe, task, sample), target, goal, shelf)
    error = None
    if fail:
        final, error = None, {**_error(script.rng), "message": "synthetic failure", "traceback": None, "detail": {}}
        del script.steps[2:], script.conversation[4:]
    minute, second = divmod(sample, 60)
    skills: list[JsonDict] = [
        {"skill_id": s, "version": "1", "content": "先核对预算，再购买。", "metadata": {}} for s in recipe.skills
    ]
    return {
        "schema": EPISODE_SCHEMA,
        "episode_id": episode_id(task, sample),
        "attempt": attempt,
        "status": "failed" if fail else "completed",
        "job": {"task_id": task, "sample_id": sample, "seed": seed, "split": recipe.split},
        "provenance": {
            "experiment": recipe.experiment,
            "fingerprint": _fingerprint(recipe),
            "model": "synthetic",
            "checkpoint_id": recipe.checkpoint,
            "environment_version": "shopsimulator-paper-aligned-v8",
            "prompt_sha256": sha256_hex("prompt"),
            "skills": list(recipe.skills),
        },
        "started_at": f"2026-01-01T00:{minute:02d}:{second:02d}+00:00",
        "ended_at": f"2026-01-01T01:{minute:02d}:{second:02d}+00:00",
        "duration_s": round(sum(s["model"]["latency_ms"] for s in script.steps) / 1000, 6),
        "reset": {
            "instruction": instruction,
            "persona": {"年龄段": "25-34", "品牌偏好": [target["brand"]]},
            "environment_version": "shopsimulator-paper-aligned-v8",
            "public": {"task_mode": "persona", "category": target["category"]},
            "observation": first,
        },
        "selected_skills": [{**s, "content_sha256": sha256_hex(s["content"])} for s in skills],
        "conversation": [script.intern.message(m) for m in script.conversation],
        "steps": script.steps,
        "final": final,
        "error": error,
        "usage": script.usage,
        "interned": script.intern.dump(),
    }


@lru_cache(maxsize=8)
def _fingerprint(recipe: TraceRecipe) -> str:
    return sha256_hex(canonical_json(semantic_of(recipe)))


def semantic_of(recipe: TraceRecipe) -> JsonDict:
    """The ``semantic`` part of the manifest of a synthetic run."""
    return {
        "jobs": [
            [task, sample, episode_seed(recipe.seed, task, sample), recipe.split]
            for task in recipe.task_ids()
            for sample in range(recipe.samples)
        ],
        "model": {"kind": "synthetic", "checkpoint_id": recipe.checkpoint, "competence": recipe.competence},
        "skills": {"ids": list(recipe.skills)},
        "environment": {"kind": "shop", "version": "shopsimulator-paper-aligned-v8"},
    }


def make_records(recipe: TraceRecipe) -> Iterator[JsonDict]:
    """All attempts of a run in the order in which they were written."""
    for task in recipe.task_ids():
        for sample in range(recipe.samples):
            plan = plan_episode(recipe, task, sample)
            if plan.fails:
                yield make_record(recipe, task, sample, fail=True)
            if not plan.fails or plan.recovers:
                yield make_record(recipe, task, sample, attempt=1 + plan.recovers)


def as_v4(record: JsonDict) -> JsonDict:
    """The record in the shape of the public project's ``shopsimrl-episode-v4`` (nothing interned)."""
    out = expand(record)
    out["schema_version"] = "shopsimrl-episode-v4"
    del out["schema"]
    return out


def write_run(
    run_dir: Path,
    recipe: TraceRecipe,
    *,
    duplicates: float = 0.0,
    v4_share: float = 0.0,
    torn_tail: bool = False,
    max_bytes: int | None = None,
) -> int:
    """Write manifest, traces and private goals; returns the number of episodes planned (= expected jobs).

    ``duplicates`` is the share of records that are written twice; ``v4_share`` the share in the other schema;
    ``torn_tail`` cuts the file inside a further record; ``max_bytes`` stops early (then fewer jobs are recorded).
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    expected = recipe.tasks * recipe.samples
    manifest = make_manifest(
        experiment=recipe.experiment, semantic=semantic_of(recipe), operational={}, versions={"rayrl": "synthetic"}
    )
    write_json_atomic(run_dir / "manifest.json", manifest)
    rng = _rng("file", recipe.seed)
    written = 0
    line = b""
    with (run_dir / "traces.jsonl").open("wb") as traces, (run_dir / "private.jsonl").open("wb") as private:
        for record in make_records(recipe):
            shape = as_v4(record) if rng.random() < v4_share else record
            line = orjson.dumps(shape) + b"\n"
            copies = 1 + (rng.random() < duplicates)
            traces.write(line * copies)
            written += len(line) * copies
            goal = make_goal(recipe, record["job"]["task_id"])
            private.write(orjson.dumps({"episode_id": record["episode_id"], "attempt": 1, "goal": goal}) + b"\n")
            if max_bytes is not None and written >= max_bytes:
                break
        if torn_tail:
            traces.write(line[: len(line) // 2])
    (run_dir / "private.jsonl").chmod(0o600)
    return expected
