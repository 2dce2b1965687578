"""Two experiments side by side: what got fixed, what regressed, and whether the difference is more than chance.

Cases are joined by id. Rates are over the common set only: the same input and the same label on both sides, both runs
ended, neither lost to infrastructure; everything else is listed with its reason, so denominators are never silent. The
test is McNemar's exact one on first repeats (assumes independent cases), by domain with Holm's adjustment.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from scipy import special
from sqlalchemy import and_, select

from rayrl.evaluation.paired import holm, mcnemar_exact
from rayrl.schemas import JsonDict
from rayrl.skills.diff import diff_skills
from rayrl.workbench import tables
from rayrl.workbench.metrics import flake, score_pairs
from rayrl.workbench.workbench import Workbench

ALPHA = 0.05
REASON_THRESHOLD = 0.6
_R, _C = tables.results, tables.cases


class Side(NamedTuple):
    """One case on one side, in the order of the columns it is read from."""

    ordinal: int
    repeat: int
    case_id: str
    domain: str
    gold: str | None
    state: str
    failure: str | None
    prediction: str | None
    reason: str | None
    evidence: str | None
    input_sha256: str

    @property
    def right(self) -> bool:
        """Whether the verdict is the label."""
        return self.prediction == self.gold

    @property
    def ended(self) -> bool:
        """Whether the run ended with the Skill's or model's own doing."""
        return self.state in ("completed", "failed") and self.failure != "infrastructure"


def similarity(a: str, b: str) -> float:
    """Jaccard similarity of character bigrams: 1 for equal texts, 0 for nothing in common."""
    if a == b:
        return 1.0
    left, right = {a[i : i + 2] for i in range(len(a) - 1)}, {b[i : i + 2] for i in range(len(b) - 1)}
    union = len(left | right)
    return len(left & right) / union if union else 0.0


def verdict(fixed: int, regressed: int, n: int) -> JsonDict:
    """McNemar's exact test and what it means in a sentence.

    For a difference that cannot be told from chance: the fewest discordant cases at which the observed ratio would be
    significant (``None`` for an even split, where no number would be).
    """
    p = mcnemar_exact(regressed, fixed)
    needed = None
    if n == 0:
        text = "The experiments share no scored case; nothing can be said."
    elif p < ALPHA:
        word = "better" if fixed > regressed else "worse"
        text = (
            f"B is {word} than A: {fixed} fixed, {regressed} regressed among {n} common cases "
            f"(exact McNemar p = {p:.3g})."
        )
    else:
        needed = needed_discordant(fixed, regressed)
        more = f"; at this ratio {needed} discordant cases would be needed" if needed else ""
        if fixed + regressed == 0:
            more = f"; no fewer than {needed} discordant cases could tell"
        text = (
            f"A and B cannot be told apart: {fixed} fixed, {regressed} regressed among {n} common cases "
            f"(exact McNemar p = {p:.3g}){more}."
        )
    word = "not_distinguishable" if p >= ALPHA else ("better" if fixed > regressed else "worse")
    return {"p_value": p, "verdict": word if n else "no_common_cases", "sentence": text, "needed_discordant": needed}


def needed_discordant(fixed: int, regressed: int, *, limit: int = 100_000) -> int | None:
    """Fewest discordant cases that would be significant at the observed ratio."""
    total = fixed + regressed
    share = min(fixed, regressed) / total if total else 0.0
    if share >= 0.5:
        return None
    low, high = max(total, 6), max(total, 6)
    while _significance(round(high * share), high) >= ALPHA:
        low, high = high, high * 2
        if high > limit:
            return None
    while low < high:
        middle = (low + high) // 2
        if _significance(round(middle * share), middle) < ALPHA:
            high = middle
        else:
            low = middle + 1
    return high


def _significance(fewer: int, n: int) -> float:
    """McNemar's exact p value for ``fewer`` of ``n`` discordant cases, straight from the binomial distribution."""
    return min(1.0, 2.0 * float(special.bdtr(fewer, n, 0.5)))


