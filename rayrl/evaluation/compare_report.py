"""A comparison as Markdown, as a self-contained HTML page and as rich tables; computes nothing."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from rayrl.evaluation.html import figures, page, paragraph, section, table
from rayrl.evaluation.svg import Whisker, bar_chart, forest_plot
from rayrl.evaluation.tables import figure, interval

_SCALED = ("reward",)


def _columns(result: dict[str, Any]) -> tuple[str, ...]:
    return ("metric", result["a"], result["b"], "difference", "interval", "p", "p (Holm)", "correlation")


def _p(value: float | None) -> str:
    return "-" if value is None else "<0.0001" if value < 0.0001 else f"{value:.4f}"


def _rows(metrics: dict[str, Any]) -> list[list[str]]:
    return [
        [
            name,
            figure(item["mean_a"]),
            figure(item["mean_b"]),
            "-" if item["difference"]["mean"] is None else f"{item['difference']['mean']:+.3f}",
            interval(item["difference"]),
            _p(item["p"]),
            _p(item.get("p_holm")),
            figure(item["correlation"], 2),
        ]
        for name, item in metrics.items()
    ]


def _pairing(result: dict[str, Any]) -> list[tuple[str, int]]:
    p = result["pairing"]
    return [
        ("pairs compared", p["pairs"]),
        ("tasks", p["tasks"]),
        (f"only in {result['a']}", p["only_in_a"]),
        (f"only in {result['b']}", p["only_in_b"]),
        (f"failed only in {result['a']}", p["failed_only_in_a"]),
        (f"failed only in {result['b']}", p["failed_only_in_b"]),
        ("failed in both", p["failed_in_both"]),
        ("duplicate records ignored", p["duplicates_in_a"] + p["duplicates_in_b"]),
    ]


_TRANSITION = {
    "won": "won (only the second succeeds)",
    "lost": "lost (only the first succeeds)",
    "both": "both succeed",
    "neither": "neither",
}


def tables(result: dict[str, Any]) -> list[Table]:
    """For the terminal."""
    first = Table(title=f"{result['b']} against {result['a']}", title_justify="left", border_style="dim")
    for column in _columns(result):
        first.add_column(column, justify="left" if column == "metric" else "right")
    for row in _rows(result["metrics"]):
        first.add_row(*row)
    second = Table(title="Pairs", title_justify="left", border_style="dim", show_header=False)
    for name, count in _pairing(result):
        second.add_row(name, str(count))
    for name, item in result["transitions"].items():
        second.add_row(_TRANSITION[name], str(item["n"]))
    return [second, first]


def markdown(results: list[dict[str, Any]]) -> str:
    """One section per comparison."""
    out = []
    for r in results:
        out += [f"# {r['b']} against {r['a']}", "", r["sentence"], ""]
        for name, before, after in r.get("manifest_differences", []):
            out.append(f"- differs as declared: `{name}`: {before} -> {after}")
        out += ["", "| pairing | episodes |", "|---|---:|", *(f"| {n} | {c} |" for n, c in _pairing(r)), ""]
        out += ["| " + " | ".join(_columns(r)) + " |", "|---" + "|---:" * (len(_columns(r)) - 1) + "|"]
        out += ["| " + " | ".join(row) + " |" for row in _rows(r["metrics"])]
        if r["transitions"]:
            out += ["", "| transition | episodes |", "|---|---:|"]
            out += [f"| {_TRANSITION[n]} | {i['n']} |" for n, i in r["transitions"].items()]
        if r["by_category"]:
            out += [
                "",
                f"| {r['by']} | {r['a']} | {r['b']} | difference | interval | p (Holm) |",
                "|---|---:|---:|---:|---:|---:|",
            ]
            out += ["| " + " | ".join(row) + " |" for row in _category_rows(r)]
        out.append("")
    return "\n".join(out)


def _category_rows(result: dict[str, Any]) -> list[list[str]]:
    return [
        [
            f"{name} ({item['difference']['n']})",
            figure(item["mean_a"]),
            figure(item["mean_b"]),
            f"{item['difference']['mean']:+.3f}",
            interval(item["difference"]),
            _p(item["p_holm"]),
        ]
        for name, item in result["by_category"].items()
    ]


def _forest(items: dict[str, Any], title: str) -> str:
    return forest_plot(
        [
            Whisker(n, d["mean"], d["low"], d["high"], f"{d['mean']:+.3f}")
            for n, d in ((name, item["difference"]) for name, item in items.items())
            if d["mean"] is not None
        ],
        reference=0.0,
        title=title,
    )


def html(results: list[dict[str, Any]]) -> str:
    """One self-contained page."""
    body: list[str] = []
    for r in results:
        body += [f"<h1>{_esc(r['b'])} against {_esc(r['a'])}</h1>", paragraph(r["sentence"], "lede")]
        main = r["metrics"].get(r["metric"])
        if main and main["difference"]["mean"] is not None:
            body.append(
                figures(
                    [
                        (f"{r['metric']} of {r['a']}", figure(main["mean_a"]), ""),
                        (f"{r['metric']} of {r['b']}", figure(main["mean_b"]), ""),
                        ("difference", f"{main['difference']['mean']:+.3f}", interval(main["difference"])),
                        ("pairs", str(r["pairing"]["pairs"]), f"{r['pairing']['tasks']} tasks"),
                    ]
                )
            )
        scores = {n: m for n, m in r["metrics"].items() if n in _SCALED or n.startswith("r_")}
        body.append(section("Differences of the scores", _forest(scores, "Differences of the scores")))
        body.append(section("All metrics", table(_columns(r), _rows(r["metrics"]))))
        moves = [(_TRANSITION[n], float(i["n"])) for n, i in r["transitions"].items()]
        body.append(section("Transitions of r_success", bar_chart(moves, title="Transitions")))
        lists = [(_TRANSITION[n], ", ".join(i["examples"][:5])) for n, i in r["transitions"].items() if i["examples"]]
        body.append(section("Examples", table(("transition", "episodes"), lists, numeric_from=9)))
        body.append(
            section(
                f"{r['metric']} by {r['by']}",
                _forest(r["by_category"], f"By {r['by']}"),
                table((r["by"], r["a"], r["b"], "difference", "interval", "p (Holm)"), _category_rows(r)),
            )
        )
        body.append(section("Who is compared with whom", table(("", "episodes"), _pairing(r))))
        declared = [(n, str(a), str(b)) for n, a, b in r.get("manifest_differences", [])]
        body.append(section("Declared differences", table(("key", r["a"], r["b"]), declared, numeric_from=9)))
    body.append(
        paragraph(
            "Intervals: bootstrap over tasks; for 0/1 metrics the adjusted Wald interval of Bonett and Price. p: exact "
            "McNemar for 0/1 metrics with one sample per task, else a cluster-robust t test; Holm-adjusted over the "
            "metrics (or categories) of one comparison.",
            "muted",
        )
    )
    names = " / ".join(dict.fromkeys(n for r in results for n in (r["a"], r["b"])))
    return page(f"Comparison: {names}", body)


def _esc(text: str) -> str:
    from html import escape

    return escape(text)
