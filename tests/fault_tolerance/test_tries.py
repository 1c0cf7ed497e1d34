import pytest

from hybridflow.fault_tolerance import Tries


@pytest.mark.parametrize(
    ("most", "backoff_s", "drawn", "pauses"),
    [
        (4, 2.0, 0.5, [0.0, 2.0, 4.0, 8.0]),
        (4, 2.0, 0.0, [0.0, 1.5]),
        (4, 2.0, 1.0, [0.0, 2.5]),
        (10**6, 400.0, 0.5, [0.0, 400.0, *[600.0] * 2000]),
        (9, 3600.0, 0.5, [0.0, 3600.0, 3600.0]),
    ],
)
def test_pauses_double_up_to_ten_minutes_and_vary_by_a_quarter(most, backoff_s, drawn, pauses):
    tries = Tries(most, backoff_s, draw=lambda: drawn)
    assert [tries.next_pause_s(step=7) for _ in pauses] == pauses
    assert tries.is_exhausted() == (len(pauses) == most)


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
