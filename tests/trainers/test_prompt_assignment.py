"""The assignment of prompts to rollout engines: loads, shares of unequal engines, families of prompts."""

import numpy as np
import pytest

from hybridflow.trainers.prompt_assignment import assign_prompts, expected_tokens, prefix_families


def test_expected_tokens_count_prompt_and_response_of_each_sequence():
    assert expected_tokens(np.array([2, 3]), np.array([5.0, 1.5]), 4).tolist() == [28, 18]


def test_the_costliest_prompt_goes_first_to_the_least_loaded_engine():
    # 9 -> a, 7 -> b, 6 -> b (13 < 15), 4 -> a (13 < 17), 2 -> a (15, as b; a comes first), 1 -> b
    assert assign_prompts([4, 7, 9, 1, 6, 2], range(6), [1, 1]) == [[2, 0, 5], [1, 4, 3]]


def test_an_engine_of_three_times_the_capacity_gets_three_times_the_load():
    costs = [float(cost) for cost in range(1, 41)]
    small, large = assign_prompts(costs, range(40), [1, 3])
    assert sorted(small + large) == list(range(40))
    assert sum(costs[row] for row in large) / sum(costs[row] for row in small) == pytest.approx(3, rel=0.02)


def test_every_engine_gets_a_prompt():
    assert assign_prompts([5, 4, 3], range(3), [1, 1000, 1]) == [[2], [0], [1]]
    assert assign_prompts([100, 1, 1], [0, 0, 0], [1, 1, 1]) == [[0], [1], [2]]


def test_prompts_of_a_family_stay_together_while_loads_allow():
    costs, families = [1.0] * 64, [row % 16 // 2 for row in range(64)]  # 8 families of 8 prompts
    engines_of = [set() for _ in range(8)]
    for engine, rows in enumerate(assign_prompts(costs, families, [1, 1])):
        assert len(rows) == 32
        for row in rows:
            engines_of[families[row]].add(engine)
    assert [len(engines) for engines in engines_of] == [1] * 8
    assert assign_prompts([3, 2, 2], [0, 0, 1], [1, 1]) == [[0], [1, 2]]  # together: 5 and 2


def test_a_family_larger_than_a_quarter_of_a_load_is_assigned_by_prompt():
    costs = [float(cost) for cost in range(100, 200)]
    assert assign_prompts(costs, [0] * 100, [1, 1, 1, 1]) == assign_prompts(costs, range(100), [1, 1, 1, 1])


def test_prompts_with_a_common_prefix_of_half_their_length_are_a_family():
    prompts = [[1, 2, 3, 4], [5, 6], [1, 2, 8, 9], [1, 7, 7, 7], [5, 6]]
    first, second, third, fourth, fifth = prefix_families(prompts)
    assert first == third != fourth
    assert second == fifth
    assert len({first, second, fourth}) == 3
