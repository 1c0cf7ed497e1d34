import gc
import threading
import time
import weakref

import pytest

from hybridflow.rewards.deadline import DeadlineExceeded, call_within


def loop():
    while True:
        pass


class SwallowsOnce:
    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def __del__(self) -> None:
        while time.monotonic() < self._end:
            pass


def swallow_and_loop():
    item = SwallowsOnce(0.2)
    del item  # the exception is raised in here first
    loop()


def test_a_result_in_time_is_returned_and_an_exception_is_raised():
    assert call_within(5.0, max, 1, 2) == 2
    with pytest.raises(ZeroDivisionError):
        call_within(5.0, lambda: 1 / 0)


def test_what_takes_longer_is_ended_in_any_thread():
    def ended() -> None:
        with pytest.raises(DeadlineExceeded):
            call_within(0.05, loop)
        ends.append(time.monotonic())

    ends: list[float] = []
    ended()
    threads = [threading.Thread(target=ended) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert len(ends) == 4


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_exception_that_is_lost_is_raised_again():
    with pytest.raises(DeadlineExceeded):
        call_within(0.05, swallow_and_loop)


class Left:
    """One of a cycle, whose end takes as long as the computation that it must not be part of."""

    def __init__(self, ended: list[bool]) -> None:
        self.itself = self
        weakref.finalize(self, _end_slowly, ended).atexit = False


def _end_slowly(ended: list[bool]) -> None:
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        pass
    ended.append(True)


def make_cycles():
    while True:
        kept = [[] for _ in range(10_000)]  # enough for the collector to start, were it on
        del kept


def test_the_end_of_others_objects_is_not_broken_off():
    ended: list[bool] = []
    gc.collect()
    Left(ended)
    with pytest.raises(DeadlineExceeded):
        call_within(0.05, make_cycles)
    assert gc.isenabled()
    assert ended == []
    gc.collect()
    assert ended == [True]


def test_the_collector_stays_as_it_was():
    gc.disable()
    try:
        assert call_within(5.0, gc.isenabled) is False
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(ZeroDivisionError):
        call_within(5.0, lambda: 1 / 0)
    assert gc.isenabled()


def test_nothing_comes_after_a_call_that_ended_about_in_time():
    num_ended, num_threads = 0, threading.active_count()
    for _ in range(300):
        try:
            call_within(0.001, time.sleep, 0.001)
        except DeadlineExceeded:
            num_ended += 1
    assert sum(range(100_000)) == 4999950000
    assert 0 <= num_ended <= 300
    assert threading.active_count() <= num_threads
