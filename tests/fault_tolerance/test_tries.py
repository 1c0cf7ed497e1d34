import pytest

from hybridflow.fault_tolerance import Tries


def test_pauses_double_from_the_second_try_on():
    tries = Tries(4, 2.0, draw=lambda: 0.5)
    assert [tries.next_pause_s(step=7) for _ in range(4)] == [0.0, 2.0, 4.0, 8.0]
    assert tries.is_exhausted()


@pytest.mark.parametrize(("drawn", "pause_s"), [(0.0, 1.5), (1.0, 2.5)])
def test_pauses_vary_by_a_quarter(drawn, pause_s):
    tries = Tries(4, 2.0, draw=lambda: drawn)
    tries.next_pause_s(step=0)
    assert tries.next_pause_s(step=0) == pause_s


def test_a_step_beyond_the_failure_gives_all_tries_back():
    tries = Tries(1, 0.0)
    tries.next_pause_s(step=3)
    tries.note_step(2)  # repeated
    tries.note_step(3)
    assert tries.is_exhausted()
    tries.note_step(4)
    assert not tries.is_exhausted()


def test_without_tries_the_first_failure_stops_the_run():
    assert Tries(0, 1.0).is_exhausted()


def test_pauses_stop_to_double_after_ten_minutes():
    tries = Tries(10**6, 400.0, draw=lambda: 0.5)
    assert [tries.next_pause_s(step=0) for _ in range(2000)][:5] == [0.0, 400.0, 600.0, 600.0, 600.0]
    assert tries.next_pause_s(step=0) == 600.0
    longer = Tries(9, 3600.0, draw=lambda: 0.5)
    assert [longer.next_pause_s(step=0) for _ in range(3)] == [0.0, 3600.0, 3600.0]
