"""Import of user functions in a process of the run: with a time limit, and still interruptible by Ctrl-C."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

from hybridflow.runtime import user_code
from hybridflow.runtime.deadline import DeadlineExceeded, call_within

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


IMPORT_LIMIT_S = 120.0
"""Seconds that the import of a user's file or module may take, in the main thread."""


def load_user_function(name: str, what: str, error: type[Exception], is_class: bool = False) -> Callable[..., Any]:
    """Return the function, or the class, named by 'path/to/file.py:function' or 'package.module:function'.

    Raises `error`, with `what` the function is for ("reward function"), if the file, module or function does not
    exist, if the import raises anything, or if it takes longer than IMPORT_LIMIT_S.
    """
    with Interrupts() as interrupts:
        try:
            return call_within(IMPORT_LIMIT_S, user_code.load_user_function, name, what, error, is_class)
        except (error, DeadlineExceeded) as problem:
            cause = problem.__cause__ or problem
            interrupts.raise_if_one(cause)
            if not isinstance(cause, DeadlineExceeded):
                raise
    limit = f"the import took longer than {IMPORT_LIMIT_S:g} s"
    raise error(f"{what} {name!r}: {limit}; move slow work from the import of the file into the function.")
