"""`hybridflow prepare countdown` and `multiplication`: generated problems, split into training and test rows."""

import argparse
from collections import Counter
from fractions import Fraction

import pytest

from fixtures.row_files import rows_of
from hybridflow.cli import prepare
from hybridflow.data import (
    CountdownProblem,
    countdown_prompt,
    generate_countdown,
    generate_multiplication,
    prepare_countdown,
    prepare_multiplication,
)
from hybridflow.environments.rewards import countdown_reward, evaluate_arithmetic
from hybridflow.errors import DataError


def test_solution_reaches_the_target_with_each_number_once():
    train, test = generate_countdown(train_size=300, test_size=50, num_operands=(2, 3, 4), max_number=30, seed=1)
    assert (len(train), len(test), len(set(train))) == (300, 50, 300)
    for problem in train + test:
        value, used = evaluate_arithmetic(problem.solution)
        assert value == problem.target
        assert 1 <= problem.target <= 999
        assert sorted(used) == sorted(problem.numbers)
    assert {len(problem.numbers) for problem in train} == {2, 3, 4}
    assert {sign for problem in train for sign in "+-*/" if sign in problem.solution} == set("+-*/")


@pytest.mark.parametrize(
    ("generate", "options"),
    [
        (
            generate_countdown,
            {"train_size": 400, "test_size": 100, "num_operands": 3, "max_number": 12, "operators": "+-"},
        ),
        (generate_countdown, {"train_size": 30, "test_size": 20, "num_operands": 2, "max_number": 5}),
        (generate_multiplication, {"train_size": 50, "test_size": 12, "digits_a": 1, "digits_b": 1}),
    ],
)
def test_train_and_test_share_no_group_and_are_unique(generate, options):
    train, test = generate(**options)
    groups = {problem.group for problem in test}
    assert not {problem.group for problem in train} & groups
    assert (len(set(train)), len(test)) == (options["train_size"], options["test_size"])
    assert len({(problem.group, problem.target) for problem in test}) == len(test)
    if options["train_size"] == 30:  # 15 multisets of two numbers from 1 to 5; at most 7 of them go to the test set
        assert len(groups) <= 7


def test_sign_patterns_are_drawn_uniformly():
    # Of the 8 sign patterns of three numbers, 4 give a positive sum (each pattern or its opposite) unless one is zero.
    train, _ = generate_countdown(train_size=4000, test_size=10, num_operands=3, max_number=99, operators="+-", seed=3)
    num_minus = Counter(problem.solution.count("-") for problem in train)
    assert abs(num_minus[0] / 4000 - 0.25) < 0.03
    assert num_minus[0] + num_minus[1] + num_minus[2] == 4000
    assert all(problem.target > 0 for problem in train)


def test_single_operators_give_sums_differences_and_whole_quotients():
    adding, _ = generate_countdown(train_size=20, test_size=5, num_operands=3, operators="+")
    assert all(sum(problem.numbers) == problem.target for problem in adding)
    subtracting, _ = generate_countdown(train_size=20, test_size=5, num_operands=3, operators="-")
    assert all(problem.solution.count("-") == 2 for problem in subtracting)
    dividing, _ = generate_countdown(train_size=40, test_size=5, num_operands=2, max_number=60, operators="/")
    for problem in dividing:
        dividend, divisor = (int(text) for text in problem.solution.split(" / "))
        assert Fraction(dividend, divisor) == problem.target


def test_test_set_depends_on_the_seed_and_not_on_the_training_size():
    first = generate_countdown(train_size=20, test_size=10, seed=5)
    assert first == generate_countdown(train_size=20, test_size=10, seed=5)
    assert first != generate_countdown(train_size=20, test_size=10, seed=6)
    longer_train, same_test = generate_countdown(train_size=40, test_size=10, seed=5)
    assert (longer_train[:20], same_test) == first


