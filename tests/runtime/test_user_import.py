"""Import of user functions in a process of the run: whatever a file raises is one error, and Ctrl-C interrupts it."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hybridflow.errors import ConfigError
from hybridflow.runtime import user_import
from hybridflow.runtime.user_import import Interrupts, load_user_function


def load(tmp_path, code):
    (tmp_path / "mine.py").write_text(code)
    return load_user_function(f"{tmp_path}/mine.py:score", "data.order", ConfigError)


@pytest.mark.parametrize("error", ["ValueError", "SystemExit", "KeyboardInterrupt", "GeneratorExit", "BaseException"])
def test_whatever_a_file_raises_is_one_error(tmp_path, error):
    with pytest.raises(ConfigError, match=rf"data\.order '.*mine\.py:score': running .*mine\.py failed: {error}: no"):
        load(tmp_path, f"raise {error}('no')")


def test_a_file_that_takes_too_long_is_one_error(tmp_path, monkeypatch):
    monkeypatch.setattr(user_import, "IMPORT_LIMIT_S", 0.2)
    with pytest.raises(ConfigError, match=r"mine\.py:score': the import took longer than 0\.2 s; move slow work from"):
        load(tmp_path, "while True: pass")


@pytest.fixture
def ctrl_c():
    """Make SIGINT interrupt, which a shell turns off in the jobs that it starts in the background."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


def test_a_signal_during_an_import_is_an_interrupt(tmp_path, ctrl_c):
    with pytest.raises(KeyboardInterrupt):
        load(tmp_path, "import signal\nsignal.raise_signal(signal.SIGINT)")


def test_a_function_is_loaded(tmp_path):
    assert load(tmp_path, "def score(): return 3")() == 3


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
