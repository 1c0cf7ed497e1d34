"""Ctrl-C and SIGTERM as a request that a loop reads between steps, not as an exception in the middle of one."""

import logging
import signal
import threading
from types import FrameType
from typing import Any, Self

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """While entered, the first SIGINT or SIGTERM sets `requested`; a second one ends the process at once.

    The second one is left to the operating system, so it works inside a long kernel too, and a shell sees 130
    (SIGINT) or 143 (SIGTERM). On leaving, the handlers found on entering are back. A signal that was ignored on
    entering (`nohup`, background jobs of a script) stays ignored. Outside the main thread, where Python allows
    no handlers, nothing is installed and `requested` stays False.
    """

    def __init__(self) -> None:
        self.requested = False
        self.signal_name: str | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._on_first_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            # None is a handler that Python did not install and cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _on_first_signal(self, number: int, _: FrameType | None) -> None:
        for installed in self._previous:
            signal.signal(installed, signal.SIG_DFL)
        self.requested = True
        self.signal_name = signal.Signals(number).name
        logger.warning(
            "%s: this step will be finished, then a checkpoint is saved and the run ends. "
            "A second signal ends it at once, without saving.",
            self.signal_name,
        )
