import pytest

from hybridflow.observability.waits import Waits


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def waits(clock):
    return Waits(clock)


def wait_before(waits, clock, at, until):
    clock.now = at
    with waits.during_call() as waited_s:
        clock.now = until
    return waited_s


def test_a_wait_is_the_time_since_the_last_call(waits, clock):
    assert wait_before(waits, clock, at=2.0, until=3.0) == 2.0  # since the process exists
    assert wait_before(waits, clock, at=3.0, until=4.0) == 0.0
    assert wait_before(waits, clock, at=4.75, until=5.0) == 0.75


def test_a_call_that_raises_ends_too(waits, clock):
    with pytest.raises(KeyError), waits.during_call():
        raise KeyError
    assert wait_before(waits, clock, at=0.5, until=1.0) == 0.5
    assert wait_before(waits, clock, at=1.0, until=1.0) == 0.0


def test_calls_beside_or_inside_each_other_wait_only_once(waits, clock):
    clock.now = 1.0
    with waits.during_call() as first:
        clock.now = 2.0
        assert wait_before(waits, clock, at=2.0, until=5.0) == 0.0
        clock.now = 6.0
    assert first == 1.0
    assert wait_before(waits, clock, at=6.25, until=7.0) == 0.25
