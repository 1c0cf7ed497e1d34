"""A KeyboardInterrupt of a signal is distinguished from one that a user's code has raised."""

import signal
import threading

import pytest

from hybridflow.runtime import Interrupts


def test_an_own_keyboard_interrupt_is_not_one_of_a_signal():
    with Interrupts() as interrupts:
        interrupts.raise_if_one(KeyboardInterrupt())
        interrupts.raise_if_one(ValueError())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_keyboard_interrupt_of_a_signal_is_raised_again(number):
    before = signal.signal(number, signal.default_int_handler)
    try:
        with Interrupts() as interrupts:
            with pytest.raises(KeyboardInterrupt) as error:
                signal.raise_signal(number)
            with pytest.raises(KeyboardInterrupt) as again:
                interrupts.raise_if_one(error.value)
            assert again.value is error.value
            interrupts.raise_if_one(ValueError())
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)


def test_a_handler_that_does_not_raise_is_called_and_changes_nothing():
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGTERM)
            interrupts.raise_if_one(KeyboardInterrupt())
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_ignored_signals_and_own_handlers_of_the_code_are_kept():
    def own(number, frame):
        pass

    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with Interrupts():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
            signal.signal(signal.SIGTERM, own)
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


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
