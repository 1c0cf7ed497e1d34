"""The turn to use an engine: generation hands it over, between two steps, to calls that run beside it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turn:
    """A lock for two threads. A call that asks for it waits for one step of generation at most."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._is_taken = False
        self._num_asking = 0

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Hold the turn to generate; `hand_over` is called between steps."""
        self._take_after_others()
        try:
            yield
        finally:
            self.give_back()

    def hand_over(self) -> None:
        """Let calls that ask for the turn go first; return with the turn. Without such calls it costs nothing."""
        if self._num_asking:
            self.give_back()
            self._take_after_others()

    def ask(self) -> None:
        """Wait for the turn and take it, before generation continues."""
        with self._condition:
            self._num_asking += 1
            try:
                self._condition.wait_for(lambda: not self._is_taken)
                self._is_taken = True
            finally:
                self._num_asking -= 1

    def give_back(self) -> None:
        """Give the turn back; any thread may do it."""
        with self._condition:
            self._is_taken = False
            self._condition.notify_all()

    def _take_after_others(self) -> None:
        with self._condition:
            self._condition.wait_for(lambda: not self._is_taken and not self._num_asking)
            self._is_taken = True
