"""What a case run says: the verdict out of a trace record, and the triangle *cited* x *read* x *exists*.

The reads come from the environment's log in the trace, not from the model's word. The main file counts as read: it is
in the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rayrl.schemas import JsonDict
from rayrl.skills.markdown import Passage, resolve
from rayrl.skills.snapshot import Taken, file_bytes

EVIDENCE_STATES = ("supported", "unread", "dangling", "none")
"""All cited rules exist and were read; one was not read; one does not exist; nothing was cited."""


@dataclass
class Outcome:
    """A normalised result. ``failure`` is ``infrastructure``, ``agent`` or ``unparseable``."""

    state: str
    prediction: str | None = None
    reason: str | None = None
    confidence: float | None = None
    evidence: str | None = None
    failure: str | None = None
    detail: JsonDict = field(default_factory=dict)
    model_calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    duration_s: float = 0.0


def normalise(record: JsonDict, skill: Taken) -> Outcome:
    """The result of one attempt out of its trace record."""
    usage = record["usage"]
    out = Outcome(
        state="completed",
        model_calls=usage["model_calls"],
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        duration_s=record["duration_s"],
    )
    steps: list[JsonDict] = record["steps"]
    reads = _reads(steps)
    out.detail["reads"] = reads
    if record["status"] != "completed":
        error = record["error"] or {}
        out.state = "cancelled" if record["status"] == "cancelled" else "failed"
        out.failure = "infrastructure"
        out.detail["error"] = {key: error.get(key) for key in ("class", "code", "message", "stage")}
        return out
    verdict = next((v for s in reversed(steps) if (v := _verdict(s))), None)
    out.detail["raw_output"] = _raw(steps[-1]) if steps else ""
    if verdict is None:
        reason = (record["final"] or {}).get("termination_reason") or "no_verdict"
        last = steps[-1] if steps else {}
        broken = "protocol_error" in last or (last.get("action_feedback") or {}).get("reason") == "unknown_class"
        out.state, out.failure = "failed", "unparseable" if broken else "agent"
        out.detail["error"] = {"code": reason, "message": f"ended with {reason}, without a verdict"}
        return out
    out.prediction, out.reason, out.confidence = verdict["prediction"], verdict["reason"], verdict["confidence"]
    triangle = evidence(verdict["evidence_refs"], reads, skill)
    out.evidence = triangle["state"]
    out.detail |= {"evidence_refs": verdict["evidence_refs"], "evidence": triangle}
    return out


def evidence(refs: list[str], reads: list[JsonDict], skill: Taken) -> JsonDict:
    """The triangle: each cited reference with where it leads and whether it was read, and what was read uncited."""
    cited = []
    for ref in dict.fromkeys(refs):
        passage = find(ref, skill)
        cited.append(
            {
                "ref": ref,
                "exists": passage is not None,
                "read": _was_read(passage, reads) if passage else "no",
                "path": passage.path if passage else None,
                "section": passage.section if passage else None,
                "lines": [passage.start, passage.end] if passage else None,
            }
        )
    paths = {item["path"] for item in cited}
    uncited = list(dict.fromkeys(r["path"] for r in reads if r["path"] not in paths))
    if not cited:
        state = "none"
    elif not all(item["exists"] for item in cited):
        state = "dangling"
    else:
        state = "supported" if all(item["read"] != "no" for item in cited) else "unread"
    return {"state": state, "cited": cited, "read_not_cited": uncited}


def find(ref: str, skill: Taken) -> Passage | None:
    """Where a reference leads, ``None`` for a dangling one."""
    path, _, anchor = ref.strip().partition("#")
    data = file_bytes(skill, path.removeprefix("./"))
    if data is None:
        return None
    return resolve(path.removeprefix("./"), data.decode("utf-8", "replace"), anchor or None)


def _was_read(passage: Passage, reads: list[JsonDict]) -> str:
    """``section`` when that very part was asked for, ``file`` when the whole file was, ``prompt`` for the main file."""
    best = "prompt" if passage.path == "SKILL.md" else "no"
    for read in reads:
        if read["path"] != passage.path:
            continue
        start, end = read.get("lines") or [1, 0]
        if passage.section is None or (start <= passage.start and passage.end <= end):
            kind = "section" if read.get("section") else "file"
            best = kind if best != "section" else best
    return best


def _reads(steps: list[JsonDict]) -> list[JsonDict]:
    out = []
    for step in steps:
        log = step.get("action_feedback") or {}
        if log.get("valid") and log.get("path"):
            kept = {key: log.get(key) for key in ("path", "section", "whole_file", "lines")}
            out.append({"step": step["index"], **kept})
    return out


def _verdict(step: JsonDict) -> dict[str, Any] | None:
    public = (step.get("environment") or {}).get("public") or {}
    verdict = public.get("verdict")
    return verdict if isinstance(verdict, dict) else None


def _raw(step: JsonDict) -> str:
    model = step.get("model") or {}
    calls = "".join(f"{c['name']}({c['arguments']})" for c in model.get("tool_calls", []))
    return f"{model.get('content') or ''}{calls}"[:20_000]
