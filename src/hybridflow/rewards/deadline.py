"""Ends a computation in Python that takes too long, in any thread and without a signal.

A second thread raises an exception in the first one, again and again, since one within a `__del__` or the comparison of
two keys is lost. What stays within one call of C, as a huge power, is not ended.
"""

import ctypes
import threading
from collections.abc import Callable
from typing import Any, TypeVar

_AGAIN_S = 0.1

_Result = TypeVar("_Result")


class DeadlineExceeded(BaseException):
    """The time is up; no Exception, so that no handler of the computation's takes it for its own."""


def call_within(seconds: float, function: Callable[..., _Result], *arguments: Any) -> _Result:
    """The function's result; raises `DeadlineExceeded` if it takes longer."""
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
