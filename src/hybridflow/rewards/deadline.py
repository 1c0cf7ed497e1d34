"""Ends a computation in Python that takes too long, by an alarm signal.

The signal comes again and again, since an exception within a `__del__` is lost. What stays within one call of C, as a
huge power, is not ended. Cycles are not collected meanwhile: the collector would run here what others left to be done
at the end of their objects, and the exception would break it off.
"""

import gc
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

_AGAIN_S = 0.1

_Result = TypeVar("_Result")


class DeadlineExceeded(BaseException):
    """The time is up; no Exception, so that no handler of the computation's takes it for its own."""


def call_within(seconds: float, function: Callable[..., _Result], *arguments: Any) -> _Result:
    """The function's result; raises `DeadlineExceeded` if it takes longer.

    Python runs handlers of signals in the main thread alone: in another one, nothing ends the function. Nor does it
    where a library in C answers the alarm, whose handler could not be put back.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGALRM) is None:
        return function(*arguments)
    is_over, was_collecting = False, gc.isenabled()

    def end(_: int, frame: FrameType | None) -> None:
        """Raise, unless what was interrupted is this function itself: before the other one, or after it."""
        if not is_over and (frame is None or frame.f_code is not call_within.__code__):
            raise DeadlineExceeded

    timer = signal.setitimer(signal.ITIMER_REAL, 0)  # so that an alarm of the caller's does not come to this handler
    handler = signal.signal(signal.SIGALRM, end)
    try:
        gc.disable()
        signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
        return function(*arguments)
    finally:
        is_over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)
        if was_collecting:
            gc.enable()
