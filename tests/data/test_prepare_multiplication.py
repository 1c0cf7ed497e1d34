import pyarrow.parquet as pq
import pytest

from hybridflow.data import generate_multiplication, prepare_multiplication
from hybridflow.errors import DataError


def test_factors_have_the_given_numbers_of_digits():
    train, test = generate_multiplication(train_size=100, test_size=20, digits_a=3, digits_b=1)
    assert all(100 <= problem.a <= 999 and 1 <= problem.b <= 9 for problem in train + test)
    assert all(problem.target == problem.a * problem.b for problem in train)


def test_train_and_test_share_no_pair_not_even_swapped():
    train, test = generate_multiplication(train_size=50, test_size=12, digits_a=1, digits_b=1)
    assert not {problem.group for problem in train} & {problem.group for problem in test}
    assert len(set(train)) == 50
    assert len({problem.group for problem in test}) == 12


def test_prepare_writes_prompt_and_product_as_text(tmp_path):
    files = prepare_multiplication(
        tmp_path, train_size=5, test_size=2, digits_a=2, digits_b=2, prompt_template="{a}*{b}="
    )
    for row in pq.read_table(files.train_file).to_pylist():
        a, b = row["prompt"][0]["content"].removesuffix("=").split("*")
        assert row["reward_model"] == {"style": "rule", "ground_truth": str(int(a) * int(b))}
        assert row["data_source"] == "multiplication"


@pytest.mark.parametrize(
    "options", [{"digits_a": 0}, {"digits_b": 31}, {"digits_a": 1, "digits_b": 1, "train_size": 99}]
)
def test_impossible_options_are_errors(options):
    with pytest.raises(DataError, match="digits_"):
        generate_multiplication(**{"train_size": 10, "test_size": 2, **options})
