"""Whether a KeyboardInterrupt is that of a signal to this process or one that a user's code has raised itself."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """A context that notes whether a handler of SIGINT or SIGTERM has raised; the handlers work as before.

    Outside the main thread, where Python runs no handler, none can have.
    """

    def __init__(self) -> None:
        self._handlers: dict[signal.Signals, Callable[[int, FrameType | None], Any]] = {}
        self._has_raised = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._on_signal:  # the user's code may have set another one
                signal.signal(number, handler)

    def raise_if_one(self, error: BaseException) -> None:
        """Raise the error if it is the KeyboardInterrupt of a signal."""
        if self._has_raised and isinstance(error, KeyboardInterrupt):
            raise error

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        try:
            self._handlers[signal.Signals(number)](number, frame)
        except BaseException:
            self._has_raised = True
            raise
