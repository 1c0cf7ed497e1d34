"""A KeyboardInterrupt of a signal is distinguished from one that a user's code has raised."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hybridflow.runtime import Interrupts


@contextmanager
def handled(number: signal.Signals, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_only_a_keyboard_interrupt_of_a_signal_is_raised_again(number):
    with handled(number, signal.default_int_handler):
        with Interrupts() as interrupts:
            interrupts.raise_if_one(KeyboardInterrupt())
            interrupts.raise_if_one(ValueError())
            with pytest.raises(KeyboardInterrupt) as error:
                signal.raise_signal(number)
            with pytest.raises(KeyboardInterrupt) as again:
                interrupts.raise_if_one(error.value)
            assert again.value is error.value
            interrupts.raise_if_one(ValueError())
        assert signal.getsignal(number) is signal.default_int_handler


def test_handlers_of_the_program_are_called_and_kept():
    seen = []

    def own(number, frame):
        seen.append(number)

    with handled(signal.SIGTERM, own):
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGTERM)
            interrupts.raise_if_one(KeyboardInterrupt())
        assert seen == [signal.SIGTERM]
    with handled(signal.SIGTERM, signal.SIG_IGN):
        with Interrupts():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
            signal.signal(signal.SIGTERM, own)
        assert signal.getsignal(signal.SIGTERM) is own


def test_other_threads_install_no_handler():
    handlers = []

    def watch():
        with Interrupts() as interrupts:
            handlers.append(signal.getsignal(signal.SIGINT))
            interrupts.raise_if_one(KeyboardInterrupt())

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]
