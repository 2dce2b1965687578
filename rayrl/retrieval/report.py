"""The evaluation report: one self-contained HTML page from the JSON that :mod:`jobs.evaluate_policy` writes."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from rayrl.evaluation.html import page, paragraph, section, table
from rayrl.evaluation.svg import Whisker, bar_chart, forest_plot

LABELS = {
    "no_retrieval": "no retrieval",
    "always_one": "always one",
    "fixed_040": "fixed .40",
    "tuned_threshold": "tuned threshold",
    "logistic_cut": "logistic, tuned cut",
    "logistic_plan": "logistic, planned",
    "best_plan": "best plan made beforehand",
    "sft": "SFT",
    "sft_shifted": "SFT, tuned shifts",
    "sft_seed": "SFT + seed update",
    "sft_plan": "SFT + plan",
    "sft_trace": "SFT + TRACE",
    "trace_plan": "SFT + TRACE + plan",
    "exact_gradient": "exact policy gradient",
    "perfect_gate": "perfect A/B gate",
    "oracle": "oracle",
}
SPLITS = {"known": "(a) unseen questions of known categories", "unseen": "(b) unseen categories"}


def partly(report: dict[str, Any]) -> str:
    """What to say where only some of the planned folds were played; empty otherwise."""
    folds = report["folds"]
    if folds["played"] >= folds["planned"]:
        return ""
    return (
        f"Only {folds['played']} of {folds['planned']} folds were played: this shows that it works. Its figures and "
        "intervals are about few questions and one or few memories; --full plays all."
    )


def render(report: dict[str, Any]) -> str:
    """The page."""
    body = [
        f"<h1>{escape(report['name'])}</h1>",
        paragraph(
            f"Mode {report['mode']}, {report['actions']} actions, encoder {report['encoder']}. Memory: half of the "
            f"categories of {report['pool']} plus {report['distractors']} distractors ({report['distractor_source']}). "
            f"{report['questions']['near']} questions each tested as class A and as near B, "
            f"{report['questions']['far']} far, all unseen; {report['draws']} memory draws, each with its own seed.",
            "lede",
        ),
    ]
    if note := partly(report):
        body.append(paragraph(note, "lede"))
    for split, facts in report["splits"].items():
        body.append(_split(split, facts))
    body += [
        section("Learning curves", _curves(report.get("curves", {})), note="one fold, played greedily, networks alone"),
        section("Ablations", _ablations(report.get("ablations", []))),
        section("Looks at unseen questions", _ledger(report["ledger"]), note="every one, in order"),
        section("Data and settings", _facts(report)),
    ]
    return page(report["name"], body)


def _split(split: str, facts: dict[str, Any]) -> str:
    methods: dict[str, Any] = facts["methods"]
    ours: str = facts["policy"]
    ordered = [m for m in LABELS if m in methods]
    whiskers = [
        Whisker(LABELS[m], methods[m]["balanced"], *methods[m].get("balanced_interval", (None, None))) for m in ordered
    ]
    oracle = methods["oracle"]["balanced"]
    headroom = [
        (LABELS[m], round(oracle - methods[m]["balanced"], 2)) for m in ordered if m not in ("oracle", "always_one")
    ]
    rates = [
        (f"{LABELS[m]}, {name}", round(100 * methods[m][f"retrieval_rate_{key}"], 1))
        for m in ("tuned_threshold", "logistic_plan", "sft", ours)
        if m in methods
        for key, name in (("a", "A"), ("near_b", "near B"), ("far_b", "far B"))
    ]
    content = [
        _methods_table(methods, ordered),
        forest_plot(whiskers, reference=oracle, title="Balanced return with 95 % intervals over questions"),
        f"<h3>{escape(LABELS[ours])} against</h3>",
        _comparison_table(facts["comparisons"]),
        forest_plot(
            [
                Whisker(LABELS.get(c["b"], c["b"]), c["difference"], *c["interval_questions"])
                for c in facts["comparisons"]
                if c["a"] == ours
            ],
            reference=0.0,
            title="Difference of balanced returns",
        ),
        "<h3>Headroom left (oracle minus policy)</h3>",
        bar_chart(headroom, title="Headroom"),
        "<h3>Retrieval rate by class, %</h3>",
        bar_chart(rates, title="Retrieval rates"),
        "<h3>Return by class</h3>",
        _class_plot(methods, ordered, ours),
        "<h3>Reliability: P(in memory), logistic and gate</h3>",
        _reliability(facts["reliability"]),
        "<h3>What the loss is made of</h3>",
        _errors(facts["errors"]),
        paragraph(facts["near_duplicates_note"], "muted"),
    ]
    return section(SPLITS.get(split, split), *content)


def _methods_table(methods: dict[str, Any], ordered: Sequence[str]) -> str:
    columns = ["policy", "balanced", "95 %", "hard", "A", "near B", "far B", "hit", "clean", "retr. near B", "steps"]
    rows = []
    for m in ordered:
        f = methods[m]
        low_high = f.get("balanced_interval")
        rows.append(
            [
                LABELS[m],
                _n(f["balanced"]),
                f"[{low_high[0]:.2f}, {low_high[1]:.2f}]" if low_high else "",
                _n(f.get("hard")),
                _n(f.get("return_a")),
                _n(f.get("return_near_b")),
                _n(f.get("return_far_b")),
                _p(f.get("hit_rate")),
                _p(f.get("clean_rate")),
                _p(f.get("retrieval_rate_near_b")),
                _n(f.get("steps")),
            ]
        )
    return table(columns, rows)


def _comparison_table(comparisons: Sequence[dict[str, Any]]) -> str:
    columns = [
        "",
        "against",
        "difference",
        "questions 95 %",
        "categories 95 %",
        "A",
        "near B",
        "McNemar",
        "p",
        "Wilcoxon p",
    ]
    rows = []
    for c in comparisons:
        q, k = c["interval_questions"], c["interval_categories"]
        rows.append(
            [
                LABELS.get(c["a"], c["a"]),
                LABELS.get(c["b"], c["b"]),
                f"{c['difference']:+.3f}",
                f"[{q[0]:+.2f}, {q[1]:+.2f}]",
                f"[{k[0]:+.2f}, {k[1]:+.2f}]",
                f"{c['by_class']['a']:+.2f}",
                f"{c['by_class']['near_b']:+.2f}",
                f"{c['mcnemar']['only_a']} : {c['mcnemar']['only_b']}",
                f"{c['mcnemar']['p']:.2g}",
                f"{c['wilcoxon_p']:.2g}",
            ]
        )
    return table(columns, rows, numeric_from=2)


def _class_plot(methods: dict[str, Any], ordered: Sequence[str], ours: str) -> str:
    whiskers = []
    for key, name in (("a", "A"), ("near_b", "near B"), ("far_b", "far B")):
        for m in ordered:
            if m in ("tuned_threshold", "logistic_plan", "sft", ours, "oracle"):
                f = methods[m]
                whiskers.append(
                    Whisker(f"{name}: {LABELS[m]}", f[f"return_{key}"], *f.get(f"return_{key}_interval", (None, None)))
                )
    return forest_plot(whiskers, title="Return by class")


def _reliability(curves: dict[str, list[dict[str, float]]]) -> str:
    rows = []
    for name, points in curves.items():
        rows += [[name, _p(p["predicted"]), _p(p["observed"]), int(p["n"])] for p in points]
    plot = line_plot(
        {n: [(p["predicted"], p["observed"]) for p in points] for n, points in curves.items()},
        x="predicted",
        y="observed",
        diagonal=True,
    )
    return plot + table(["", "predicted", "observed", "rows"], rows)


def _errors(errors: Sequence[dict[str, Any]]) -> str:
    return table(
        ["what goes wrong", "balanced return lost", "share of rows"],
        [[e["what"], _n(e["lost"]), _p(e["share"])] for e in errors],
    )


def _curves(curves: dict[str, list[list[float]]]) -> str:
    if not curves:
        return ""
    return line_plot({k: [(p[0], p[1]) for p in v] for k, v in curves.items()}, x="update", y="balanced return")


def _ablations(rows: Sequence[dict[str, Any]]) -> str:
    if not rows:
        return ""
    cells = []
    for r in rows:
        low, high = r["balanced_interval"]
        interval = r["delta_interval"]
        figures = [_n(r[key]) for key in ("return_a", "return_near_b", "return_far_b")]
        delta = f"{r['delta']:+.2f} [{interval[0]:+.2f}, {interval[1]:+.2f}]" if interval else ""
        cells.append([r["name"], f"{r['balanced']:.2f} [{low:.2f}, {high:.2f}]", *figures, delta])
    columns = ["setting", "balanced, 95 %", "A", "near B", "far B", "against the default, paired, 95 %"]
    note = f"{rows[0]['folds']} validation folds cut from training questions; intervals over questions"
    return paragraph(note, "muted") + table(columns, cells)


def _ledger(looks: Sequence[dict[str, Any]]) -> str:
    columns = ["time", "evaluation", "purpose", "folds", "mode", "actions", "config"]
    rows = [
        [
            x["time"],
            x["evaluation"],
            x["purpose"],
            x["folds"],
            x.get("mode", ""),
            x.get("actions", ""),
            str(x["config_sha256"])[:12],
        ]
        for x in looks
    ]
    return table(columns, rows, numeric_from=9)


def _facts(report: dict[str, Any]) -> str:
    return table(["what", "value"], [[k, str(v)] for k, v in report["facts"].items()], numeric_from=9)


def line_plot(
    series: dict[str, list[tuple[float, float]]], *, x: str, y: str, diagonal: bool = False, width: int = 720
) -> str:
    """Lines over a shared axis as inline SVG; hues are spread evenly, the legend names each line."""
    points = [p for line in series.values() for p in line]
    if not points:
        return ""
    left, bottom, height, top = 60, 30, 260, 12
    x0, x1 = min(p[0] for p in points), max(p[0] for p in points)
    y0, y1 = min(p[1] for p in points), max(p[1] for p in points)
    if diagonal:
        x0, x1, y0, y1 = 0.0, 1.0, 0.0, 1.0
    span_x, span_y = (x1 - x0) or 1.0, (y1 - y0) or 1.0
    inner_w, inner_h = width - left - 180, height - bottom - top

    def at(p: tuple[float, float]) -> str:
        return f"{left + (p[0] - x0) / span_x * inner_w:.1f},{top + (1 - (p[1] - y0) / span_y) * inner_h:.1f}"

    parts = [f'<svg role="img" aria-label="{escape(y)} over {escape(x)}" viewBox="0 0 {width} {height}" class="plot">']
    for i in range(5):
        value = y0 + span_y * i / 4
        py = top + (1 - i / 4) * inner_h
        parts.append(f'<line x1="{left}" y1="{py:.1f}" x2="{left + inner_w}" y2="{py:.1f}" class="grid"/>')
        parts.append(f'<text x="{left - 6}" y="{py + 4:.1f}" text-anchor="end" class="s">{value:.2f}</text>')
    parts.append(f'<text x="{left}" y="{height - 6}" class="s">{escape(x)} {x0:g}</text>')
    parts.append(f'<text x="{left + inner_w}" y="{height - 6}" text-anchor="end" class="s">{x1:g}</text>')
    if diagonal:
        parts.append(f'<polyline points="{at((0, 0))} {at((1, 1))}" fill="none" class="ref"/>')
    for i, (name, line) in enumerate(series.items()):
        colour = f"hsl({int(360 * i / max(len(series), 1)) + 175} 55% 45%)"
        path = " ".join(at(p) for p in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        place = f'x="{left + inner_w + 10}" y="{top + 14 + 16 * i}"'
        parts.append(f'<text {place} class="s" style="fill:{colour}">{escape(name)}</text>')
    return "".join([*parts, "</svg>"])


def _n(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _p(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"
