"""Lines for the parts of a start that take long, so that a run is never silent for longer than a few seconds."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hybridflow.runtime.observe.log import get_logger

logger = get_logger(__name__)

AFTER_S = 3.0
"""Seconds after which a part of a start is named."""


@contextmanager
def named_if_slow(what: str) -> Iterator[None]:
    """Log what this process is doing if the block takes longer than AFTER_S seconds, and at its end how long it took.

    A block in another one is named as well: the inner names say which part of the outer one takes long.
    """
    begin, is_named = time.monotonic(), threading.Event()

    def name() -> None:
        is_named.set()
        logger.info("%s ...", what)

    timer = threading.Timer(AFTER_S, name)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    if is_named.is_set():
        logger.info("%s took %.0f s", what, time.monotonic() - begin)
