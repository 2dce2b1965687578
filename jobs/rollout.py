"""The main job: roll out a config's episodes in parallel and record every one of them.

``python -m jobs.rollout configs/quickstart.yaml [section.key=value ...]`` is what ``ray job submit`` starts; ``rayrl
run`` is the same. Stages: plan -> claim the run directory -> environment servers -> workers -> episodes -> summary.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from actors.ledger import Disposition
from actors.pool import RolloutPool, RunStalledError, TooManyFailuresError, WorkerBackend
from jobs.command import command_main
from jobs.events import EventLog
from jobs.output import console, facts_table, print_json
from jobs.progress import RunProgress
from jobs.shop_servers import embedded_shops
from rayrl.errors import ConfigError, RayrlError
from rayrl.evaluation.rows import episode_rows
from rayrl.evaluation.summary import summarize
from rayrl.evaluation.tables import summary_tables
from rayrl.experiment import Experiment, load_run_config, prepare
from rayrl.guard import check_test_access, record_opening
from rayrl.schemas import JsonDict
from rayrl.traces.manifest import claim, write_json_atomic
from rayrl.traces.store import RunLock, RunReader, TraceLine, TraceWriter
from rayrl.tracking import Tracker, stable_run_id
from rayrl.worker import FinishedAttempt, WorkerSpec

SUMMARY = "summary.json"
METRICS_EVERY_S = 1.0


@dataclass
class RunResult:
    """What a call of :func:`run_rollout` did."""

    run_dir: Path
    fingerprint: str
    status: str
    """``complete``, or ``incomplete`` with the reason below."""
    reason: str
    episodes: int
    complete: int
    ran_now: int
    failed_now: int
    seconds: float
    stage_seconds: dict[str, float]
    summary: JsonDict
    ledger: dict[str, Any] = field(default_factory=dict)
    stats: dict[str, float] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0 when every job has a complete result."""
        return 0 if self.status == "complete" else 6

    def to_json(self) -> JsonDict:
        """For ``--json``."""
        return {**self.__dict__, "run_dir": str(self.run_dir)}


def run_rollout(
    experiment: Experiment, *, again: str | None = None, quiet: bool = False, install_signals: bool = True
) -> RunResult:
    """Run (or resume) an experiment to its end.

    Raises:
        UserError: whatever the caller can mend; nothing was lost.
        RayrlError: the run stopped on a fault; finished episodes are on disk, the message says how to go on.
    """
    began = time.monotonic()
    run_dir = experiment.run_dir
    notice = check_test_access(experiment, again=again)
    with ExitStack() as stack:
        stack.enter_context(RunLock(run_dir))
        claim(run_dir, experiment.manifest())
        resolved = OmegaConf.to_yaml(OmegaConf.create(experiment.resolved_config()))
        (run_dir / "config.yaml").write_text(resolved, encoding="utf-8")
        if notice is not None:
            record_opening(experiment, notice)
        before = RunReader(run_dir).scan()
        pending = [job for job in experiment.jobs if job.episode_id not in before.complete_ids]
        # counted by job: what else may lie in the file is not this run's
        run = _Run(experiment, run_dir, len(experiment.jobs) - len(pending), notice, quiet=quiet)
        stack.callback(run.close)
        run.stages["resume scan"] = time.monotonic() - began
        if pending:
            spent = before.prompt_tokens + before.completion_tokens, before.prompt_tokens, before.completion_tokens
            run.tokens_before = spent[0]
            run.cost_before = _cost(experiment, spent[1], spent[2])
            with _Interrupt(install_signals) as interrupt:
                run.roll_out(pending, before.last_attempt, interrupt)
        return run.finish(began)


