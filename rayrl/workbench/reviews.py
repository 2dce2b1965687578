"""Human reviews of single cases: versioned, never overwritten, and the repaired data set they lead to."""

from __future__ import annotations

from typing import Any

from sqlalchemy import func, insert, select

from rayrl.errors import DataError, UserError
from rayrl.schemas import JsonDict
from rayrl.workbench import tables
from rayrl.workbench.experiments import get_experiment
from rayrl.workbench.metrics import gold_under
from rayrl.workbench.store import MissingError, now
from rayrl.workbench.workbench import Workbench

VERDICTS = ("gold_right", "model_right", "ambiguous", "capability_missing", "undecided")
_V, _R = tables.reviews, tables.results


class StaleReviewError(UserError):
    """Somebody else reviewed the case meanwhile."""

    exit_code = 3


def add_review(
    bench: Workbench,
    experiment_id: str,
    ordinal: int,
    *,
    verdict: str,
    note: str = "",
    reviewer: str = "",
    expected_version: int | None = None,
) -> JsonDict:
    """A review of a case on top of those before it.

    Args:
        expected_version: version the reviewer has seen (0: none yet); ``None`` does not check.

    Raises:
        DataError: unknown verdict or case; ``model_right`` where there is no verdict of the model.
        StaleReviewError: the newest version is another.
    """
    if verdict not in VERDICTS:
        raise DataError(f"review verdict {verdict!r} is not known; use one of {', '.join(VERDICTS)}")
    with bench.store.write() as connection:
        get_experiment(connection, experiment_id)
        key = (_R.c.experiment_id == experiment_id) & (_R.c.ordinal == ordinal) & (_R.c.repeat == 0)
        row = connection.execute(select(_R.c.case_id, _R.c.prediction).where(key)).first()
        if row is None:
            raise MissingError(f"experiment {experiment_id} has no case {ordinal}")
        if verdict == "model_right" and row.prediction is None:
            raise DataError(f"case {row.case_id} has no verdict of the model that could be right")
        mine = (_V.c.experiment_id == experiment_id) & (_V.c.ordinal == ordinal)
        newest = connection.execute(select(func.max(_V.c.version)).where(mine)).scalar() or 0
        if expected_version is not None and expected_version != newest:
            raise StaleReviewError(
                f"case {row.case_id} is at review version {newest}, not {expected_version}; look again"
            )
        values: dict[str, Any] = {
            "experiment_id": experiment_id,
            "ordinal": ordinal,
            "case_id": row.case_id,
            "version": newest + 1,
            "verdict": verdict,
            "note": note,
            "reviewer": reviewer,
            "created_at": now(),
        }
        connection.execute(insert(_V).values(values))
        bench.store.note(connection, experiment_id, "review", {"case_id": row.case_id, "verdict": verdict})
    return values


def list_reviews(bench: Workbench, experiment_id: str, *, history: bool = False) -> list[JsonDict]:
    """Newest review of each reviewed case, or every one."""
    with bench.store.read() as connection:
        get_experiment(connection, experiment_id)
        query = select(_V).where(_V.c.experiment_id == experiment_id).order_by(_V.c.ordinal, _V.c.version)
        rows = [dict(r) for r in connection.execute(query).mappings()]
    return rows if history else list({row["ordinal"]: row for row in rows}.values())


def repair(bench: Workbench, experiment_id: str, *, drop_ambiguous: bool = False) -> JsonDict:
    """A new version of the experiment's data set with labels as reviewed (``model_right`` takes the model's verdict).

    Raises:
        DataError: no review changes anything.
    """
    experiment = bench.experiments.get(experiment_id)
    dataset = bench.datasets.get(experiment["dataset_id"])
    verdicts = {review["ordinal"]: review["verdict"] for review in list_reviews(bench, experiment_id)}
    with bench.store.read() as connection:
        key = (_R.c.experiment_id == experiment_id) & (_R.c.repeat == 0)
        said = {r.ordinal: r.prediction for r in connection.execute(select(_R.c.ordinal, _R.c.prediction).where(key))}
    view = "ambiguous_removed" if drop_ambiguous else "reviewed"
    cases, changed, dropped = [], [], []
    for ordinal, case in enumerate(bench.datasets.cases(dataset["id"])):
        verdict = verdicts.get(ordinal)
        gold = gold_under(view, case.gold_route, said.get(ordinal), verdict)
        if gold is None and case.gold_route is not None:
            dropped.append(case.case_id)
            continue
        if gold != case.gold_route:
            if gold not in dataset["classes"]:
                raise DataError(
                    f"case {case.case_id}: the model's verdict {gold!r} is no class; it cannot become the label"
                )
            changed.append(case.case_id)
            case = case.model_copy(update={"gold_route": gold})
        cases.append(case)
    if not changed and not dropped:
        raise DataError("no review changes a label; there is nothing to repair")
    notes = f"repaired by the reviews of {experiment_id}: {len(changed)} labels changed, {len(dropped)} cases removed"
    frozen = bench.datasets.freeze(
        name=dataset["name"],
        cases=cases,
        classes=dataset["classes"],
        upload=dataset["upload_sha256"],
        options=dataset["options"],
        profile=(dataset["profile_name"], dataset["profile_version"]),
        parent=dataset["id"],
        notes=notes,
    )
    return {"dataset": frozen, "changed": changed, "dropped": dropped}
