import pytest

from hybridflow.runtime.observe.waits import Waits


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_a_wait_is_the_time_since_the_last_call_counted_once():
    clock = Clock()
    waits = Waits(clock)

    def wait(at, until):
        clock.now = at
        with waits.during_call() as call:
            clock.now = until
        return call.waited_s

    assert wait(2.0, 3.0) == 2.0  # since the process exists
    assert wait(3.0, 4.0) == 0.0
    assert wait(4.75, 5.0) == 0.75
    with pytest.raises(KeyError), waits.during_call():
        raise KeyError
    assert wait(5.5, 6.0) == 0.5  # a call that raises ends too
    clock.now = 7.0
    with waits.during_call() as outer:
        assert wait(8.0, 11.0) == 0.0  # beside or inside another call
        clock.now = 12.0
    assert outer.waited_s == 1.0
    assert wait(12.25, 13.0) == 0.25


def test_a_wait_begins_at_the_moment_at_which_its_call_has_ended():
    clock = Clock()
    waits = Waits(clock)
    with waits.during_call() as first:
        clock.now = 1.5
        end = first.end()
        clock.now = 9.0  # what is done after the call has ended belongs to the wait
    assert end - first.start == pytest.approx(1.5, abs=1e-6)
    with waits.during_call() as second:
        pass
    assert second.waited_s == 7.5