class _Run:
    """State of one call; methods in the order they happen."""

    def __init__(
        self, experiment: Experiment, run_dir: Path, complete: int, notice: JsonDict | None, *, quiet: bool
    ) -> None:
        self.experiment = experiment
        self.run_dir = run_dir
        self.notice = notice
        self.quiet = quiet
        self.complete = complete
        self.ran = self.failed = self.gave_up = 0
        self.reward_sum = 0.0
        self.prompt_tokens = self.completion_tokens = self.model_steps = 0
        self.tokens_before = 0
        self.cost_before = 0.0
        self.reason = ""
        self.ledger: dict[str, Any] = {}
        self.stages: dict[str, float] = {}
        self.stats: dict[str, float] = {}
        self.events = EventLog(run_dir / "events.jsonl")
        self._fault: RayrlError | None = None
        self._cancelled = False
        self._tick = 0.0
        self._began = time.monotonic()
        # a resume continues the series of metrics where the earlier process stopped
        self._step = _metric_points(run_dir)
        self.tracker: Tracker | None = None

    def roll_out(self, pending: list[Any], attempts_before: dict[str, int], interrupt: _Interrupt) -> None:
        """Run ``pending`` and write every attempt."""
        experiment, execution = self.experiment, self.experiment.config.execution
        self.tracker = self._start_tracker()
        with ExitStack() as stack:
            clock = time.monotonic()
            host = _connect(experiment)
            interrupt.install()  # ray.init puts its own SIGTERM handler in place, which would end us without a record
            self.stages["ray"] = time.monotonic() - clock
            clock = time.monotonic()
            shops = stack.enter_context(
                embedded_shops(experiment.config.environment, host=host, on_event=self.events.write)
            )
            self.stages["environment servers"] = time.monotonic() - clock
            clock = time.monotonic()
            spec = experiment.worker_spec(shops.environment, admin_token=shops.admin_token)
            pool = RolloutPool(_backend(experiment, spec), spec, execution, on_event=self.events.write)
            stack.enter_context(pool)
            self.stages["workers"] = time.monotonic() - clock
            clock = time.monotonic()
            writer = TraceWriter(self.run_dir)
            stack.callback(writer.close)
            progress = stack.enter_context(
                RunProgress(experiment.name, len(experiment.jobs), self.complete, quiet=self.quiet)
            )
            pool.submit(pending, attempts_before=attempts_before)
            self._began = time.monotonic()

            def on_tick() -> None:
                self._steer(pool, interrupt)
                self._show(pool, progress)

            pool.on_tick = on_tick
            try:
                for finished, disposition in pool.results():
                    if disposition is not Disposition.DUPLICATE:
                        writer.append(TraceLine(finished.record, finished.private, finished.training))
                    self._account(finished, disposition)
            except (RunStalledError, TooManyFailuresError) as fault:
                self._fault = fault
                self.reason = str(fault)
            writer.flush()
            self._show(pool, progress, force=True)
            seconds = time.monotonic() - self._began
            pool.close()
            self.ledger = {**pool.ledger.counts.__dict__}
            self.stats.update(
                episodes_per_s=self.ran / max(1e-9, seconds),
                peak_in_flight=float(pool.peak_in_flight),
                bytes_written=float(writer.bytes_written),
                commits=float(writer.commits),
                model_steps=float(self.model_steps),
                leases_open=pool.gauges().get("leases_open", 0.0),
            )
            self.stages["episodes"] = time.monotonic() - clock

    def finish(self, began: float) -> RunResult:
        """Summarise, write ``summary.json``, and say what there is."""
        clock = time.monotonic()
        jobs = len(self.experiment.jobs)
        summary = summarize_run(self.run_dir, expected_jobs=jobs)
        if self.notice is not None:
            summary["test_split"] = self.notice
        write_json_atomic(self.run_dir / SUMMARY, summary)
        self.stages["summary"] = time.monotonic() - clock
        status = "complete" if self.complete >= jobs else "incomplete"
        if status == "incomplete" and not self.reason:
            self.reason = f"{jobs - self.complete} of {jobs} episodes have no complete result"
        if self.tracker is not None:
            self.tracker.summary({"complete": self.complete, "episodes": jobs, "status": status})
        result = RunResult(
            run_dir=self.run_dir,
            fingerprint=self.experiment.fingerprint,
            status=status,
            reason=self.reason if status == "incomplete" else "",
            episodes=jobs,
            complete=self.complete,
            ran_now=self.ran,
            failed_now=self.failed,
            seconds=round(time.monotonic() - began, 3),
            stage_seconds={k: round(v, 3) for k, v in self.stages.items()},
            summary=summary,
            ledger=self.ledger,
            stats={k: round(v, 3) for k, v in self.stats.items()},
        )
        if self._fault is not None:
            raise self._fault
        return result

    def close(self) -> None:
        """Release what is open. Idempotent."""
        if self.tracker is not None:
            self.tracker.close()
            self.tracker = None
        self.events.close()

    def _account(self, finished: FinishedAttempt, disposition: Disposition) -> None:
        self.prompt_tokens += finished.prompt_tokens
        self.completion_tokens += finished.completion_tokens
        self.model_steps += finished.model_steps
        if disposition is Disposition.ACCEPTED:
            self.complete += 1
            self.ran += 1
            self.reward_sum += finished.reward
        elif finished.status == "failed":
            self.failed += 1
            self.gave_up += disposition is Disposition.GAVE_UP

    def _steer(self, pool: RolloutPool, interrupt: _Interrupt) -> None:
        execution = self.experiment.config.execution
        if interrupt.is_set() and not self._cancelled:
            self._cancelled = True  # also where a spending cap already lets the last episodes run out
            self.reason = self.reason or "interrupted; the same command goes on where it stopped"
            pool.cancel()
        if self.reason:
            return
        tokens = self.tokens_before + self.prompt_tokens + self.completion_tokens
        if execution.max_tokens_total is not None and tokens >= execution.max_tokens_total:
            left = pool.stop_admitting()
            self.reason = f"spending cap reached: {tokens} tokens; {left} episodes were not started"
        cost = self.cost_before + _cost(self.experiment, self.prompt_tokens, self.completion_tokens)
        if execution.max_cost is not None and cost >= execution.max_cost:
            left = pool.stop_admitting()
            self.reason = f"spending cap reached: cost {cost:.4f}; {left} episodes were not started"

    def _show(self, pool: RolloutPool, progress: RunProgress, *, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now - self._tick < METRICS_EVERY_S:
            return
        self._tick = now
        seconds = max(1e-9, now - self._began)
        tokens_per_s = (self.prompt_tokens + self.completion_tokens) / seconds
        reward = self.reward_sum / self.ran if self.ran else None
        gauges = pool.gauges()
        progress.update(
            done=self.complete,
            failed=self.failed,
            reward=reward,
            tokens_per_s=tokens_per_s,
            in_flight=int(gauges["in_flight"]),
        )
        if self.tracker is not None:
            self.tracker.log(
                {
                    "rollout/complete": self.complete,
                    "rollout/failed_attempts": self.failed,
                    "rollout/reward_mean": reward,
                    "rollout/tokens_per_s": round(tokens_per_s, 1),
                    "rollout/episodes_per_s": round(self.ran / seconds, 2),
                    **{f"pool/{key}": value for key, value in gauges.items()},
                },
                self._step,
                step_name="rollout/tick",
            )
            self._step += 1

    def _start_tracker(self) -> Tracker:
        experiment = self.experiment
        settings = {k: v for k, v in experiment.semantic.items() if k != "jobs"}
        return Tracker(
            self.run_dir,
            experiment.config.tracking,
            run_name=experiment.name,
            run_id=stable_run_id(experiment.name, experiment.fingerprint),
            job_type="rollout",
            config_dict={**settings, "fingerprint": experiment.fingerprint, "jobs": len(experiment.jobs)},
        )


def summarize_run(run_dir: Path, *, expected_jobs: int | None = None) -> JsonDict:
    """Summary of a run directory, streamed."""
    summary: JsonDict = summarize(episode_rows(RunReader(run_dir).iter_records()), expected_jobs=expected_jobs)
    return summary


def _backend(experiment: Experiment, spec: WorkerSpec) -> WorkerBackend:
    execution = experiment.config.execution
    if execution.mode == "inprocess":
        from actors.inprocess import InProcessBackend

        return InProcessBackend(spec, worker_timeout_s=execution.worker_timeout_s)
    from actors.rollout import RayBackend

    return RayBackend(spec, cpus_per_actor=execution.cpus_per_actor, worker_timeout_s=execution.worker_timeout_s)


def _connect(experiment: Experiment) -> str:
    """Join or start Ray where it is wanted; returns the address environment servers should listen on."""
    execution = experiment.config.execution
    if execution.mode == "inprocess":
        return "127.0.0.1"
    from actors.cluster import connect, node_address

    connect(execution.ray_address)
    return node_address()


def _cost(experiment: Experiment, prompt_tokens: int, completion_tokens: int) -> float:
    from rayrl.schemas import Usage

    prices = experiment.config.model.prices
    return prices.cost(Usage(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens))


def _metric_points(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b'"rollout/tick"') if path.exists() else 0


class _Interrupt:
    """Ctrl-C and SIGTERM set it; a second one stops at once. Outside the main thread it is never set."""

    def __init__(self, wanted: bool) -> None:
        self._event = threading.Event()
        self._wanted = wanted and threading.current_thread() is threading.main_thread()
        self._old: dict[int, Any] = {}

    def __enter__(self) -> _Interrupt:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def install(self) -> None:
        """Put the handlers in place (again)."""
        if self._wanted:
            for number in (signal.SIGINT, signal.SIGTERM):
                handler = signal.signal(number, self._on_signal)
                self._old.setdefault(number, handler)

    def is_set(self) -> bool:
        """Whether the run was asked to stop."""
        return self._event.is_set()

    def _on_signal(self, number: int, frame: object) -> None:
        if self._event.is_set():
            raise KeyboardInterrupt
        self._event.set()
        print("\nstopping: running episodes are cancelled and recorded; once more to stop at once", file=sys.stderr)


def print_run(result: RunResult) -> None:
    """A finished (or stopped) run, for people."""
    out = console()
    for table in summary_tables(result.summary):
        out.print(table)
    out.print(
        facts_table(
            "Run",
            [
                ("status", result.status + (f": {result.reason}" if result.reason else "")),
                ("episodes", f"{result.complete} of {result.episodes} complete, {result.ran_now} of them now"),
                ("seconds", f"{result.seconds:.1f}"),
                ("fingerprint", result.fingerprint[:16]),
                ("directory", result.run_dir),
            ],
        )
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``rayrl run``."""
    parser.add_argument("config", help="config file, or the name of a shipped one")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--again", metavar="REASON", help="open a test split a second time; kept beside the result")
    parser.add_argument("--quiet", action="store_true", help="no progress display")


def run(args: argparse.Namespace) -> int:
    """``rayrl run``."""
    for item in args.overrides:
        if "=" not in item:
            raise ConfigError(f"override {item!r} is not of the form section.key=value")
    config, base = load_run_config(args.config, args.overrides)
    result = run_rollout(prepare(config, base), again=args.again, quiet=args.quiet or getattr(args, "json", False))
    if getattr(args, "json", False):
        print_json(result.to_json())
    else:
        print_run(result)
    return result.exit_code


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``python -m jobs.rollout``."""
    return command_main("rollout", add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
