import pytest

from hybridflow.observability.waits import Waits


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_a_wait_is_the_time_since_the_last_call_counted_once():
    clock = Clock()
    waits = Waits(clock)

    def wait(at, until):
        clock.now = at
        with waits.during_call() as waited_s:
            clock.now = until
        return waited_s

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
    assert outer == 1.0
    assert wait(12.25, 13.0) == 0.25
