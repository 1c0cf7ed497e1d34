"""The names of parts of a start that take long."""

import threading

from hybridflow.runtime.observe.slow_start import named_if_slow


class Timer:
    """A timer whose time is over at once if `is_slow`."""

    is_slow = True

    def __init__(self, seconds, call):
        self.call = call

    def start(self):
        if self.is_slow:
            self.call()

    def cancel(self):
        pass


def test_only_a_slow_part_of_a_start_is_named_with_the_time_it_took(caplog, monkeypatch):
    monkeypatch.setattr(threading, "Timer", Timer)
    with named_if_slow("loading the models"):
        assert caplog.messages == ["loading the models ..."]
    assert caplog.messages[1:] == ["loading the models took 0 s"]
    monkeypatch.setattr(Timer, "is_slow", False)
    with named_if_slow("reading"):
        pass
    assert len(caplog.messages) == 2
