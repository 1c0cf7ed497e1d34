from collections import Counter
from fractions import Fraction

import pyarrow.parquet as pq
import pytest

from hybridflow.data import CountdownProblem, countdown_prompt, generate_countdown, prepare_countdown
from hybridflow.errors import DataError
from hybridflow.rewards import countdown_reward, evaluate_arithmetic


def test_solution_reaches_the_target_with_each_number_once():
    train, test = generate_countdown(train_size=300, test_size=50, num_operands=(2, 3, 4), max_number=30, seed=1)
    assert (len(train), len(test)) == (300, 50)
    for problem in train + test:
        value, used = evaluate_arithmetic(problem.solution)
        assert value == problem.target
        assert 1 <= problem.target <= 999
        assert sorted(used) == sorted(problem.numbers)
    assert {len(problem.numbers) for problem in train} == {2, 3, 4}
    assert {sign for problem in train for sign in "+-*/" if sign in problem.solution} == set("+-*/")


def test_train_and_test_share_no_multiset_of_numbers():
    train, test = generate_countdown(train_size=400, test_size=100, num_operands=3, max_number=12, operators="+-")
    assert not {problem.group for problem in train} & {problem.group for problem in test}


def test_problems_are_unique_and_test_problems_up_to_their_order():
    train, test = generate_countdown(train_size=500, test_size=150, num_operands=2, max_number=25)
    assert len(set(train)) == 500
    assert len({(problem.group, problem.target) for problem in test}) == 150


def test_test_set_takes_at_most_half_of_the_groups():
    train, test = generate_countdown(train_size=30, test_size=20, num_operands=2, max_number=5)
    # 15 multisets of two numbers from 1 to 5; at most 7 of them go to the test set.
    assert len({problem.group for problem in test}) <= 7
    assert len(test) == 20
    assert len(train) == 30


def test_sign_patterns_are_drawn_uniformly():
    # Of the 8 sign patterns of three numbers, 4 give a positive sum (each pattern or its opposite) unless one is zero.
    train, _ = generate_countdown(train_size=4000, test_size=10, num_operands=3, max_number=99, operators="+-", seed=3)
    num_minus = Counter(problem.solution.count("-") for problem in train)
    assert abs(num_minus[0] / 4000 - 0.25) < 0.03
    assert num_minus[0] + num_minus[1] + num_minus[2] == 4000
    assert all(problem.target > 0 for problem in train)


def test_single_operators_give_sums_and_differences():
    adding, _ = generate_countdown(train_size=20, test_size=5, num_operands=3, operators="+")
    assert all(sum(problem.numbers) == problem.target for problem in adding)
    subtracting, _ = generate_countdown(train_size=20, test_size=5, num_operands=3, operators="-")
    assert all(problem.solution.count("-") == 2 for problem in subtracting)


def test_divisions_leave_no_remainder():
    train, _ = generate_countdown(train_size=40, test_size=5, num_operands=2, max_number=60, operators="/")
    for problem in train:
        dividend, divisor = (int(text) for text in problem.solution.split(" / "))
        assert Fraction(dividend, divisor) == problem.target


def test_test_set_depends_on_the_seed_and_not_on_the_training_size():
    first = generate_countdown(train_size=20, test_size=10, seed=5)
    assert first == generate_countdown(train_size=20, test_size=10, seed=5)
    assert first != generate_countdown(train_size=20, test_size=10, seed=6)
    longer_train, same_test = generate_countdown(train_size=40, test_size=10, seed=5)
    assert same_test == first[1]
    assert longer_train[:20] == first[0]


def test_prepare_writes_rows_that_the_reward_function_scores(tmp_path):
    files = prepare_countdown(tmp_path / "new" / "dir", train_size=8, test_size=4, max_number=20)
    assert (files.num_train, files.num_test) == (8, 4)
    rows = pq.read_table(files.train_file).to_pylist()
    assert [row["extra_info"]["index"] for row in rows] == list(range(8))
    assert pq.read_table(files.test_file).to_pylist()[0]["extra_info"]["split"] == "test"
    for row in rows:
        assert list(row) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
        assert row["data_source"] == "countdown"
        assert row["ability"] == "math"
        assert row["reward_model"]["style"] == "rule"
        truth = row["reward_model"]["ground_truth"]
        assert row["prompt"][0]["role"] == "user"
        assert f"[{', '.join(map(str, truth['numbers']))}]" in row["prompt"][0]["content"]
        answer = f"<answer>{row['extra_info']['answer']}</answer>"
        assert countdown_reward("countdown", answer, truth, {}) == 1.0
    assert sorted(path.name for path in (tmp_path / "new" / "dir").iterdir()) == ["test.parquet", "train.parquet"]


def test_prompt_template_is_filled_in():
    problem = CountdownProblem(numbers=(3, 14, 5), target=12, solution="3 + 14 - 5")
    assert countdown_prompt(problem, "+-", "{numbers}={target}:", number_separator=" ") == "3 14 5=12:"
    assert countdown_prompt(problem, "+-", "{x} {operators} {numbers} {target}") == "{x} + - 3, 14, 5 12"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_operands": 1}, "num_operands=(1,)"),
        ({"num_operands": ()}, "num_operands=()"),
        ({"num_operands": (3, 11)}, "from 2 to 10"),
        ({"max_number": 0}, "max_number=0"),
        ({"max_target": 0}, "max_target=0"),
        ({"operators": ""}, "operators=''"),
        ({"operators": "+^"}, r"operators='+^'"),
        ({"train_size": 0}, "train_size=0"),
        ({"test_size": 0}, "test_size=0"),
        ({"num_operands": 2, "max_number": 3, "operators": "+"}, "train_size=10: only"),
        ({"num_operands": 2, "max_number": 1, "operators": "+"}, "raise max_number"),
    ],
)
def test_options_out_of_range_are_errors(options, message):
    with pytest.raises(DataError) as error:
        generate_countdown(**{"train_size": 10, "test_size": 2, **options})
    assert message in str(error.value)


def test_template_without_the_target_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"lacks \{target\}; valid names are \{numbers\}, \{target\}, \{operators\}"):
        prepare_countdown(tmp_path, train_size=2, test_size=1, prompt_template="{numbers}")
