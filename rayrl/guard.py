"""The test-split guard: a locked split is opened once per checkpoint, for a stated purpose, after a finished val run.

Each opening is appended to a ledger beside the split manifest (``<manifest>.ledger.jsonl``), before the first episode.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import orjson

from rayrl.errors import GuardError
from rayrl.experiment import Experiment, run_root
from rayrl.schemas import JsonDict, canonical_json, sha256_hex
from rayrl.traces.manifest import read_manifest
from rayrl.traces.store import RunReader

EQUIPPED = "equipped_report"
"""The only purpose that may use skills on a test split."""


def checkpoint_key(experiment: Experiment) -> str:
    """Which weights these are: the hash of the model's identity."""
    return sha256_hex(canonical_json(experiment.semantic["model"]))[:32]


def ledger_path(experiment: Experiment) -> Path:
    """Where openings of this manifest's test splits are recorded."""
    return experiment.split_manifest.with_name(experiment.split_manifest.name + ".ledger.jsonl")


def previous_openings(experiment: Experiment) -> list[JsonDict]:
    """Earlier openings of this split by the same checkpoint under another fingerprint or a finished one."""
    path = ledger_path(experiment)
    if not path.exists():
        return []
    rows = [orjson.loads(line) for line in path.read_bytes().splitlines() if line.strip()]
    key, split = checkpoint_key(experiment), experiment.config.tasks.split
    return [row for row in rows if row["checkpoint"] == key and row["split"] == split]


def check_test_access(experiment: Experiment, *, again: str | None = None) -> JsonDict | None:
    """Refuse an unfit opening; return the notice every summary must carry (``None`` off the test split).

    Raises:
        GuardError: purpose or val run missing, unfinished, or of another checkpoint; skills without the equipped
            purpose; a second opening without ``again``.
    """
    if experiment.split.role != "test":
        return None
    config = experiment.config
    where = f"split {config.tasks.split!r} has role test"
    purpose = config.tasks.test_purpose
    if not purpose:
        raise GuardError(f"{where}: say why it is opened in tasks.test_purpose")
    if experiment.semantic["skills"].get("kind") != "none" and purpose != EQUIPPED:
        raise GuardError(
            f"{where}: skills are not allowed on it; set skills.kind: none, or tasks.test_purpose: {EQUIPPED} "
            "(every report will then say so)"
        )
    if not config.tasks.val_fingerprint:
        raise GuardError(f"{where}: name the finished val run of this checkpoint in tasks.val_fingerprint")
    _check_val_run(experiment, config.tasks.val_fingerprint, where)
    earlier = [row for row in previous_openings(experiment) if row["fingerprint"] != experiment.fingerprint]
    if earlier and not again:
        first = earlier[0]
        raise GuardError(
            f"{where}: this checkpoint already opened it on {first['time'][:10]} as {first['experiment']!r} "
            f"({first['fingerprint'][:12]}); a second look needs --again REASON, which stays beside the result"
        )
    return {"purpose": purpose, "openings_before": len(earlier), "again": again}


def record_opening(experiment: Experiment, notice: JsonDict) -> None:
    """Append this opening to the ledger, durably; a resume of the same run is not a new opening.

    Raises:
        GuardError: the ledger cannot be written: an opening that nobody could see is refused.
    """
    if any(row["fingerprint"] == experiment.fingerprint for row in previous_openings(experiment)):
        return
    row = {
        "time": datetime.now(UTC).isoformat(),
        "split": experiment.config.tasks.split,
        "experiment": experiment.name,
        "fingerprint": experiment.fingerprint,
        "checkpoint": checkpoint_key(experiment),
        "val_fingerprint": experiment.config.tasks.val_fingerprint,
        **notice,
    }
    path = ledger_path(experiment)
    try:
        with path.open("ab") as file:
            file.write(orjson.dumps(row) + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise GuardError(
            f"the ledger {path} cannot be written ({error.strerror}); copy the split manifest to a place you own"
        ) from None


def _check_val_run(experiment: Experiment, wanted: str, where: str) -> None:
    root = run_root(experiment.config)
    for candidate in sorted(root.glob("*/manifest.json")) if root.is_dir() else []:
        manifest = read_manifest(candidate.parent)
        if manifest is None or not manifest["fingerprint"].startswith(wanted) or len(wanted) < 12:
            continue
        semantic = manifest["semantic"]
        if semantic["split"]["role"] != "val":
            raise GuardError(f"{where}: {wanted[:12]} is a {semantic['split']['role']} run, not a val run")
        if semantic["model"] != experiment.semantic["model"]:
            raise GuardError(f"{where}: {wanted[:12]} is a val run of another model, checkpoint or sampling")
        complete = RunReader(candidate.parent).scan().complete
        if complete < len(semantic["jobs"]):
            raise GuardError(
                f"{where}: the val run {manifest['experiment']!r} is not finished ({complete} of "
                f"{len(semantic['jobs'])} episodes); resume it first"
            )
        return
    raise GuardError(f"{where}: no run with fingerprint {wanted[:12]}… under {root}; run the val config first")
