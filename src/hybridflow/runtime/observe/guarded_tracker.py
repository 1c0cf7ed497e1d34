"""A tracker whose failures do not end a run: what it could not store is given to it again."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.runtime.observe.log import get_logger
from hybridflow.runtime.observe.tracker import Tracker

logger = get_logger(__name__)

MAX_PENDING = 10_000
"""Calls that are kept for a tracker that fails; metrics.jsonl has all."""


class GuardedTracker:
    """Passes each step to a tracker outside of the run, such as a server; `name` is that of `trainer.trackers`.

    A failure is a warning. The step is kept and given again with the next one, so that a server that comes back misses
    nothing. A call that fails although the next one works is left out.
    """

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name, self._tracker = name, tracker
        self._pending: deque[tuple[str, int, Any]] = deque()
        self._lost: set[int] = set()  # steps of calls that it refuses, or that were too many to keep
        self._reported: set[tuple[str, str]] = set()  # method and error of the warnings

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Pass the metrics of a step on."""
        self._add("log", step, metrics)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Pass samples of a step on, if the tracker takes them."""
        if hasattr(self._tracker, "log_samples"):
            self._add("log_samples", step, list(samples))

    def close(self) -> None:
        """Try the rest once more, and close the tracker."""
        self._send()
        if steps := sorted(self._lost | {step for _, step, _ in self._pending}):
            logger.warning("tracker '%s' lacks %d steps, from step %d on", self._name, len(steps), steps[0])
        try:
            self._tracker.close()
        except Exception as error:  # of a library, or of the user's class
            logger.warning("tracker '%s' could not be closed: %s: %s", self._name, type(error).__name__, error)

    def _add(self, method: str, step: int, what: Any) -> None:
        self._pending.append((method, step, what))
        if len(self._pending) > MAX_PENDING:
            self._lost.add(self._pending.popleft()[1])
        self._send()

    def _send(self) -> None:
        """Give the tracker its calls in order. Where one fails and the next does not, the tracker refuses the one."""
        failed: list[tuple[str, int, Any]] = []
        while self._pending and len(failed) < 2:
            call = self._pending.popleft()
            if error := self._error_of(call):
                failed.append(call)
                if (kind := (call[0], type(error).__name__)) not in self._reported:  # once, until it works again
                    self._reported.add(kind)
                    text = "tracker '%s' failed at step %d (%s: %s); the run goes on, and gives it the step again later"
                    logger.warning(text, self._name, call[1], kind[1], error)
                continue
            refused = [each for each in failed if self._error_of(each)]  # it may work again just now
            self._lost.update(step for _, step, _ in refused)
            failed.clear()
            if self._reported and not refused and len(self._pending) == 0:
                logger.warning("tracker '%s' works again, and has got what was kept for it", self._name)
                self._reported.clear()
        self._pending.extendleft(reversed(failed))

    def _error_of(self, call: tuple[str, int, Any]) -> Exception | None:
        """Give the tracker a call; return its error."""
        method, step, what = call
        try:
            getattr(self._tracker, method)(step, what)
        except Exception as error:  # of a library, or of the user's class
            return error
        return None