def test_prepare_writes_rows_that_the_reward_function_scores(tmp_path):
    files = prepare_countdown(tmp_path / "new" / "dir", train_size=8, test_size=4, max_number=20)
    assert (files.num_train, files.num_test) == (8, 4)
    rows = rows_of(files.train_file)
    assert [row["extra_info"]["index"] for row in rows] == list(range(8))
    assert rows_of(files.test_file)[0]["extra_info"]["split"] == "test"
    for row in rows:
        truth = row["reward_model"]["ground_truth"]
        assert (row["data_source"], row["ability"], row["reward_model"]["style"]) == ("countdown", "math", "rule")
        assert row["prompt"][0]["role"] == "user"
        assert f"[{', '.join(map(str, truth['numbers']))}]" in row["prompt"][0]["content"]
        answer = f"<answer>{row['extra_info']['answer']}</answer>"
        assert countdown_reward("countdown", answer, truth, {}) == 1.0


def test_factors_have_the_given_numbers_of_digits_and_products_are_texts(tmp_path):
    train, test = generate_multiplication(train_size=100, test_size=20, digits_a=3, digits_b=1)
    assert all(100 <= problem.a <= 999 and 1 <= problem.b <= 9 for problem in train + test)
    options = {"digits_a": 2, "digits_b": 2, "prompt_template": "{a}*{b}="}
    for row in rows_of(prepare_multiplication(tmp_path, train_size=5, test_size=2, **options).train_file):
        a, b = row["prompt"][0]["content"].removesuffix("=").split("*")
        assert row["reward_model"] == {"style": "rule", "ground_truth": str(int(a) * int(b))}
        assert row["data_source"] == "multiplication"


def test_the_commands_write_files_with_the_options(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    prepare.add_arguments(parser)
    sizes = f"--train-size 7 --test-size 3 --output-dir {tmp_path / 'out'}"
    options = "--num-operands 3 --max-number 20 --operators +- --prompt-template {numbers}={target}: --seed 4"
    assert (
        prepare.run(parser.parse_args(["countdown", *sizes.split(), *options.split(), "--number-separator", " "])) == 0
    )
    row = rows_of(tmp_path / "out" / "train.parquet")[0]
    output, truth = capsys.readouterr().out, row["reward_model"]["ground_truth"]
    assert f"wrote 7 rows to {tmp_path / 'out' / 'train.parquet'}" in output
    assert f"the first prompt: {row['prompt'][0]['content']}\n" in output
    assert row["prompt"][0]["content"] == f"{' '.join(map(str, truth['numbers']))}={truth['target']}:"
    digits = "--digits-a 2 --digits-b 1"
    assert prepare.run(parser.parse_args(["multiplication", *sizes.split(), *digits.split()])) == 0
    assert len(rows_of(tmp_path / "out" / "test.parquet")) == 3


def test_prompt_template_is_filled_in_and_needs_the_target(tmp_path):
    problem = CountdownProblem(numbers=(3, 14, 5), target=12, solution="3 + 14 - 5")
    assert countdown_prompt(problem, "+-", "{numbers}={target}:", number_separator=" ") == "3 14 5=12:"
    assert countdown_prompt(problem, "+-", "{x} {operators} {numbers} {target}") == "{x} + - 3, 14, 5 12"
    with pytest.raises(DataError, match=r"lacks \{target\}; valid names are \{numbers\}, \{target\}, \{operators\}"):
        prepare_countdown(tmp_path, train_size=2, test_size=1, prompt_template="{numbers}")


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
        ({"digits_a": 0}, "digits_a"),
        ({"digits_b": 31}, "digits_b"),
        ({"digits_a": 1, "digits_b": 1, "train_size": 99}, "digits_"),
    ],
)
def test_options_out_of_range_are_errors(options, message):
    generate = generate_multiplication if "digits_" in message else generate_countdown
    with pytest.raises(DataError) as error:
        generate(**{"train_size": 10, "test_size": 2, **options})
    assert message in str(error.value)
