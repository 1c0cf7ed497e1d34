"""Groups of several batches in one engine, read in parts as they finish."""

import itertools

import pytest

from hybridflow.errors import RolloutError
from hybridflow.rollout import Request, RunningGroups, SamplingParams, generate

SAMPLING = SamplingParams(56, stop_token_ids=tuple(range(4)))
REPORTED_EVERY = 8  # steps: an engine may notice later that a sequence has stopped


def batch_of(step: int, first_id: int = 0, size: int = 5) -> list[Request]:
    return [Request(first_id + i, [8, 9, 10 + i], SAMPLING, 2, (0, step, i)) for i in range(size)]


@pytest.fixture
def engine(build_rollout, tiny_model):
    return build_rollout(tiny_model())


def longest(group) -> int:
    return max(len(completion.token_ids) for completion in group[1])


def test_parts_hold_the_groups_in_the_order_in_which_they_finish(engine):
    expected = generate(engine, batch_of(0))
    groups = RunningGroups(engine)
    groups.begin("a", batch_of(0))
    parts = [groups.next("a", 2), groups.next("a", 2), groups.next("a", 1)]
    found = [group for part in parts for group in part]
    assert not groups
    assert not engine.has_unfinished()
    lengths = [longest(group) for group in found]
    assert max(lengths) >= min(lengths) + 2 * REPORTED_EVERY
    assert all(earlier <= later + REPORTED_EVERY for earlier, later in itertools.combinations(lengths, 2))
    by_index = [each for _, group in sorted(found, key=lambda group: group[0]) for each in group]
    assert [each.token_ids for each in by_index] == [each.token_ids for each in expected]


def test_batches_run_side_by_side_and_are_read_in_any_order(engine):
    first, second = generate(engine, batch_of(0)), generate(engine, batch_of(1))
    groups = RunningGroups(engine)
    groups.begin(0, batch_of(0))
    part = groups.next(0, 1)
    groups.begin(1, batch_of(1, first_id=5))
    of_second = groups.next(1, 5)
    of_first = part + groups.next(0, 4)
    for found, expected in ((of_first, first), (of_second, second)):
        assert [each.token_ids for _, group in sorted(found) for each in group] == [e.token_ids for e in expected]


class Submitted:
    """An engine that only records the order of submission."""

    def __init__(self) -> None:
        self.order: list[int] = []

    def submit(self, request: Request) -> None:
        self.order.append(request.request_id)


def test_the_longest_limit_then_the_longest_expected_response_starts_first():
    engine, long = Submitted(), SamplingParams(60)
    requests = [
        Request(0, [8, 9], SAMPLING, expected_length=3.0),
        Request(1, [8], SAMPLING, expected_length=30.0),
        Request(2, [8], long),
        Request(3, [8, 9, 10], SAMPLING, expected_length=3.0),
    ]
    RunningGroups(engine).begin("", requests)  # pyright: ignore[reportArgumentType]
    assert engine.order == [2, 1, 3, 0]


def test_the_last_waiting_groups_of_a_batch_are_given_up(build_rollout, tiny_model):
    engine = build_rollout(tiny_model(), max_running_sequences=4)  # two groups
    expected = generate(engine, batch_of(0))
    groups = RunningGroups(engine)
    groups.begin("a", batch_of(0))
    groups.begin("b", batch_of(1, first_id=5))
    groups.step()
    assert groups.give_waiting("a", 0.5) == [3, 4]
    assert groups.give_waiting("a", 0.25) == [2]
    assert groups.give_waiting("a", 1.0) == []
    found = sorted(groups.next("a", 5))
    for index, group in found:
        if index < 2:
            assert [each.token_ids for each in group] == [e.token_ids for e in expected[2 * index : 2 * index + 2]]
        else:
            assert [(each.index, each.token_ids, each.finish_reason) for each in group] == [
                (0, [], "abort"),
                (1, [], "abort"),
            ]
    assert all(each.token_ids for _, group in groups.next("b", 5) for each in group)
    assert not engine.has_unfinished()


def test_more_groups_than_a_batch_has_are_an_error(engine):
    groups = RunningGroups(engine)
    groups.begin(0, batch_of(0))
    groups.next(0, 3)
    with pytest.raises(RolloutError, match=r"batch 0 has 2 groups left, fewer than 3\."):
        groups.next(0, 3)
    with pytest.raises(RolloutError, match=r"batch 1 has 0 groups left, fewer than 1\."):
        groups.next(1, 1)
    assert len(groups.next(0, 2)) == 2