def compare(
    bench: Workbench, a: str, b: str, *, reason_threshold: float = REASON_THRESHOLD, examples: int | None = None
) -> JsonDict:
    """The comparison of experiment ``b`` with experiment ``a``.

    Args:
        examples: cases listed per group at most; ``None`` lists all.
    """
    one, two = bench.experiments.get(a), bench.experiments.get(b)
    data_a, data_b = bench.datasets.get(one["dataset_id"]), bench.datasets.get(two["dataset_id"])
    classes = list(dict.fromkeys([*data_a["classes"], *data_b["classes"]]))
    rows_a, rows_b = _rows(bench, one), _rows(bench, two)
    sides_a, sides_b = _firsts(rows_a), _firsts(rows_b)
    groups: dict[str, list[str]] = {name: [] for name in GROUPS}
    groups["only_a"] = [c for c in sides_a if c not in sides_b]
    groups["only_b"] = [c for c in sides_b if c not in sides_a]
    common: list[tuple[Side, Side]] = []
    for case_id, left in sides_a.items():
        right = sides_b.get(case_id)
        if right is None:
            continue
        if left.input_sha256 != right.input_sha256:
            groups["input_changed"].append(case_id)
        elif left.gold != right.gold:
            groups["label_changed"].append(case_id)
        elif left.gold is None:
            groups["without_label"].append(case_id)
        elif not (left.ended and right.ended):
            groups["not_ended"].append(case_id)
        else:
            common.append((left, right))
    threshold = min(reason_threshold, _repeat_similarity(rows_a, rows_b))
    for left, right in common:
        _classify(left, right, threshold, groups)
    domains: dict[str, list[tuple[Side, Side]]] = {}
    for pair in common:
        domains.setdefault(pair[0].domain, []).append(pair)
    return {
        "a": _head(one),
        "b": _head(two),
        "same_dataset": data_a["content_sha256"] == data_b["content_sha256"],
        "denominators": {"a": len(sides_a), "b": len(sides_b), "common": len(common)}
        | {name: len(groups[name]) for name in EXCLUDED},
        "overall": _pair(common, classes),
        "by_domain": _by_domain(domains, classes),
        "counts": {name: len(cases) for name, cases in groups.items()},
        "groups": {name: cases[:examples] for name, cases in groups.items()},
        "reason_threshold": threshold,
        "flake": {"a": flake(rows_a), "b": flake(rows_b)},
        "skill_diff": _skill_diff(bench, one, two, {"fixed": groups["fixed"], "regressed": groups["regressed"]}),
    }


EXCLUDED = ("only_a", "only_b", "input_changed", "label_changed", "without_label", "not_ended")
GROUPS = (*EXCLUDED, "fixed", "regressed", "other_verdict", "reason_changed", "evidence_gained", "evidence_lost")


def _classify(left: Side, right: Side, threshold: float, groups: dict[str, list[str]]) -> None:
    case = left.case_id
    if left.right != right.right:
        groups["fixed" if right.right else "regressed"].append(case)
    elif left.prediction != right.prediction:
        groups["other_verdict"].append(case)
    elif left.reason != right.reason and similarity(left.reason or "", right.reason or "") < threshold:
        groups["reason_changed"].append(case)
    if left.evidence == "none" and right.evidence not in ("none", None):
        groups["evidence_gained"].append(case)
    elif right.evidence == "none" and left.evidence not in ("none", None):
        groups["evidence_lost"].append(case)


def _pair(pairs: list[tuple[Side, Side]], classes: list[str]) -> JsonDict:
    # few different triples, however many cases
    tally = Counter((a.gold or "", a.prediction, b.prediction) for a, b in pairs)
    said_a: Counter[tuple[str, str | None]] = Counter()
    said_b: Counter[tuple[str, str | None]] = Counter()
    fixed = regressed = 0
    for (gold, one, two), n in tally.items():
        said_a[gold, one] += n
        said_b[gold, two] += n
        fixed += n * (one != gold and two == gold)
        regressed += n * (one == gold and two != gold)
    left, right = score_pairs(said_a, classes), score_pairs(said_b, classes)
    names = ("accuracy", "macro_f1", "kappa")
    return {
        "n": len(pairs),
        "a": left,
        "b": right,
        "delta": {name: _minus(_value(right[name]), _value(left[name])) for name in names},
        "fixed": fixed,
        "regressed": regressed,
        **verdict(fixed, regressed, len(pairs)),
    }


