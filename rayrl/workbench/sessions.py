"""Interactive sessions: talk with a model that has the deployed Skill and the same tools as the batch.

They live in this process, apart from everything the batch writes: no case of an experiment ever shows up here, and a
session sees no other session. The Skill is read from the deployed folder when the session is created.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from rayrl.environments.skill_case import submit_tool
from rayrl.environments.skill_case_tools import build_tools, function_tool
from rayrl.errors import ContextOverflowError, EpisodeError, RunConflictError
from rayrl.models.base import ChatModel
from rayrl.runtime_checks import one_call
from rayrl.schemas import JsonDict, step_seed
from rayrl.skills.snapshot import Taken
from rayrl.workbench.store import MissingError, new_id, now

MAX_SESSIONS = 200
MAX_STEPS = 12
ANSWER: JsonDict = {
    "type": "function",
    "function": {
        "name": "answer",
        "description": "Say something to the user. Ends your turn.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}},
            "required": ["text"],
            "additionalProperties": False,
        },
    },
}


@dataclass
class Session:
    """One conversation."""

    id: str
    skill: Taken
    model_name: str
    model: ChatModel
    classes: list[str]
    created_at: str = field(default_factory=now)
    state: str = "idle"
    messages: list[JsonDict] = field(default_factory=list)
    turns: list[JsonDict] = field(default_factory=list)
    task: asyncio.Task[JsonDict] | None = None

    def shown(self, *, full: bool = False) -> JsonDict:
        """What the API says of it."""
        out: JsonDict = {
            "id": self.id,
            "skill": self.skill.manifest.name,
            "skill_sha256": self.skill.manifest.content_sha256,
            "model": self.model_name,
            "state": self.state,
            "created_at": self.created_at,
            "turns": len(self.turns),
        }
        return {**out, "transcript": self.turns} if full else out


class Sessions:
    """See the module docstring."""

    def __init__(self, tools: list[str] | None = None) -> None:
        self._tools = build_tools(tools or ["list_files", "read_file"])
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    def create(
        self, *, skill: Taken, model_name: str, make_model: Callable[[], ChatModel], classes: list[str]
    ) -> JsonDict:
        """A new session.

        Raises:
            RunConflictError: too many are open.
        """
        if len(self._sessions) >= MAX_SESSIONS:
            raise RunConflictError(f"{MAX_SESSIONS} sessions are open; delete some")
        session = Session(new_id("se"), skill, model_name, make_model(), classes)
        main = skill.files["SKILL.md"].decode("utf-8", "replace")
        session.messages = [
            {"role": "system", "content": f"Follow this Skill; read its files with the tools.\n\n{main}"}
        ]
        self._sessions[session.id] = session
        return session.shown()

    def all(self) -> list[JsonDict]:
        """Open sessions, newest first."""
        return [session.shown() for session in reversed(self._sessions.values())]

    def get(self, session_id: str) -> JsonDict:
        """One session with its transcript."""
        return self._get(session_id).shown(full=True)

    async def send(self, session_id: str, text: str) -> JsonDict:
        """A turn: the user's words, then the model's tools and answer. Returns the turn.

        Raises:
            RunConflictError: the session is busy.
            DataError: no such session.
        """
        session = self._get(session_id)
        if session.state == "running":
            raise RunConflictError(f"session {session_id} is busy; stop it first")
        content = orjson.dumps({"query": text, "classes": session.classes}).decode()
        session.messages.append({"role": "user", "content": content})
        return await self._run(session, {"user": text})

    async def resume(self, session_id: str) -> JsonDict:
        """Go on with a turn that was stopped.

        Raises:
            RunConflictError: nothing was stopped.
        """
        session = self._get(session_id)
        if session.state != "stopped":
            raise RunConflictError(f"session {session_id} is {session.state}; only a stopped one continues")
        return await self._run(session, {"user": None})

    async def stop(self, session_id: str) -> JsonDict:
        """Stop the turn that runs. What was said stays; nothing happens when none runs."""
        session = self._get(session_id)
        if session.task is not None and not session.task.done():
            session.task.cancel()
            await asyncio.wait([session.task], timeout=10)
        return session.shown()

    async def delete(self, session_id: str) -> None:
        """Stop and forget."""
        await self.stop(session_id)
        session = self._sessions.pop(session_id, None)
        if session is not None:
            await session.model.aclose()

    async def aclose(self) -> None:
        """Forget all. Idempotent."""
        for session_id in list(self._sessions):
            await self.delete(session_id)

    async def _run(self, session: Session, turn: JsonDict) -> JsonDict:
        session.state = "running"
        session.task = asyncio.create_task(self._turn(session, turn), name=f"session {session.id}")
        await asyncio.wait([session.task])
        if session.task.cancelled():
            session.state = "stopped"
            turn |= {"state": "stopped", "answer": None}
            session.turns.append(turn)
            return turn
        error = session.task.exception()
        if error is not None:
            session.state = "failed"
            message = str(error) if isinstance(error, EpisodeError) else f"{type(error).__name__}"
            turn |= {"state": "failed", "error": message, "answer": None}
            session.turns.append(turn)
            return turn
        session.state = "idle"
        session.turns.append(session.task.result())
        return session.task.result()

    async def _turn(self, session: Session, turn: JsonDict) -> JsonDict:
        began = time.perf_counter()
        turn["calls"] = []
        specs = [*(function_tool(tool) for tool in self._tools.values()), submit_tool(session.classes), ANSWER]
        for index in range(MAX_STEPS):
            try:
                output = await session.model.generate(
                    session.messages, specs, seed=step_seed(len(session.turns), index)
                )
            except ContextOverflowError:
                break
            output = one_call(output, specs)
            if output.protocol_error is not None or output.policy_failure is not None:
                text = output.content or (output.protocol_error or output.policy_failure).message  # type: ignore[union-attr]
                return self._answer(session, turn, text, began)
            call = output.tool_calls[0]
            if call.name == "answer":
                return self._answer(session, turn, str(call.arguments.get("text", "")), began)
            if call.name == "submit":
                turn["verdict"] = call.arguments
                return self._answer(session, turn, str(call.arguments.get("reason", "")), began)
            result = await self._tools[call.name].run(session.skill, call.arguments)
            turn["calls"].append({"name": call.name, "arguments": call.arguments, "valid": result.valid, **result.log})
            session.messages += _exchange(call.id, call.name, call.arguments, result.text)
        return self._answer(session, turn, "", began)

    def _answer(self, session: Session, turn: JsonDict, text: str, began: float) -> JsonDict:
        session.messages.append({"role": "assistant", "content": text})
        turn |= {"state": "answered", "answer": text, "duration_s": round(time.perf_counter() - began, 4)}
        return turn

    def _get(self, session_id: str) -> Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise MissingError(f"there is no session {session_id!r}")
        return session


def _exchange(call_id: str, name: str, arguments: dict[str, Any], text: str) -> list[JsonDict]:
    function = {"name": name, "arguments": orjson.dumps(arguments).decode()}
    return [
        {"role": "assistant", "content": "", "tool_calls": [{"id": call_id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call_id, "content": text},
    ]
