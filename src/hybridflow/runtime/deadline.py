"""Time limit for a computation in Python, by an alarm signal.

The signal is repeated, since Python drops an exception raised within a `__del__`. A single long call into C, such as a
huge power, is not interrupted. Garbage collection is off meanwhile: the exception could interrupt finalizers of
unrelated objects that the collector runs.
"""

import gc
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

_REPEAT_S = 0.1

_Result = TypeVar("_Result")


class DeadlineExceeded(BaseException):
    """The time limit has passed. Derived from BaseException, so that the computation's `except Exception` misses it."""


def call_within(seconds: float, function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Return the function's result; raise `DeadlineExceeded` if it takes longer.

    There is no time limit outside the main thread, where Python runs no signal handlers, and if a C library handles
    SIGALRM, since that handler could not be restored.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGALRM) is None:
        return function(*arguments)
    is_over, was_collecting = False, gc.isenabled()

    def interrupt(_: int, frame: FrameType | None) -> None:
        """Raise, unless the signal interrupted `call_within` itself, before or after the call of `function`."""
        if not is_over and (frame is None or frame.f_code is not call_within.__code__):
            raise DeadlineExceeded

    timer = signal.setitimer(signal.ITIMER_REAL, 0)  # so that the caller's alarm does not reach this handler
    handler = signal.signal(signal.SIGALRM, interrupt)
    try:
        gc.disable()
        signal.setitimer(signal.ITIMER_REAL, seconds, _REPEAT_S)
        return function(*arguments)
    finally:
        is_over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)
        if was_collecting:
            gc.enable()
