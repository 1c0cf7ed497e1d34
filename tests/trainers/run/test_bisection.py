"""The searches of `hybridflow bisect`: the first lost point, and the smallest removal that keeps the metric."""

import math

from hypothesis import given
from hypothesis import strategies as st

from hybridflow.trainers.run.bisection import first_lost, smallest_removal


@given(st.data(), st.lists(st.integers(0, 999), min_size=2, max_size=40, unique=True).map(sorted))
def test_the_first_lost_point_is_found_in_log2_of_their_number(data, points):
    place, evaluated = data.draw(st.integers(1, len(points) - 1)), []

    def is_lost(point):
        evaluated.append(point)
        return point >= points[place]

    assert first_lost(is_lost, points) == (points[place - 1], points[place])
    assert len(evaluated) <= math.ceil(math.log2(len(points) - 1))
    assert {points[0], points[-1]}.isdisjoint(evaluated)


@given(st.data(), st.integers(1, 24), st.integers(0, 600))
def test_the_smallest_removal_has_the_culprits_and_nothing_else(data, num_items, most):
    """With too few evaluations it still has the culprits, and does not say that it is the smallest."""
    items = data.draw(st.permutations(range(num_items)))
    culprits, seen = data.draw(st.sets(st.sampled_from(items), min_size=1)), []

    def keeps(some):
        seen.append(tuple(some))
        return culprits <= set(some)

    removed, is_smallest = smallest_removal(keeps, items, most)
    assert culprits <= set(removed) <= set(items)
    assert not is_smallest or set(removed) == culprits
    assert is_smallest or len(seen) == most
    assert len(set(seen)) == len(seen) <= most


def test_one_culprit_among_many_is_found_in_a_few_evaluations():
    evaluated = []
    assert smallest_removal(lambda some: bool(evaluated.append(some)) or 77 in some, range(512), 32) == ([77], True)
    assert len(evaluated) <= 18
