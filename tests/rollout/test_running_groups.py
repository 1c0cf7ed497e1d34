"""Groups of several batches in one engine, read in parts as they finish."""

import itertools

import pytest

from hybridflow.errors import RolloutError
from hybridflow.rollout import Request, RunningGroups, SamplingParams, generate
from hybridflow.rollout.running_groups import longest_first

SAMPLING = SamplingParams(56, stop_token_ids=tuple(range(4)))
REPORTED_EVERY = 8  # steps: an engine may notice later that a sequence has stopped


def batch_of(step: int, first_id: int = 0, size: int = 5) -> list[Request]:
    return [Request(first_id + i, [8, 9, 10 + i], SAMPLING, 2, (0, step, i)) for i in range(size)]


@pytest.fixture
def engine(build_rollout, tiny_model):
    return build_rollout(tiny_model())


def ids_of(groups) -> list[list[int]]:
    """Return the tokens of the groups of a batch, in the order of its requests."""
    return [each.token_ids for _, group in sorted(groups, key=lambda group: group[0]) for each in group]


def require_ordered(groups) -> None:
    """Require that groups come as they finish, as far as the engine notices."""
    lengths = [max(len(completion.token_ids) for completion in group) for _, group in groups]
    assert all(earlier <= later + REPORTED_EVERY for earlier, later in itertools.combinations(lengths, 2))
    assert max(lengths) >= min(lengths) + 2 * REPORTED_EVERY


def test_batches_run_side_by_side_and_are_read_in_parts(engine):
    first, second = ([c.token_ids for c in generate(engine, batch_of(step))] for step in (0, 1))
    groups = RunningGroups(engine)
    groups.begin(0, batch_of(0))
    part = groups.next(0, 1)
    groups.begin(1, batch_of(1, first_id=5))
    of_second = groups.next(1, 5)
    assert 1 not in groups
    assert (groups.num_left(0), groups.num_left(1)) == (4, 0)
    of_first = part + groups.next(0, 2) + groups.next(0, 2)
    assert (ids_of(of_first), ids_of(of_second)) == (first, second)
    require_ordered(of_first)
    assert not groups
    assert not engine.has_unfinished()


def test_the_longest_limit_then_the_longest_prompt_starts_first():
    requests = [
        Request(0, [8, 9], SAMPLING),
        Request(1, [8], SAMPLING),
        Request(2, [8], SamplingParams(60)),
        Request(3, [8, 9, 10], SAMPLING),
    ]
    assert [request.request_id for request in sorted(requests, key=longest_first)] == [2, 3, 0, 1]


def test_more_groups_than_a_batch_has_and_invalid_batches_are_errors(engine):
    groups = RunningGroups(engine)
    groups.begin(0, batch_of(0))
    groups.next(0, 3)
    with pytest.raises(RolloutError, match=r"batch 0 has 2 groups left, fewer than 3\."):
        groups.next(0, 3)
    with pytest.raises(RolloutError, match=r"batch 1 has 0 groups left, fewer than 1\."):
        groups.next(1, 1)
    with pytest.raises(RolloutError, match="request 9 has an empty prompt"):
        groups.begin(1, [*batch_of(1, first_id=5, size=3), Request(9, [], SAMPLING)])
    with pytest.raises(RolloutError, match="batch 0 has begun already"):
        groups.begin(0, batch_of(0, first_id=20))
    assert 1 not in groups
    assert len(groups.next(0, 2)) == 2
    assert not engine.has_unfinished()


def test_an_invalid_batch_drops_no_completion_of_another_batch(engine):
    steps = itertools.count()

    def between_steps():
        assert next(steps) < 500, "the batch never ends"
        with pytest.raises(RolloutError, match="request 99 has an empty prompt"):  # which the engine aborts
            groups.begin(1, [Request(98, [8], SamplingParams(60)), Request(99, [], SAMPLING)])

    expected = [c.token_ids for c in generate(engine, batch_of(0))]
    groups = RunningGroups(engine, between_steps)
    groups.begin(0, batch_of(0))
    assert ids_of(groups.next(0, 5)) == expected
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
