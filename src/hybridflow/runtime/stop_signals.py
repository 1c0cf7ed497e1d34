"""Ctrl-C and SIGTERM as a request that a loop reads between steps, not as an exception in the middle of one."""

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Self

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_INTERRUPTED = 128 + signal.SIGINT
"""The exit status after a second signal, whichever it is: what a shell says of a program that Ctrl-C ended."""


class StopRequest:
    """While entered, the first SIGINT or SIGTERM sets `requested`; a second one ends the process at once.

    The second one is seen by a thread, so it works inside a long kernel too; the process exits with status 130. On
    leaving, the handlers found on entering are back. A signal that was ignored on entering (`nohup`, background jobs of
    a script) stays ignored. Outside the main thread, where Python allows no handlers, nothing is installed and
    `requested` stays False.
    """

    def __init__(self) -> None:
        self.requested = False
        self.signal_name: str | None = None
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            handled = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
            self._undo.enter_context(_exiting_at_second_of(handled))
            for number in handled:
                self._undo.callback(_put_back, number, signal.signal(number, self._on_signal))
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.requested:
            return
        self.requested = True
        self.signal_name = signal.Signals(number).name
        logger.warning(
            "%s: this step will be finished, then a checkpoint is saved and the run ends. "
            "A second signal ends it at once, without saving.",
            self.signal_name,
        )


_watched: set[int] = set()
"""Ends of pipes that Python writes the numbers of signals to."""


@contextlib.contextmanager
def _exiting_at_second_of(signals: list[signal.Signals]) -> Iterator[None]:
    """Python runs handlers between two of its instructions, but writes the number of a signal to a pipe at once."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    thread = threading.Thread(target=_exit_at_second, args=(read_end, signals), name="stop signals", daemon=True)
    thread.start()
    previous = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    _watched.add(write_end)
    try:
        yield
    finally:
        if write_end in _watched:  # in a forked child it is the parent's, and the thread is not there
            _watched.remove(write_end)
            signal.set_wakeup_fd(previous)
            os.write(write_end, _LEAVE)
            thread.join()
        os.close(write_end)
        os.close(read_end)


_LEAVE = b"\0"  # the number of no signal


def _exit_at_second(read_end: int, signals: list[signal.Signals]) -> None:
    num_seen = 0
    while _LEAVE not in (numbers := os.read(read_end, 64)):
        num_seen += sum(number in signals for number in numbers)
        if num_seen > 1:
            os.write(2, b"interrupted\n")
            os._exit(_INTERRUPTED)


def _stop_watching_in_forked_child() -> None:
    # A signal to the child would count as one to the parent.
    if _watched:
        _watched.clear()
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_stop_watching_in_forked_child)


def _put_back(number: signal.Signals, handler: Any) -> None:
    # None is a handler that Python did not install and cannot put back.
    signal.signal(number, signal.SIG_DFL if handler is None else handler)
