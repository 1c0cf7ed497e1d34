"""`Waits`: the idle time of a process between its calls."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock


class Waits:
    """Measures how long a process has run no call. Calls may run side by side, in threads, and inside each other.

    `clock`: seconds of a clock that never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._lock, self._clock = Lock(), clock
        self._num_running, self._idle_since = 0, clock()

    @contextmanager
    def during_call(self) -> Iterator[float]:
        """Yield the seconds without a call before this one: since the last one, or since this object exists.

        It is 0 while another call runs.
        """
        with self._lock:
            waited_s = self._clock() - self._idle_since if self._num_running == 0 else 0.0
            self._num_running += 1
        try:
            yield waited_s
        finally:
            with self._lock:
                self._num_running -= 1
                self._idle_since = self._clock()
