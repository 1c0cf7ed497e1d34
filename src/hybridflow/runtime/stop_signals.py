"""Ctrl-C and SIGTERM as a request that a loop checks between steps, instead of an exception inside a step."""

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn, Self

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_INTERRUPTED = 128 + signal.SIGINT
"""The exit status after a second signal of either kind, which shells use for a program ended by Ctrl-C."""


AFTER_STEP = (
    "%s: this step will be finished, then a checkpoint is saved and the run ends. A second signal ends it at once, "
    "without saving."
)


class StopRequest:
    """A context in which the first SIGINT or SIGTERM sets `requested` and a second one ends the process at once.

    A thread watches for the second signal, so that it also works during a long kernel; the process exits with status
    130. On exit the previous handlers are restored. A signal that was ignored before (`nohup`, background jobs of a
    script) stays ignored. Outside the main thread, where Python does not allow handlers, nothing is installed and
    `requested` stays False.
    """

    def __init__(self, notice: str = AFTER_STEP) -> None:
        self.requested = False
        self._notice = notice
        self.signal_name: str | None = None
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            handled = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
            self._undo.enter_context(_exiting_at_second_of(handled))
            for number in handled:
                self._undo.callback(_restore, number, signal.signal(number, self._on_signal))
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.requested:
            return
        self.requested = True
        self.signal_name = signal.Signals(number).name
        logger.warning(self._notice, self.signal_name)


@contextlib.contextmanager
def signals_after(what: str) -> Iterator[None]:
    """Handle SIGINT or SIGTERM only after the block, whose native code an exception would break.

    A second signal ends the process at once.
    """
    stop = StopRequest(f"%s: the run ends after {what}. A second signal ends it at once.")
    try:
        with stop:
            yield
    finally:
        if stop.signal_name is not None:
            signal.raise_signal(signal.Signals[stop.signal_name])


@contextlib.contextmanager
def signals_exit() -> Iterator[None]:
    """End the process at once, as interrupted, if SIGINT or SIGTERM arrives within the block.

    It is for imports: they have nothing to clean up, and may turn an exception into another error.
    """
    with contextlib.ExitStack() as undo:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    undo.callback(_restore, number, signal.signal(number, lambda *_: _exit_interrupted()))
        yield


def _exit_interrupted() -> NoReturn:
    with contextlib.suppress(OSError):  # nothing reads it
        os.write(2, b"interrupted\n")
    os._exit(_INTERRUPTED)


_watched: set[int] = set()
"""Write ends of the pipes that Python writes signal numbers to."""


@contextlib.contextmanager
def _exiting_at_second_of(signals: list[signal.Signals]) -> Iterator[None]:
    """Watch for a second signal through a pipe, since Python writes to it at once but runs handlers only later."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    thread = threading.Thread(target=_exit_at_second, args=(read_end, signals), name="stop signals", daemon=True)
    thread.start()
    previous = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    _watched.add(write_end)
    try:
        yield
    finally:
        if write_end in _watched:  # in a forked child the pipe is the parent's, and there is no thread
            _watched.remove(write_end)
            signal.set_wakeup_fd(previous)
            os.write(write_end, _LEAVE)
            thread.join()
        os.close(write_end)
        os.close(read_end)


_LEAVE = b"\0"  # not the number of a signal


def _exit_at_second(read_end: int, signals: list[signal.Signals]) -> None:
    num_seen = 0
    while _LEAVE not in (numbers := os.read(read_end, 64)):
        num_seen += sum(number in signals for number in numbers)
        if num_seen > 1:
            _exit_interrupted()


def _stop_watching_in_forked_child() -> None:
    # Otherwise a signal to the child would also count for the parent.
    if _watched:
        _watched.clear()
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_stop_watching_in_forked_child)


def _restore(number: signal.Signals, handler: Any) -> None:
    # None: a handler not installed by Python, which cannot restore it.
    signal.signal(number, signal.SIG_DFL if handler is None else handler)
