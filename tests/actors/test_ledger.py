"""The books always close: a state machine drives the ledger every way a pool could."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from actors.ledger import MAX_BACKOFF_S, NOT_RETRYABLE, Disposition, Ledger, RetryPolicy
from rayrl.errors import LedgerError
from rayrl.schemas import EpisodeJob
from rayrl.worker import Attempt, FinishedAttempt
from tests.doubles import job


def result(attempt: Attempt, *, code: str | None = None, status: str | None = None) -> FinishedAttempt:
    status = status or ("failed" if code else "completed")
    return FinishedAttempt(
        episode_id=attempt.job.episode_id,
        number=attempt.number,
        status=status,
        complete=status == "completed",
        record=b"{}",
        private=None,
        training=None,
        code=code,
    )


CODES = ["http_500", "deadline", "worker_died", "unexpected", *sorted(NOT_RETRYABLE)]


class LedgerMachine(RuleBasedStateMachine):
    """Workers take, report, die, report late; jobs come with priorities and histories; time passes."""

    attempts = Bundle("attempts")
    lost = Bundle("lost")

    def __init__(self) -> None:
        super().__init__()
        self.policy = RetryPolicy(max_attempts=3, max_deadline_attempts=2, max_worker_deaths=3, backoff_s=1.0)
        self.ledger = Ledger(self.policy)
        self.now = 0.0
        self.next_task = 0
        self.numbers: dict[str, list[int]] = {}
        self.before: dict[str, int] = {}
        self.terminal: dict[tuple[str, int], str] = {}
        self.complete: set[str] = set()
        self.failures: dict[str, int] = {}
        self.stopped = False

    @rule(n=st.integers(1, 4), priority=st.integers(0, 2), history=st.integers(0, 3))
    def add(self, n: int, priority: int, history: int) -> None:
        jobs = [job(self.next_task + i) for i in range(n)]
        self.next_task += n
        before = {j.episode_id: history for j in jobs}
        self.before |= before
        self.ledger.add(jobs, priority=priority, attempts_before=before)

    @rule(target=attempts, worker=st.sampled_from("abc"), n=st.integers(0, 5))
    def take(self, worker: str, n: int):
        taken = self.ledger.take(worker, n, self.now)
        assert len(taken) <= n
        if self.stopped or self.ledger.paused:
            assert taken == []
        for attempt in taken:
            name = attempt.job.episode_id
            numbers = self.numbers.setdefault(name, [])
            # numbered across resumes, without a gap
            assert attempt.number == self.before[name] + len(numbers) + 1
            # at most one live attempt, none after a complete one
            assert all((name, number) in self.terminal for number in numbers)
            assert name not in self.complete
            numbers.append(attempt.number)
        return multiple(*((worker, attempt) for attempt in taken))

    @rule(held=consumes(attempts), code=st.one_of(st.none(), st.sampled_from(CODES), st.just("cancelled")))
    def report(self, held, code) -> None:
        worker, attempt = held
        name = attempt.job.episode_id
        status = "cancelled" if code == "cancelled" else None
        disposition = self.ledger.finished(worker, result(attempt, code=code, status=status), self.now)
        self.terminal[(name, attempt.number)] = code or "completed"
        if code is None:
            assert disposition is Disposition.ACCEPTED
            self.complete.add(name)
        elif code == "cancelled":
            assert disposition is Disposition.CANCELLED
        else:
            assert disposition in (Disposition.RETRY, Disposition.GAVE_UP)
            if self.stopped or code in NOT_RETRYABLE:
                assert disposition is Disposition.GAVE_UP
            if code != "worker_died":
                self.failures[name] = self.failures.get(name, 0) + 1
                if disposition is Disposition.RETRY:
                    assert self.failures[name] < self.policy.max_attempts

    @rule(target=lost, held=consumes(attempts))
    def die(self, held):
        """The worker is given up: its attempt gets its terminal record from the pool."""
        worker, attempt = held
        self.ledger.finished(worker, result(attempt, code="worker_died"), self.now)
        self.terminal[(attempt.job.episode_id, attempt.number)] = "worker_died"
        return held

    @rule(held=lost, complete=st.booleans())
    def speak_from_the_grave(self, held, complete) -> None:
        worker, attempt = held
        counts = (self.ledger.counts.completed, self.ledger.counts.failed)
        late = result(attempt, code=None if complete else "http_500")
        assert self.ledger.finished(worker, late, self.now) is Disposition.DUPLICATE
        assert (self.ledger.counts.completed, self.ledger.counts.failed) == counts

    @rule(held=attempts)
    def report_from_a_stranger(self, held) -> None:
        _, attempt = held
        assert self.ledger.finished("nobody", result(attempt), self.now) is Disposition.DUPLICATE

    @rule(seconds=st.floats(0, 40))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(paused=st.booleans())
    def pause(self, paused: bool) -> None:
        self.ledger.paused = paused

    @rule(data=st.data())
    def drop_some(self, data) -> None:
        names = data.draw(st.sets(st.sampled_from(sorted(self.before) or ["none"]), max_size=2))
        queued = self.ledger.queued
        self.ledger.cancel(names)
        assert self.ledger.queued <= queued

    @rule()
    def stop(self) -> None:
        left = self.ledger.queued
        assert self.ledger.cancel_queue() == left and self.ledger.queued == 0
        self.stopped = True

    @invariant()
    def the_books_agree(self) -> None:
        counts = self.ledger.counts
        live = [attempt for worker in "abc" for attempt in self.ledger.held_by(worker)]
        assert counts.admitted == counts.completed + counts.failed + counts.cancelled + len(live)
        assert counts.admitted == sum(map(len, self.numbers.values()))
        assert len(live) == self.ledger.live == sum(self.ledger.in_flight(worker) for worker in "abc")
        assert len({attempt.job.episode_id for attempt in live}) == len(live)
        assert counts.completed == len(self.complete)
        if live:
            with pytest.raises(LedgerError, match="still live"):
                self.ledger.check_closed()
        else:
            self.ledger.check_closed()

    def teardown(self) -> None:
        for worker in "abc":
            for attempt in self.ledger.held_by(worker):
                self.ledger.finished(worker, result(attempt, status="cancelled"), self.now)
        self.ledger.check_closed()


LedgerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLedgerMachine = LedgerMachine.TestCase


def drive(ledger: Ledger, codes: list[str | None], *, step: float = 100.0) -> tuple[int, Disposition]:
    """One episode with the given outcomes; returns how many attempts it got and the last disposition."""
    now, made, last = 0.0, 0, Disposition.RETRY
    for code in codes:
        now += step
        taken = ledger.take("w", 1, now)
        if not taken:
            break
        made += 1
        last = ledger.finished("w", result(taken[0], code=code), now)
    return made, last


@pytest.mark.parametrize(
    ("code", "attempts"), [("http_500", 3), ("deadline", 2), ("worker_died", 5), ("http_status", 1), ("unexpected", 3)]
)
def test_how_often_a_failure_is_tried_again(code, attempts):
    ledger = Ledger(RetryPolicy())
    ledger.add([job(1)])
    made, last = drive(ledger, [code] * 10)
    assert (made, last) == (attempts, Disposition.GAVE_UP)
    assert ledger.counts.gave_up == {code: 1} and ledger.idle


def test_a_dying_worker_does_not_use_up_the_jobs_own_attempts():
    ledger = Ledger(RetryPolicy())
    ledger.add([job(1)])
    made, last = drive(ledger, ["worker_died", "http_500", "worker_died", "http_500", None])
    assert (made, last) == (5, Disposition.ACCEPTED)


def test_higher_priority_first_then_submission_order():
    ledger = Ledger(RetryPolicy())
    ledger.add([job(1), job(2)])
    ledger.add([job(3), job(4)], priority=5)
    ledger.add([job(5)])
    assert [a.job.task_id for a in ledger.take("w", 9, 0.0)] == [3, 4, 1, 2, 5]


def test_a_retry_waits_out_its_backoff_and_then_goes_first_among_its_equals():
    ledger = Ledger(RetryPolicy(backoff_s=2.0))
    ledger.add([job(1), job(2), job(3)])
    (first,) = ledger.take("w", 1, 0.0)
    assert ledger.finished("w", result(first, code="http_500"), 10.0) is Disposition.RETRY
    assert ledger.next_wake() == 12.0
    assert [a.job.task_id for a in ledger.take("w", 1, 11.9)] == [2]
    assert [a.job.task_id for a in ledger.take("w", 1, 12.0)] == [1]


def test_backoff_doubles_and_is_bounded():
    policy = RetryPolicy(backoff_s=0.5)
    assert [policy.delay(n) for n in (1, 2, 3)] == [0.5, 1.0, 2.0]
    assert policy.delay(30) == MAX_BACKOFF_S


def test_attempts_are_numbered_on_after_a_resume():
    ledger = Ledger(RetryPolicy())
    ledger.add([job(1), job(2)], attempts_before={job(1).episode_id: 4})
    assert [(a.job.task_id, a.number) for a in ledger.take("w", 2, 0.0)] == [(1, 5), (2, 1)]


def test_an_episode_is_admitted_once():
    ledger = Ledger(RetryPolicy())
    ledger.add([job(1)])
    with pytest.raises(ValueError, match="submitted twice"):
        ledger.add([job(1)])


def test_the_same_terminal_report_twice_counts_once():
    ledger = Ledger(RetryPolicy())
    ledger.add([job(1)])
    (attempt,) = ledger.take("w", 1, 0.0)
    assert ledger.finished("w", result(attempt), 1.0) is Disposition.ACCEPTED
    assert ledger.finished("w", result(attempt), 1.0) is Disposition.DUPLICATE
    assert (ledger.counts.completed, ledger.counts.duplicates) == (1, 1)


def test_books_that_do_not_close_name_the_episode():
    ledger = Ledger(RetryPolicy())
    ledger.add([job(7)])
    ledger.take("w", 1, 0.0)
    with pytest.raises(LedgerError, match=r"admitted 1, completed 0.*still live 1 \(task-000007__sample-000\)"):
        ledger.check_closed()


def test_many_jobs_are_handed_out_in_order():
    ledger = Ledger(RetryPolicy())
    jobs = [EpisodeJob(task_id=n, sample_id=0, seed=0, split="s") for n in range(20_000)]
    random.Random(0).shuffle(jobs)
    ledger.add(jobs)
    seen = []
    while not ledger.idle:
        for attempt in ledger.take("w", 64, 0.0):
            seen.append(attempt.job)
            ledger.finished("w", result(attempt), 0.0)
    assert seen == jobs
    ledger.check_closed()
