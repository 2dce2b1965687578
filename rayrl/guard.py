"""The test-split guard: a locked split is opened once per checkpoint, for a stated purpose, after a finished val run.

Each opening is appended to a ledger beside the split manifest (``<manifest>.ledger.jsonl``), before the first episode.
An opening is one run: resuming it is none, but the same settings in another directory (or in the same one after
``rayrl runs rm``) are a second look, and so are other sampling settings of the same checkpoint.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import orjson

from rayrl.errors import DataError, GuardError
from rayrl.experiment import Experiment, run_root
from rayrl.schemas import JsonDict, canonical_json, sha256_hex
from rayrl.traces.manifest import read_manifest, write_json_atomic
from rayrl.traces.store import RunReader, iter_lines, parse_record

EQUIPPED = "equipped_report"
"""The only purpose that may use skills on a test split."""
NOTICE = "test_split.json"
"""Beside the traces of a run on a test split: purpose, how many openings there were before, and why again."""
MIN_FINGERPRINT = 12
"""Digits of ``tasks.val_fingerprint`` that are enough to name a run."""


def checkpoint_key(experiment: Experiment) -> str:
    """Which weights these are: the hash of the named checkpoint, else of the model's whole identity."""
    model = experiment.semantic["model"]
    named = experiment.config.model.checkpoint_id
    return sha256_hex(canonical_json(model if named is None else {"checkpoint_id": named}))[:32]


def ledger_path(experiment: Experiment) -> Path:
    """Where openings of this manifest's test splits are recorded."""
    return experiment.split_manifest.with_name(experiment.split_manifest.name + ".ledger.jsonl")


def previous_openings(experiment: Experiment) -> list[JsonDict]:
    """All openings of this split by this checkpoint, that of this very run included, oldest first.

    Raises:
        GuardError: the ledger is damaged; what it cannot tell must not be taken for "never opened".
    """
    path = ledger_path(experiment)
    key, split = checkpoint_key(experiment), experiment.config.tasks.split
    rows = []
    for number, line in enumerate(iter_lines(path), start=1):
        if not line.strip():
            continue
        row = parse_record(line)
        if row is None or not row.keys() >= _ROW_KEYS:
            raise GuardError(f"the ledger {path}:{number} is damaged; restore the line, or remove it knowingly")
        if row["checkpoint"] == key and row["split"] == split:
            rows.append(row)
    return rows


_ROW_KEYS = {"time", "split", "experiment", "fingerprint", "checkpoint"}


def _own(experiment: Experiment, openings: list[JsonDict]) -> JsonDict | None:
    """The opening that this run directory goes on with, if it was opened already."""
    manifest = read_manifest(experiment.run_dir)
    if manifest is None or manifest["fingerprint"] != experiment.fingerprint:
        return None
    began = manifest["created_at"]
    mine = (row for row in openings if row["fingerprint"] == experiment.fingerprint)
    return next((row for row in mine if row.get("run_created_at") == began), None)


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
    if config.skills.kind != "none" and purpose != EQUIPPED:
        raise GuardError(
            f"{where}: skills are not allowed on it; set skills.kind: none, or tasks.test_purpose: {EQUIPPED} "
            "(every report will then say so)"
        )
    if not config.tasks.val_fingerprint:
        raise GuardError(f"{where}: name the finished val run of this checkpoint in tasks.val_fingerprint")
    _check_val_run(experiment, config.tasks.val_fingerprint, where)
    openings = previous_openings(experiment)
    own = _own(experiment, openings)
    if own is not None:
        return {key: own.get(key) for key in ("purpose", "openings_before", "again")}
    if openings and not again:
        first = openings[0]
        raise GuardError(
            f"{where}: this checkpoint already opened it on {first['time'][:10]} as {first['experiment']!r} "
            f"({first['fingerprint'][:12]}); a second look needs --again REASON, which stays beside the result"
        )
    return {"purpose": purpose, "openings_before": len(openings), "again": again}


def record_opening(experiment: Experiment, notice: JsonDict) -> None:
    """Append this opening to the ledger, durably (with the run directory claimed); a resume is not a new opening.

    The notice is kept in the run directory too, so that no summary can be made without it.

    Raises:
        GuardError: another run opened the split since the check, or the ledger cannot be written: an opening that
            nobody could see is refused.
    """
    openings = previous_openings(experiment)
    write_json_atomic(experiment.run_dir / NOTICE, notice)
    if _own(experiment, openings) is not None:
        return
    if len(openings) != notice["openings_before"]:
        raise GuardError(f"split {experiment.config.tasks.split!r} was opened by another run just now; start again")
    manifest = read_manifest(experiment.run_dir)
    row = {
        "time": datetime.now(UTC).isoformat(),
        "split": experiment.config.tasks.split,
        "experiment": experiment.name,
        "fingerprint": experiment.fingerprint,
        "run_created_at": manifest["created_at"] if manifest else None,
        "checkpoint": checkpoint_key(experiment),
        "val_fingerprint": experiment.config.tasks.val_fingerprint,
        **notice,
    }
    path = ledger_path(experiment)
    try:
        with path.open("ab") as file:
            file.write(b"\n" * _torn(path) + orjson.dumps(row) + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise GuardError(
            f"the ledger {path} cannot be written ({error.strerror}); copy the split manifest to a place you own"
        ) from None


def read_notice(run_dir: Path) -> JsonDict | None:
    """What every summary of a run on a test split must carry; ``None`` for other runs."""
    path = run_dir / NOTICE
    if not path.exists():
        return None
    notice: JsonDict = orjson.loads(path.read_bytes())
    return notice


def _torn(path: Path) -> bool:
    return path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")


def _check_val_run(experiment: Experiment, wanted: str, where: str) -> None:
    if len(wanted) < MIN_FINGERPRINT:
        raise GuardError(
            f"{where}: tasks.val_fingerprint {wanted!r} is too short; give at least {MIN_FINGERPRINT} digits"
        )
    root = run_root(experiment.config)
    refusal = f"no run with fingerprint {wanted[:12]}… under {root}; run the val config first"
    for candidate in sorted(root.glob("*/manifest.json")) if root.is_dir() else []:
        try:
            manifest = read_manifest(candidate.parent)
        except DataError:
            continue  # something else lies there; it cannot be the run that is wanted
        if manifest is None or not manifest["fingerprint"].startswith(wanted):
            continue
        problem = _unfit(experiment, candidate.parent, manifest)
        if problem is None:
            return
        refusal = problem
    raise GuardError(f"{where}: {refusal}")


def _unfit(experiment: Experiment, run_dir: Path, manifest: JsonDict) -> str | None:
    """Why a run is not the finished val run of this checkpoint, or ``None``."""
    semantic, name = manifest["semantic"], manifest["fingerprint"][:12]
    if semantic["split"]["role"] != "val":
        return f"{name} is a {semantic['split']['role']} run, not a val run"
    if semantic["model"] != experiment.semantic["model"]:
        return f"{name} is a val run of another model, checkpoint or sampling"
    complete = RunReader(run_dir).scan().complete
    if complete < len(semantic["jobs"]):
        return (
            f"the val run {manifest['experiment']!r} is not finished ({complete} of {len(semantic['jobs'])} episodes); "
            "resume it first"
        )
    return None
