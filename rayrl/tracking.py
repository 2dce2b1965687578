"""Tracking: ``metrics.jsonl`` first, Weights & Biases as a mirror.

Invariants:

* every metric is durable in ``metrics.jsonl`` before the mirror sees it;
* a failure of W&B never fails a run: it is said once, counted, and the mirror is switched off;
* a resumed run drops what lies past its checkpoint (:meth:`Tracker.truncate_after`) before it logs on;
* each metric carries its own step under a step name of its own, so that W&B's global step never drops a point.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Literal

import orjson

from rayrl.config import Section, operational
from rayrl.schemas import sha256_hex

METRICS = "metrics.jsonl"


class TrackingConfig(Section):
    """Where metrics are mirrored to."""

    wandb: Literal["auto", "online", "offline", "disabled"] = operational("auto")
    """``auto`` = online with ``WANDB_API_KEY`` in the environment, offline without; offline files can be synced
    later."""
    project: str = operational("rayrl")
    """W&B project."""
    entity: str | None = operational(None)
    """W&B entity (team or user); ``None`` = the key's default."""
    tags: list[str] = operational([])
    """W&B tags."""


Mode = Literal["online", "offline", "disabled"]


def mirror_mode(config: TrackingConfig) -> Mode:
    """What ``auto`` means here and now."""
    if config.wandb == "auto":
        return "online" if os.environ.get("WANDB_API_KEY") else "offline"
    return config.wandb


def stable_run_id(experiment: str, fingerprint: str) -> str:
    """W&B run id: a hash of experiment name and fingerprint, so a resume continues the same run."""
    return sha256_hex(f"{experiment}:{fingerprint}")[:16]


class Tracker:
    """Writes metrics of one run."""

    def __init__(
        self,
        run_dir: Path,
        config: TrackingConfig,
        *,
        run_name: str,
        run_id: str,
        group: str | None = None,
        job_type: str | None = None,
        config_dict: dict[str, Any] | None = None,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.path = run_dir / METRICS
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file = _open_append(self.path)
        self._warn = warn or (lambda text: print(text, file=sys.stderr))
        self._run: Any = None
        self._step_names: set[str] = set()
        self.mirror_failures = 0
        self.mode = mirror_mode(config)
        if self.mode != "disabled":
            self._mirror(
                lambda: self._start_wandb(config, self.mode, run_name, run_id, group, job_type, config_dict or {})
            )

    def _start_wandb(
        self,
        config: TrackingConfig,
        mode: Mode,
        name: str,
        run_id: str,
        group: str | None,
        job_type: str | None,
        settings: dict[str, Any],
    ) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            name=name,
            id=run_id,
            group=group,
            job_type=job_type,
            tags=config.tags,
            config=settings,
            dir=str(self.run_dir),
            mode=mode,
            resume="allow" if mode == "online" else None,
            settings=wandb.Settings(
                console="off",
                x_disable_stats=True,
                disable_code=True,
                disable_git=True,
                # a mirror that cannot be reached must not hold up the run; the files can be synced later
                init_timeout=30,
            ),
            reinit="create_new",
        )

    def log(self, metrics: dict[str, float | int | str | None], step: int, *, step_name: str = "step") -> None:
        """Append one point; ``step`` is this series' own step, counted from 0."""
        line = {"time": time.time(), step_name: step, **metrics}
        self._file.write(orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")
        self._file.flush()
        if self._run is not None:
            self._mirror(lambda: self._log_wandb(metrics, step, step_name))

    def _log_wandb(self, metrics: dict[str, Any], step: int, step_name: str) -> None:
        for key in metrics:
            if key not in self._step_names:
                self._run.define_metric(key, step_metric=step_name)
                self._step_names.add(key)
        self._run.log({step_name: step, **metrics})

    def table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        """Write a table: a line in ``metrics.jsonl`` and a W&B table."""
        self._file.write(orjson.dumps({"time": time.time(), "table": name, "columns": columns, "rows": rows}) + b"\n")
        self._file.flush()
        if self._run is not None:
            self._mirror(lambda: self._table_wandb(name, columns, rows))

    def _table_wandb(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        import wandb

        self._run.log({name: wandb.Table(columns=columns, data=rows)})

    def artifact(self, path: Path, name: str, type: str) -> None:
        """Mirror a file or folder as a W&B artifact; locally it already is where it is."""
        if self._run is not None:
            self._mirror(lambda: self._artifact_wandb(path, name, type))

    def _artifact_wandb(self, path: Path, name: str, type: str) -> None:
        import wandb

        artifact = wandb.Artifact(name, type=type)
        if path.is_dir():
            artifact.add_dir(str(path))
        else:
            artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def summary(self, values: dict[str, Any]) -> None:
        """Final figures of the run."""
        self._file.write(orjson.dumps({"time": time.time(), "summary": values}) + b"\n")
        self._file.flush()
        if self._run is not None:
            self._mirror(lambda: self._run.summary.update(values))

    def truncate_after(self, step: int, *, step_name: str = "step") -> int:
        """Drop local points of ``step_name`` beyond ``step`` (they will be logged again); returns how many went."""
        self._file.close()
        kept, dropped = [], 0
        for line in self.path.read_bytes().splitlines(keepends=True):
            try:
                value = orjson.loads(line)
            except orjson.JSONDecodeError:
                dropped += 1  # a torn last line
                continue
            if isinstance(value, dict) and isinstance(value.get(step_name), int) and value[step_name] > step:
                dropped += 1
                continue
            kept.append(line)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_bytes(b"".join(kept))
        temporary.replace(self.path)
        self._file = _open_append(self.path)
        return dropped

    def close(self) -> None:
        """Finish the mirror and the file. Idempotent."""
        if self._run is not None:
            run, self._run = self._run, None
            self._mirror(run.finish)
        self._file.close()

    def _mirror(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:
            self.mirror_failures += 1
            self._run = None
            if self.mirror_failures == 1:
                # the message only: W&B errors can quote settings
                self._warn(f"W&B is off for this run ({type(error).__name__}); metrics go on in {self.path.name}")


def _open_append(path: Path) -> BinaryIO:
    file = path.open("ab+")
    if file.tell():
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")  # ends a torn tail, so that the next point has a line of its own
    return file
