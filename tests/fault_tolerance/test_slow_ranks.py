"""When ranks are measured, and which of the measured ones are named."""

import pytest

from hybridflow.fault_tolerance import SlowRanks, find_slow_ranks

ORDINARY_S = (9.0, 2.0, 2.0, 1.0, 2.0)  # the first step compiles


def after_steps(*seconds, factor=3.0):
    """Return a judge that has seen these steps, none of which was slow, and the number of the next step."""
    ranks = SlowRanks(factor)
    assert [ranks.note_step(step, duration) for step, duration in enumerate(seconds, start=1)] == [None] * len(seconds)
    return ranks, len(seconds) + 1


@pytest.mark.parametrize(
    ("before", "seconds", "times"),
    [
        *((ORDINARY_S, *each) for each in ((5.9, None), (6.0, 3.0), (9.0, 4.5))),
        (ORDINARY_S[:4], 100.0, None),  # no step is judged before five
        ([1.0] * 20 + [2.0] * 11, 6.0, 3.0),  # 9 steps of 1 s are left of the last twenty
    ],
)
def test_a_step_that_takes_the_factor_times_the_median_is_probed(before, seconds, times):
    ranks, step = after_steps(*before)
    assert ranks.note_step(step, seconds) == times


def test_steps_that_a_slow_rank_makes_long_do_not_change_the_median():
    ranks, step = after_steps(*ORDINARY_S)
    for later in range(step, step + 40):
        if ranks.note_step(later, 8.0):
            ranks.note_probe([("actor", 1)])
    assert ranks.note_step(step + 40, 8.0) == 4.0


def test_a_long_step_without_a_slow_rank_counts_as_ordinary():
    ranks, step = after_steps(2.0, 2.0, 2.0, 2.0, 2.0)
    for probe in range(5):
        assert ranks.note_step(step + 10 * probe, 8.0) == 8.0 / 2.0
        assert ranks.note_probe([]) == []
    assert ranks.note_step(step + 50, 25.0) == 25.0 / 5.0  # the median of five times 2 and five times 8


def test_a_slow_rank_is_named_once_while_it_stays_slow():
    ranks, step = after_steps(*ORDINARY_S)
    ranks.note_step(step, 8.0)
    assert ranks.note_probe([("actor", 1)]) == [("actor", 1)]
    ranks.note_step(step + 10, 8.0)
    assert ranks.note_probe([("actor", 1), ("critic", 0)]) == [("critic", 0)]


@pytest.mark.parametrize("between", [2.0, 8.0])
def test_a_rank_that_was_fast_again_is_named_again(between):
    ranks, step = after_steps(*ORDINARY_S)
    ranks.note_step(step, 8.0)
    ranks.note_probe([("actor", 1)])
    if ranks.note_step(step + 10, between):  # not for a step of ordinary duration
        ranks.note_probe([])
    ranks.note_step(step + 20, 8.0)
    assert ranks.note_probe([("actor", 1)]) == [("actor", 1)]


def test_a_repeated_step_is_not_probed_again():
    ranks, step = after_steps(*ORDINARY_S)
    assert ranks.note_step(step, 8.0)
    ranks.note_probe([])
    assert ranks.note_step(step - 1, 8.0) is None


def speeds_of(**groups):
    return {(name, rank): speed for name, speeds in groups.items() for rank, speed in enumerate(speeds)}


@pytest.mark.parametrize(
    ("speeds", "slow"),
    [
        ([10.0, 3.0], {1: 0.3}),  # of two ranks, the other one is the peer
        ([10.0, 3.4], {}),
        ([12.0, 2.0, 8.0], {1: 0.2}),  # median of 12 and 8
        ([1.0, 10.0, 2.0, 10.0], {0: 0.1, 2: 0.2}),  # two of four: the medians of their peers are 10
        ([2.0, 2.0, 2.0], {}),
        ([10.0, 0.0], {}),  # not measured
        ([10.0, 0.0, 2.0], {2: 0.2}),
        ([5.0], {}),
    ],
)
def test_ranks_far_below_the_median_of_their_peers_are_slow(speeds, slow):
    assert find_slow_ranks(speeds_of(actor=speeds), 3.0) == {("actor", rank): share for rank, share in slow.items()}


def test_ranks_of_another_group_are_not_peers():
    assert find_slow_ranks(speeds_of(actor=[100.0, 90.0], reward=[1.0, 1.0], critic=[2.0]), 3.0) == {}
