import gc
import signal
import threading
import time
import weakref
from collections import Counter

import pytest

from hybridflow.runtime.deadline import DeadlineExceeded, call_within

pytestmark = pytest.mark.timeout(120, method="thread")  # by a thread: `call_within` takes the alarm of the other method


def loop():
    while True:
        pass


def test_a_result_in_time_is_returned_and_an_exception_propagates():
    assert call_within(5.0, max, 1, 2) == 2
    with pytest.raises(ZeroDivisionError):
        call_within(5.0, lambda: 1 / 0)
    assert gc.isenabled()
    results: list[int] = []  # another thread has no time limit
    thread = threading.Thread(target=lambda: results.append(call_within(0.01, lambda: time.sleep(0.1) or 3)))
    thread.start()
    thread.join()
    assert results == [3]


def test_a_slow_call_is_interrupted_and_an_earlier_alarm_restored():
    came: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: came.append(number))
    timer = signal.setitimer(signal.ITIMER_REAL, 1000.0)
    start = time.monotonic()
    try:
        with pytest.raises(DeadlineExceeded):
            call_within(0.05, loop)
        assert time.monotonic() - start >= 0.05
        assert came == []
        assert 0.0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 1000.0
        signal.raise_signal(signal.SIGALRM)
        assert came == [signal.SIGALRM]
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timer)


class SwallowsOnce:
    def __del__(self) -> None:
        loop()


def swallow_and_loop():
    item = SwallowsOnce()
    del item  # the exception is raised in here first
    loop()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_dropped_exception_is_raised_again():
    with pytest.raises(DeadlineExceeded):
        call_within(0.05, swallow_and_loop)


class Left:
    """Object in a reference cycle with a finalizer, which must not run within the computation."""

    def __init__(self, ended: list[bool]) -> None:
        self.itself = self
        weakref.finalize(self, ended.append, True).atexit = False


def make_cycles():
    while True:
        kept = [[] for _ in range(10_000)]  # enough to trigger the garbage collector if it were on
        del kept


def test_finalizers_of_unrelated_objects_are_not_interrupted():
    ended: list[bool] = []
    gc.collect()
    Left(ended)
    with pytest.raises(DeadlineExceeded):
        call_within(0.05, make_cycles)
    assert gc.isenabled()
    assert ended == []
    gc.collect()
    assert ended == [True]


def test_the_state_of_the_garbage_collector_is_restored():
    gc.disable()
    try:
        assert call_within(5.0, gc.isenabled) is False
        assert not gc.isenabled()
    finally:
        gc.enable()


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


@pytest.mark.exhaustive
def test_no_exception_follows_a_call_that_ends_near_its_limit():
    handler, ends = signal.getsignal(signal.SIGALRM), Counter()
    for index in range(3000):
        try:
            call_within(0.001, spin, 0.0007 + 0.0000002 * index)
            ends["in time"] += 1
        except DeadlineExceeded:
            ends["too late"] += 1
    assert sum(range(1_000_000)) == 499999500000
    assert ends["in time"] > 0
    assert ends["too late"] > 0
    assert signal.getsignal(signal.SIGALRM) is handler
    assert gc.isenabled()