def _by_domain(domains: dict[str, list[tuple[Side, Side]]], classes: list[str]) -> JsonDict:
    out = {name: _pair(pairs, classes) for name, pairs in sorted(domains.items())}
    adjusted = holm([found["p_value"] for found in out.values()]) if out else []
    for found, p in zip(out.values(), adjusted, strict=True):
        found["p_holm"] = p
        # the sentence by domain follows the adjusted value: many domains, many chances
        if p >= ALPHA and found["verdict"] in ("better", "worse"):
            found["verdict"] = "not_distinguishable"
            found["sentence"] += f" After Holm's adjustment over {len(out)} domains p = {p:.3g}: not distinguishable."
    return out


def _value(found: Any) -> float | None:
    value: float | None = found["value"] if isinstance(found, dict) else found
    return value


def _minus(b: float | None, a: float | None) -> float | None:
    return None if a is None or b is None else b - a


def _head(experiment: JsonDict) -> JsonDict:
    keys = ("id", "name", "dataset_id", "snapshot_id", "model_name", "model_version", "fingerprint", "state", "params")
    return {key: experiment[key] for key in keys}


def _rows(bench: Workbench, experiment: JsonDict) -> list[Any]:
    names = ("ordinal", "repeat", "case_id", "domain", "gold", "state", "failure", "prediction", "reason", "evidence")
    query = (
        select(*(_R.c[name] for name in names), _C.c.input_sha256)
        .join(_C, and_(_C.c.dataset_id == experiment["dataset_id"], _C.c.ordinal == _R.c.ordinal))
        .where(_R.c.experiment_id == experiment["id"])
        .order_by(_R.c.ordinal, _R.c.repeat)
    )
    with bench.store.read() as connection:
        return list(connection.execute(query).all())


def _firsts(rows: list[Any]) -> dict[str, Side]:
    return {row[2]: Side._make(row) for row in rows if row[1] == 0}


def _repeat_similarity(*sides: list[Any]) -> float:
    """The 5th percentile of reason similarity between repeats with the same verdict: what chance alone does."""
    found: list[float] = []
    for rows in sides:
        first: dict[int, Any] = {}
        for row in rows:
            other = first.setdefault(row.ordinal, row)
            if other is not row and other.prediction == row.prediction and row.reason and other.reason:
                found.append(similarity(row.reason, other.reason))
    return sorted(found)[int(0.05 * len(found))] if len(found) >= 20 else 1.0


def _skill_diff(bench: Workbench, one: JsonDict, two: JsonDict, flips: dict[str, list[str]]) -> list[JsonDict]:
    """Changed files with the flips whose verdicts rest on a changed section, on either side."""
    if one["snapshot_id"] == two["snapshot_id"]:
        return []
    changes = diff_skills(bench.snapshots.load(one["snapshot_id"]), bench.snapshots.load(two["snapshot_id"]))
    cited = {name: _cited(bench, (one, two), cases) for name, cases in flips.items()}
    out = []
    for change in changes:
        hits = {}
        for name, found in cited.items():
            hits[name] = sorted(c for c, refs in found.items() if refs & set(change.sections or [change.path]))
        out.append({**change.model_dump(), **hits})
    return out


def _cited(bench: Workbench, experiments: tuple[JsonDict, ...], cases: list[str]) -> dict[str, set[str]]:
    out: dict[str, set[str]] = {}
    with bench.store.read() as connection:
        for experiment in experiments:
            # over the data set's index of case ids: results have none, and would be looked through from end to end
            query = select(_R.c.case_id, _R.c.detail).join(
                _C, and_(_C.c.dataset_id == experiment["dataset_id"], _C.c.ordinal == _R.c.ordinal)
            )
            query = query.where(_R.c.experiment_id == experiment["id"], _R.c.repeat == 0)
            for start in range(0, len(cases), 500):
                for case_id, detail in connection.execute(query.where(_C.c.case_id.in_(cases[start : start + 500]))):
                    refs = out.setdefault(case_id, set())
                    for item in ((detail or {}).get("evidence") or {}).get("cited", []):
                        refs.add(f"{item['path']}#{item['section']}" if item.get("section") else str(item.get("path")))
    return out
