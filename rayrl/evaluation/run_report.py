"""A run as one self-contained HTML page: what was run, coverage and failures first, scores, behaviour, diagnosis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rayrl.evaluation.html import figures, page, paragraph, section, table
from rayrl.evaluation.svg import Whisker, bar_chart, forest_plot, histogram
from rayrl.evaluation.tables import figure, interval
from rayrl.schemas import JsonDict
from rayrl.traces.manifest import flatten

_SCORES = ("metric", "mean", "SEM", "interval", "n", "tasks", "method")


def _score_rows(values: dict[str, Any]) -> list[list[str]]:
    return [
        [n, figure(v["mean"]), figure(v["sem"]), interval(v), str(v["n"]), str(v["clusters"]), v["method"]]
        for n, v in values.items()
    ]


def _whiskers(values: dict[str, Any]) -> list[Whisker]:
    return [
        Whisker(n, v["mean"], v["low"], v["high"], f"{v['mean']:.3f}")
        for n, v in values.items()
        if v["mean"] is not None
    ]


def _lede(summary: dict[str, Any]) -> str:
    coverage = summary["coverage"]
    expected = coverage["expected"] if coverage["expected"] is not None else coverage["recorded"]
    done = f"{coverage['completed']} of {expected} episodes completed over {coverage['tasks']} tasks"
    success = summary["metrics"].get("r_success") or summary["metrics"].get("reward")
    if not success or success["mean"] is None:
        return f"{done}; nothing could be scored."
    name = "success rate" if "r_success" in summary["metrics"] else "mean reward"
    return f"{done}; {name} {success['mean']:.3f}, {summary['level']:.0%} interval {interval(success)}."


def _warnings(summary: dict[str, Any], unusable: dict[str, int]) -> list[str]:
    coverage, provenance = summary["coverage"], summary["provenance"]
    out = []
    if coverage["missing"]:
        out.append(f"{coverage['missing']} planned episodes have no record: the run is not finished.")
    if coverage["failed"]:
        out.append(f"{coverage['failed']} episodes failed for technical reasons and are not scored.")
    if coverage["duplicates"]:
        out.append(f"{coverage['duplicates']} later complete records of finished episodes were ignored.")
    lines = {kind: n for kind, n in unusable.items() if n}
    if lines:
        out.append("Lines that are no record: " + ", ".join(f"{n} {kind}" for kind, n in lines.items()) + ".")
    if provenance["scripted"]:
        out.append("The policy is the scripted shopper, not a language model.")
    if len(provenance["fingerprint"]) > 1:
        out.append(f"{len(provenance['fingerprint'])} different fingerprints are mixed in this file.")
    notice = summary.get("test_split")
    if notice:
        out.append(f"Test split: {notice}")
    return out


def _label_rows(diagnosis: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name, item in diagnosis["labels"].items():
        if item["episodes"]:
            examples = "; ".join(f"{x['episode_id']} @{','.join(map(str, x['steps'][:4]))}" for x in item["examples"])
            rows.append(
                [
                    name,
                    str(item["episodes"]),
                    figure(item["mean"]),
                    interval(item),
                    figure(item["success_with"]),
                    figure(item["success_without"]),
                    examples,
                ]
            )
    return rows


def run_page(
    name: str,
    summary: dict[str, Any],
    *,
    manifest: JsonDict | None,
    diagnosis: dict[str, Any] | None,
    rewards: Sequence[float],
    steps: Sequence[float],
    unusable: dict[str, int],
) -> str:
    """The page of one run; ``rewards`` and ``steps`` are those of its complete episodes."""
    coverage, metrics = summary["coverage"], summary["metrics"]
    body = [_heading(name), paragraph(_lede(summary), "lede")]
    headline = [
        (n, figure(metrics[n]["mean"]), interval(metrics[n]))
        for n in ("r_success", "reward", "r_loose")
        if n in metrics
    ]
    rate = "-" if coverage["rate"] is None else f"{coverage['rate']:.1%}"
    headline.append(("coverage", rate, f"{coverage['failed']} failed, {coverage['missing']} missing"))
    tokens = (summary["costs"]["prompt_tokens"]["total"] or 0) + (summary["costs"]["completion_tokens"]["total"] or 0)
    headline.append(("tokens", figure(tokens, 0), "prompt and completion"))
    body.append(figures(headline))
    body.append(section("To know first", *(paragraph(text) for text in _warnings(summary, unusable)), warn=True))
    failures = summary["failures"]
    rows = [(kind, n) for kind in ("by_class", "by_code", "by_stage") for n in failures[kind].items()]
    body.append(
        section("Failures", table(("kind", "what", "episodes"), [(k[3:], *n) for k, n in rows], numeric_from=2))
    )
    plot = forest_plot(_whiskers(metrics), title="Scores")
    body.append(section("Scores", plot, table(_SCORES, _score_rows(metrics))))
    without = summary.get("metrics_without_retried")
    if without:
        body.append(section("Scores without retried episodes", table(_SCORES, _score_rows(without))))
    if summary.get("pass_at_k"):
        several = {f"pass@{k}": v for k, v in summary["pass_at_k"].items()} | {"flake rate": summary["flake_rate"]}
        body.append(
            section(
                "Several samples", forest_plot(_whiskers(several), title="pass@k"), table(_SCORES, _score_rows(several))
            )
        )
    body.append(section("Rewards", histogram(rewards, title="Rewards"), note="episodes per bin"))
    body.append(section("Steps", histogram(steps, title="Steps per episode"), note="episodes per bin"))
    spread = [
        [n, *(figure(v[k], 2) for k in ("total", "mean", "p50", "p95", "max"))]
        for n, v in {**summary["counts"], **summary["costs"]}.items()
    ]
    body.append(section("Behaviour and cost", table(("", "total", "mean", "p50", "p95", "max"), spread)))
    ends = [(n, float(c)) for n, c in summary["termination_reasons"].items()]
    body.append(section("How episodes ended", bar_chart(ends, title="Termination reasons")))
    failures_of_policy = list(summary["policy_failures"].items())
    body.append(section("Policy failures", table(("", "episodes"), failures_of_policy), note="scored zero"))
    if diagnosis is not None:
        causes = [(n, float(c)) for n, c in diagnosis["diagnosis"].items()]
        body.append(section("Main cause", bar_chart(causes, title="Main cause")))
        columns = ("label", "episodes", "rate", "interval", "success with", "without", "examples @steps")
        body.append(section("Labels", table(columns, _label_rows(diagnosis))))
        calls = diagnosis.get("tool_calls")
        if calls:
            pairs = {"tool choice": calls["tool_choice"], "whole call": calls["exact_call"]}
            pairs |= {f"argument {k}": v for k, v in calls["by_argument"].items()}
            accuracy = [[n, str(v["right"]), str(v["n"]), figure(v["rate"]), interval(v)] for n, v in pairs.items()]
            body.append(
                section("Calls where the right one is known", table(("", "right", "of", "rate", "interval"), accuracy))
            )
    body.append(_what_was_run(manifest, summary))
    return page(f"Run {name}", body)


def _heading(name: str) -> str:
    from html import escape

    return f"<h1>{escape(name)}</h1>"


def _what_was_run(manifest: JsonDict | None, summary: dict[str, Any]) -> str:
    if manifest is None:
        rows = [
            (k, ", ".join(map(str, v)) if isinstance(v, list) else str(v)) for k, v in summary["provenance"].items()
        ]
        return section("What was run", table(("", ""), rows, numeric_from=9), note="from the records; no manifest")
    settings = {k: v for k, v in (manifest.get("semantic") or {}).items() if k != "jobs"}
    facts = {"experiment": manifest.get("experiment"), "fingerprint": manifest.get("fingerprint")}
    facts |= {"created": manifest.get("created_at")} | flatten(settings)
    facts |= {f"version {k}": v for k, v in (manifest.get("versions") or {}).items()}
    return section("What was run", table(("setting", "value"), [(k, str(v)) for k, v in facts.items()], numeric_from=9))
