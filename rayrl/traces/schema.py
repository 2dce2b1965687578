"""The episode record ``rayrl-episode-v1``: one JSON object per attempt, one line per object.

Layout (keys that would be null are left out of steps; readers use ``.get``)::

    schema        "rayrl-episode-v1"
    episode_id    "task-000012__sample-000"
    attempt       1, 2, ... (numbered by the pool)
    status        completed | failed | cancelled
    job           {task_id, sample_id, seed, split}
    provenance    {experiment, fingerprint, model, checkpoint_id, environment_version, prompt_sha256, skills, scripted?}
    started_at    UTC ISO-8601; ended_at likewise; duration_s
    interned      {texts: [str], states: [object], toolsets: [[tool]]}   each distinct value once per episode; as a
                  string it is that object's JSON, zlib-compressed, in base64 (see below)
    reset         {instruction, persona, environment_version, public, observation: {text, state, version}}
    selected_skills [{skill_id, version, content, content_sha256, metadata}]
    conversation  OpenAI messages; a long content is {"content_ref": index into interned.texts} instead of "content"
    steps         [{index, seed, observation: {text, state, version}, tools, model, action, environment,
                    action_feedback, protocol_error, protocol_feedback, policy_failure}]
    final         {done, reward, reward_detail, purchase, termination_reason}  or null
    error         {class, code, stage, type, message, traceback, detail, cleanup_errors}  or null
    usage         {prompt_tokens, completion_tokens, model_calls}

A page's text and its state say nearly the same, so the interned part is four fifths of a plain record and compresses to
a fifth; :func:`interned` gives it back either way, and ``rayrl traces show RUN EPISODE`` prints a record in the clear.

``text``, ``state`` and ``tools`` inside observations and steps are integer references into ``interned``;
:func:`expand` puts the values back. A step whose completion broke the protocol has neither ``action`` nor
``environment``. Nothing private is in here: see :mod:`rayrl.traces.store` for ``private.jsonl`` and ``training.jsonl``.
"""

from __future__ import annotations

import base64
import zlib
from typing import Literal

import orjson

from rayrl.schemas import EPISODE_SCHEMA, JsonDict, Observation

Status = Literal["completed", "failed", "cancelled"]

INTERN_MIN_CHARS = 64
"""Shorter message contents stay inline: a reference would not be smaller."""


PACK_MIN_BYTES = 2048
"""Below this the interned part stays readable: compression would save little."""


class Interner:
    """Stores each distinct text, state and tool set of one episode once."""

    def __init__(self) -> None:
        self._texts: dict[str, int] = {}
        self._states: dict[bytes, int] = {}
        self._toolsets: dict[bytes, int] = {}
        self.states: list[JsonDict] = []
        self.toolsets: list[list[JsonDict]] = []

    def text(self, value: str) -> int:
        """Index of ``value`` among the interned texts."""
        return self._texts.setdefault(value, len(self._texts))

    def state(self, value: JsonDict) -> int:
        """Index of ``value`` among the interned states."""
        key = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
        index = self._states.get(key)
        if index is None:
            index = self._states[key] = len(self.states)
            self.states.append(value)
        return index

    def toolset(self, value: list[JsonDict]) -> int:
        """Index of ``value`` among the interned tool sets."""
        key = orjson.dumps(value)
        index = self._toolsets.get(key)
        if index is None:
            index = self._toolsets[key] = len(self.toolsets)
            self.toolsets.append(value)
        return index

    def observation(self, value: Observation) -> JsonDict:
        """The reference form of an observation (tools are referenced by the step)."""
        return {"text": self.text(value.text), "state": self.state(value.state), "version": value.version}

    def message(self, value: JsonDict) -> JsonDict:
        """A conversation message with a long text content replaced by a reference."""
        content = value.get("content")
        if not isinstance(content, str) or len(content) < INTERN_MIN_CHARS:
            return value
        rest = {k: v for k, v in value.items() if k != "content"}
        return {**rest, "content_ref": self.text(content)}

    def dump(self) -> JsonDict | str:
        """The ``interned`` part of the record."""
        value = {"texts": list(self._texts), "states": self.states, "toolsets": self.toolsets}
        data = orjson.dumps(value)
        if len(data) < PACK_MIN_BYTES:
            return value
        # level 3: within a tenth of the best size at half its time (0.2 ms for a shop episode)
        return base64.b64encode(zlib.compress(data, 3)).decode()


def interned(record: JsonDict) -> JsonDict:
    """The ``interned`` object of a record, unpacked if need be; empty lists where the record has none."""
    value = record.get("interned")
    if isinstance(value, str):
        unpacked: JsonDict = orjson.loads(zlib.decompress(base64.b64decode(value)))
        return unpacked
    return value or {"texts": [], "states": [], "toolsets": []}


def expand(record: JsonDict) -> JsonDict:
    """The record with every reference replaced by its value and ``interned`` gone; the input is not changed.

    Raises:
        KeyError, IndexError: the record refers to something it does not hold (a damaged record).
    """
    values = interned(record)
    texts, states, toolsets = values["texts"], values["states"], values["toolsets"]

    def observation(value: JsonDict) -> JsonDict:
        return {"text": texts[value["text"]], "state": states[value["state"]], "version": value["version"]}

    def message(value: JsonDict) -> JsonDict:
        if "content_ref" not in value:
            return value
        rest = {k: v for k, v in value.items() if k != "content_ref"}
        return {**rest, "content": texts[value["content_ref"]]}

    def step(value: JsonDict) -> JsonDict:
        out = {**value, "observation": observation(value["observation"]), "tools": toolsets[value["tools"]]}
        environment = value.get("environment")
        if environment:
            out["environment"] = {**environment, "observation": observation(environment["observation"])}
        return out

    out = {key: value for key, value in record.items() if key != "interned"}
    if record.get("reset"):
        out["reset"] = {**record["reset"], "observation": observation(record["reset"]["observation"])}
    out["conversation"] = [message(m) for m in record["conversation"]]
    out["steps"] = [step(s) for s in record["steps"]]
    return out


def is_complete(record: JsonDict) -> bool:
    """Complete = right schema, status ``completed`` and a final result that is done. Only these are skipped on
    resume."""
    final = record.get("final")
    return (
        record.get("schema") == EPISODE_SCHEMA
        and record.get("status") == "completed"
        and isinstance(final, dict)
        and final.get("done") is True
    )
