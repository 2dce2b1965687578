"""The ``skill_case`` environment: one labelled case, one frozen Skill, tools to read it, and ``submit`` to answer.

Invariants:

* the label is not here: the cases file this environment reads holds inputs only, so nothing can leak;
* the environment adds no score: a verdict is compared with the label later, by the workbench;
* the log of reads is kept by the tools; what a model cites is recorded beside it, never instead of it;
* every episode is one case with its own state; there is no memory between cases.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import orjson

from rayrl.environments.skill_case_tools import SkillTool, build_tools, function_tool
from rayrl.errors import DataError, EnvironmentFaultError
from rayrl.schemas import EpisodeJob, JsonDict, Observation, ResetResult, StepResult, ToolCall
from rayrl.skills.snapshot import Taken, load

VERSION = "skill-case-v1"
MAX_REASON = 20_000
MAX_REFS = 50
DEFAULT_TOOLS = ["list_files", "read_file"]


def submit_tool(classes: list[str]) -> JsonDict:
    """The tool that ends a case."""
    return {
        "type": "function",
        "function": {
            "name": "submit",
            "description": "Give the verdict on this case. Ends it.",
            "parameters": {
                "type": "object",
                "properties": {
                    "prediction": {"type": "string", "enum": classes, "description": "The class of the case."},
                    "reason": {"type": "string", "description": "Why, in one or two sentences."},
                    "confidence": {"type": "number", "minimum": 0, "maximum": 1},
                    "evidence_refs": {
                        "type": "array",
                        "items": {"type": "string"},
                        "description": "Rules it rests on, as path#heading (knowledge/map.md#range); empty if none.",
                    },
                },
                "required": ["prediction", "reason", "confidence", "evidence_refs"],
                "additionalProperties": False,
            },
        },
    }


class SkillCaseFactory:
    """Opens cases; configure through ``environment.options``.

    Args:
        cases: JSONL file with one input per line (``case_id``, ``query``, ``history``, ``context``); the line number,
            from 0, is the task id.
        cases_sha256: content hash of the data set, for the fingerprint.
        snapshot: folder of the Skill snapshot.
        skill_sha256: its content hash.
        classes: what may be answered.
        tools: tools beside ``submit``: short names or dotted paths.
    """

    def __init__(
        self,
        *,
        cases: str,
        cases_sha256: str,
        snapshot: str,
        skill_sha256: str,
        classes: list[str],
        tools: list[str] | None = None,
    ) -> None:
        self._path = Path(cases)
        self._folder = Path(snapshot)
        self._facts = {"cases_sha256": cases_sha256, "skill_sha256": skill_sha256}
        self.classes = classes
        self.tools = build_tools(DEFAULT_TOOLS if tools is None else tools)
        self._offsets: list[int] | None = None
        self.skill: Taken | None = None

    def identity(self) -> dict[str, Any]:
        """Data, Skill, classes and tools; no path."""
        return {
            "kind": "skill_case",
            "version": VERSION,
            **self._facts,
            "classes": self.classes,
            "tools": list(self.tools),
        }

    async def start(self) -> None:
        """Index the cases, and verify the snapshot byte for byte."""
        try:
            skill = load(self._folder)
            offsets = [0]
            with self._path.open("rb") as lines:
                for line in lines:
                    offsets.append(offsets[-1] + len(line))
        except (DataError, OSError) as error:
            raise EnvironmentFaultError(str(error), code="snapshot_damaged", stage="reset") from None
        if skill.manifest.content_sha256 != self._facts["skill_sha256"]:
            raise EnvironmentFaultError(
                f"the snapshot {self._folder} is not the Skill of this experiment", code="snapshot_other", stage="reset"
            )
        self.skill = skill
        self._offsets = offsets[:-1]

    def open(self) -> SkillCaseEnvironment:
        """A fresh case."""
        return SkillCaseEnvironment(self)

    async def aclose(self) -> None:
        """Nothing is held open."""

    def input_of(self, index: int) -> JsonDict:
        """The input of case ``index``.

        Raises:
            EnvironmentFaultError: there is none, or the file changed.
        """
        if self._offsets is None or not 0 <= index < len(self._offsets):
            raise EnvironmentFaultError(f"there is no case {index}", code="reset_bad_task", stage="reset")
        with self._path.open("rb") as lines:
            lines.seek(self._offsets[index])
            case = orjson.loads(lines.readline())
        if not isinstance(case, dict):
            raise EnvironmentFaultError(f"case {index} is no JSON object", code="reset_bad_task", stage="reset")
        return case


class SkillCaseEnvironment:
    """One case."""

    def __init__(self, factory: SkillCaseFactory) -> None:
        self._factory = factory
        self._tools: dict[str, SkillTool] = factory.tools
        self._specs = [*(function_tool(tool) for tool in self._tools.values()), submit_tool(factory.classes)]
        self._rejected = 0
        self._index = -1

    async def reset(self, job: EpisodeJob) -> ResetResult:
        """Show the case."""
        case = self._factory.input_of(job.task_id)
        self._index = job.task_id
        shown = {key: case[key] for key in ("query", "history", "context") if case.get(key)}
        instruction = json.dumps({**shown, "classes": self._factory.classes}, ensure_ascii=False, indent=1)
        return ResetResult(
            instruction=instruction,
            observation=self._observe("Decide the case; read the Skill's files first where its text refers to them."),
            environment_version=VERSION,
            public={"case_id": case.get("case_id", "")},
        )

    async def step(self, call: ToolCall, *, seed: int) -> StepResult:
        """Run a tool, or take the verdict."""
        if call.name == "submit":
            return self._submit(call)
        skill, tool = self._factory.skill, self._tools.get(call.name)
        if skill is None or tool is None:
            raise EnvironmentFaultError(f"tool {call.name!r} is not open", code="no_tool", stage="step")
        answer = await tool.run(skill, call.arguments)
        return StepResult(
            action=_action(call),
            observation=self._observe(answer.text),
            done=False,
            reward=0.0,
            feedback={"action": call.name, "valid": answer.valid, "reason": answer.reason, "message": "", **answer.log},
        )

    async def terminate(self, reason: str) -> StepResult:
        """End without a verdict."""
        return StepResult(
            action=reason,
            observation=self._observe("The case ended without a verdict."),
            done=True,
            reward=0.0,
            termination_reason=reason,
        )

    async def close(self) -> None:
        """Nothing is held."""

    def _submit(self, call: ToolCall) -> StepResult:
        given = call.arguments
        prediction = str(given.get("prediction", "")).strip()[:200]
        known = {name.casefold(): name for name in self._factory.classes}
        if prediction.casefold() not in known and self._rejected == 0:
            # said once; a model that insists is recorded as answering something else
            self._rejected = 1
            text = f"The prediction must be one of: {', '.join(self._factory.classes)}. Submit again."
            return StepResult(
                action=_action(call),
                observation=self._observe(text),
                done=False,
                reward=0.0,
                feedback={"action": "submit", "valid": False, "reason": "unknown_class", "message": text},
            )
        confidence = given.get("confidence")
        number = float(confidence) if isinstance(confidence, int | float) and not isinstance(confidence, bool) else None
        refs = given.get("evidence_refs")
        verdict = {
            "prediction": known.get(prediction.casefold(), prediction),
            "reason": str(given.get("reason", ""))[:MAX_REASON],
            "confidence": number if number is not None and math.isfinite(number) and 0 <= number <= 1 else None,
            "evidence_refs": [str(ref)[:500] for ref in refs[:MAX_REFS]] if isinstance(refs, list) else [],
        }
        return StepResult(
            action=_action(call),
            observation=self._observe("The verdict was recorded."),
            done=True,
            reward=0.0,
            feedback={"action": "submit", "valid": True, "reason": "executed", "message": ""},
            termination_reason="submitted",
            public={"verdict": verdict},
        )

    def _observe(self, text: str) -> Observation:
        return Observation(
            text=text, state={"page_type": "skill_case", "case": self._index}, version=VERSION, tools=self._specs
        )


def _action(call: ToolCall) -> str:
    return f"{call.name}{json.dumps(call.arguments, ensure_ascii=False, sort_keys=True)}"