def test_an_invalid_request_leaves_other_batches_running(engine):
    groups = RunningGroups(engine)
    groups.begin(0, batch_of(0))
    with pytest.raises(RolloutError, match="request 9 has an empty prompt"):
        groups.begin(1, [*batch_of(1, first_id=5, size=3), Request(9, [], SAMPLING)])
    with pytest.raises(RolloutError, match="batch 0 has begun already"):
        groups.begin(0, batch_of(0, first_id=20))
    assert 1 not in groups
    assert len(groups.next(0, 5)) == 5
    assert not engine.has_unfinished()


def test_an_invalid_batch_drops_no_completion_of_another_batch(engine):
    steps = itertools.count()

    def between_steps():
        assert next(steps) < 500, "the batch never ends"
        with pytest.raises(RolloutError, match="request 99 has an empty prompt"):  # which the engine aborts
            groups.begin(1, [Request(98, [8], SamplingParams(60)), Request(99, [], SAMPLING)])

    expected = generate(engine, batch_of(0))
    groups = RunningGroups(engine, between_steps)
    groups.begin(0, batch_of(0))
    done = sorted(groups.next(0, 5), key=lambda group: group[0])
    assert [each.token_ids for _, group in done for each in group] == [each.token_ids for each in expected]
    assert not engine.has_unfinished()


def test_an_error_of_the_engine_ends_all_batches(engine, monkeypatch):
    groups = RunningGroups(engine)
    groups.begin(0, batch_of(0))
    groups.begin(1, batch_of(1, first_id=5))
    groups.next(0, 1)
    monkeypatch.setattr(engine, "step", lambda: (_ for _ in ()).throw(RolloutError("out of memory")))
    with pytest.raises(RolloutError, match="out of memory"):
        groups.next(0, 4)
    assert not groups
    assert not engine.has_unfinished()


def test_groups_of_any_batch_come_in_the_order_in_which_they_finish(engine):
    alone = {batch: generate(engine, batch_of(batch)) for batch in (0, 1)}
    groups = RunningGroups(engine)
    groups.begin(0, batch_of(0))
    groups.begin(1, batch_of(1, first_id=5))
    found = groups.next_of_any(4) + groups.next_of_any(6)
    assert not groups
    assert not engine.has_unfinished()
    assert sorted((batch, index) for batch, (index, _) in found) == [(b, i) for b in (0, 1) for i in range(5)]
    assert [batch for batch, _ in found] != sorted(batch for batch, _ in found), "batches did not mix"
    lengths = [longest(group) for _, group in found]
    assert all(earlier <= later + REPORTED_EVERY for earlier, later in itertools.combinations(lengths, 2))
    for batch, (index, completions) in found:
        expected = alone[batch][2 * index : 2 * index + 2]
        assert [each.token_ids for each in completions] == [each.token_ids for each in expected]


def test_a_later_batch_is_ready_while_a_long_group_of_an_earlier_one_runs(engine):
    long = [Request(9, [8, 9, 10], SamplingParams(60), 1, (0, 7, 0))]  # no stop tokens
    short = [Request(i, [8, 9, 10 + i], SamplingParams(20), 2, (0, 0, i)) for i in range(5)]
    groups = RunningGroups(engine)
    groups.begin("long", long)
    groups.begin("short", short)
    assert [batch for batch, _ in groups.next_of_any(5)] == ["short"] * 5
    assert "long" in groups
    assert "short" not in groups
    ((batch, (index, (completion,))),) = groups.next_of_any(1)
    assert (batch, index, len(completion.token_ids)) == ("long", 0, 60)
    assert not groups


def test_more_groups_than_all_batches_have_are_an_error(engine):
    groups = RunningGroups(engine)
    groups.begin(0, batch_of(0))
    groups.begin(1, batch_of(1, first_id=5))
    groups.next_of_any(3)
    with pytest.raises(RolloutError, match=r"the batches that have begun have 7 groups left, fewer than 8\."):
        groups.next_of_any(8)
    assert len(groups.next_of_any(7)) == 7
