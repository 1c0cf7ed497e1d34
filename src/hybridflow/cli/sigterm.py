"""SIGTERM, wherever no loop has asked to be told of it, ends a command as Ctrl-C does: it is cleaned up after."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt, unless it is ignored or has a handler, or this is not the main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
