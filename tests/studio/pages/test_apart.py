"""Computing in a process of its own: the answer, an error, and a process that is killed."""

import os
import signal

import pytest

from rayrl.errors import DataError
from rayrl.studio.pages.apart import NICE, apart


def work(what):
    if what == "priority":
        return os.getpid(), os.getpriority(os.PRIO_PROCESS, 0)
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise DataError(f"line 3: {what}")


def test_the_answer_comes_from_another_process_of_low_priority():
    pid, priority = apart(work, "priority")
    assert pid != os.getpid() and priority >= NICE


def test_an_error_is_the_one_that_was_raised():
    with pytest.raises(DataError, match="line 3: no number"):
        apart(work, "no number")


def test_a_killed_process_is_an_error_and_no_endless_wait():
    with pytest.raises(DataError, match=r"exit code -9"):
        apart(work, "killed")
