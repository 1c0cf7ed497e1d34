"""`Waits`: when a process runs calls, and how long it runs none between them."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock


class CallTime:
    """The time of one call. `start`: seconds of `time.time()`. `waited_s`: seconds without a call before this one."""

    def __init__(self, began: float, waited_s: float, clock: Callable[[], float]) -> None:
        self.start, self.waited_s = time.time(), waited_s
        self._began, self._clock = began, clock
        self.ended: float | None = None

    def end(self) -> float:
        """End the call, and return when, in seconds of `time.time()`.

        The wait after it begins at the same reading of the clock, so calls and waits leave no time between them.
        """
        self.ended = self._clock()
        return self.start + self.ended - self._began


class Waits:
    """Measures how long a process has run no call. Calls may run side by side, in threads, and inside each other.

    `clock`: seconds of a clock that never goes back.
    """

    def __init__(self, clock: Callable[[], float] = lambda: time.perf_counter()) -> None:
        self._lock, self._clock = Lock(), clock
        self._num_running, self._idle_since = 0, clock()

    @contextmanager
    def during_call(self) -> Iterator[CallTime]:
        """Yield the time of a call that runs inside; it ends with `CallTime.end`, or with this block.

        It waited since the last call, or since this object exists; 0 seconds while another call runs.
        """
        with self._lock:
            began = self._clock()
            call = CallTime(began, began - self._idle_since if self._num_running == 0 else 0.0, self._clock)
            self._num_running += 1
        try:
            yield call
        finally:
            with self._lock:
                self._num_running -= 1
                self._idle_since = max(self._idle_since, self._clock() if call.ended is None else call.ended)
