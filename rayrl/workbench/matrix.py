"""A Skill x model matrix over one data set: one experiment per cell, made in one go."""

from __future__ import annotations

from rayrl.errors import DataError
from rayrl.schemas import JsonDict
from rayrl.workbench.experiments import Params
from rayrl.workbench.metrics import experiment_metrics
from rayrl.workbench.workbench import Workbench

MAX_CELLS = 64


def create_matrix(
    bench: Workbench,
    *,
    name: str,
    dataset_id: str,
    snapshot_ids: list[str],
    models: list[str],
    params: Params,
    concurrency: int,
) -> list[JsonDict]:
    """Experiments for every pair, not started.

    Raises:
        DataError: too many cells, none, or a part that is not there (before anything is made).
    """
    cells = [(s, m) for s in dict.fromkeys(snapshot_ids) for m in dict.fromkeys(models)]
    if not 1 <= len(cells) <= MAX_CELLS:
        raise DataError(f"a matrix has 1 to {MAX_CELLS} cells, not {len(cells)}")
    bench.datasets.get(dataset_id)
    snapshots = {s: bench.snapshots.get(s) for s, _ in cells}
    for _, model in cells:
        bench.models.get(model)
    out = []
    for snapshot_id, model in cells:
        version = (snapshots[snapshot_id]["git_tag"] or snapshots[snapshot_id]["content_sha256"])[:12]
        out.append(
            bench.experiments.create(
                name=f"{name} / {version} / {model}",
                dataset_id=dataset_id,
                snapshot_id=snapshot_id,
                model=model,
                params=params,
                concurrency=concurrency,
            )
        )
    return out


def matrix_table(bench: Workbench, experiment_ids: list[str]) -> list[JsonDict]:
    """One row per experiment with its headline figures.

    Raises:
        DataError: an experiment is not there.
    """
    out = []
    for experiment_id in experiment_ids:
        experiment = bench.experiments.get(experiment_id)
        dataset = bench.datasets.get(experiment["dataset_id"])
        snapshot = bench.snapshots.get(experiment["snapshot_id"])
        found = experiment_metrics(bench.store, experiment, dataset["classes"])
        out.append(
            {
                "experiment_id": experiment_id,
                "name": experiment["name"],
                "state": experiment["state"],
                "snapshot_id": snapshot["id"],
                "skill": snapshot["name"],
                "skill_sha256": snapshot["content_sha256"],
                "model": f"{experiment['model_name']} v{experiment['model_version']}",
                "accuracy": found["overall"]["accuracy"],
                "kappa": found["overall"]["kappa"],
                "macro_f1": found["overall"]["macro_f1"],
                "scored": found["denominators"]["scored"],
                "counts": experiment["counts"],
            }
        )
    return out
