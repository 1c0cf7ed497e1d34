"""Ends a computation in Python that takes too long, in any thread and without a signal.

A second thread raises an exception in the first one, again and again, since one within a `__del__` or the comparison of
two keys is lost. What stays within one call of C, as a huge power, is not ended. Cycles are not collected meanwhile:
the collector would run here what others left to be done at the end of their objects, and the exception would break it
off.
"""

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

_AGAIN_S = 0.1

_Result = TypeVar("_Result")


class DeadlineExceeded(BaseException):
    """The time is up; no Exception, so that no handler of the computation's takes it for its own."""


class _Collector:
    """The collector of cycles, off while any thread wants it to be."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_pausing = 0
        self._was_on = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        with self._lock:
            if self._num_pausing == 0:
                self._was_on = gc.isenabled()
                gc.disable()
            self._num_pausing += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_pausing -= 1
                if self._num_pausing == 0 and self._was_on:
                    gc.enable()


_collector = _Collector()


def call_within(seconds: float, function: Callable[..., _Result], *arguments: Any) -> _Result:
    """The function's result; raises `DeadlineExceeded` if it takes longer."""
    with _collector.paused():
        return _call_within(seconds, function, *arguments)


def _call_within(seconds: float, function: Callable[..., _Result], *arguments: Any) -> _Result:
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    caller = ctypes.c_ulong(threading.get_ident())
    done = threading.Event()

    def watch() -> None:
        is_done = done.wait(seconds)
        while not is_done:
            raise_in(caller, ctypes.py_object(DeadlineExceeded))
            is_done = done.wait(_AGAIN_S)

    watchdog = threading.Thread(target=watch, daemon=True)
    watchdog.start()
    try:
        return function(*arguments)
    finally:
        try:
            done.set()
            watchdog.join()
        except DeadlineExceeded:  # it came just now; the next one would not come before this is done
            done.set()
            watchdog.join()
        raise_in(caller, None)  # one that is still on its way is taken back
