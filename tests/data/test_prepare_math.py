import pytest

from fixtures.row_files import SUFFIXES, rows_of, write_rows
from hybridflow.data import MATH_INSTRUCTION, prepare_math
from hybridflow.data.prepare.math import _boxed_answer
from hybridflow.errors import DataConfigError, DataError
from hybridflow.rewards import math_reward
from hybridflow.rewards.table import table_reward

HALF = {
    "problem": "What is half of 1?",
    "level": "Level 1",
    "type": "Prealgebra",
    "solution": r"First $\boxed{2}$ is wrong. It is $\boxed{\frac{1}{2}}$.",
}
SUM = {"problem": "What is 2 + 3?", "level": "Level 2", "type": "Algebra", "solution": r"Adding gives $\boxed 5$."}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_problems_become_prompts_with_the_boxed_answer(tmp_path, suffix):
    train = write_rows(tmp_path / f"train{suffix}", [HALF])
    test = write_rows(tmp_path / f"test{suffix}", [SUM])
    files = prepare_math(train, tmp_path / "out", test_file=test)
    assert rows_of(files.train_file) == [
        {
            "data_source": "math",
            "prompt": [{"role": "user", "content": f"What is half of 1? {MATH_INSTRUCTION}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": r"\frac{1}{2}"},
            "extra_info": {
                "split": "train",
                "index": 0,
                "answer": HALF["solution"],
                "question": HALF["problem"],
                "level": "Level 1",
                "type": "Prealgebra",
            },
        }
    ]
    assert rows_of(files.test_file)[0]["reward_model"]["ground_truth"] == "5"
    assert (files.num_train, files.num_test, files.dropped) == (1, 1, {})


def test_the_column_answer_is_the_ground_truth_where_it_has_a_value(tmp_path):
    rows = [
        {"problem": "a", "solution": r"\boxed{1}", "answer": "7", "subject": "Algebra", "level": 5},
        {"problem": "b", "solution": r"\boxed{2}", "answer": " ", "subject": "Geometry", "level": 3},
        {"problem": "c", "solution": None, "answer": "9", "subject": "Geometry", "level": 3},
    ]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    files = prepare_math(source, tmp_path / "out", test_size=1, instruction="")
    found = {row["prompt"][0]["content"]: row for path in (files.train_file, files.test_file) for row in rows_of(path)}
    truths = {text: row["reward_model"]["ground_truth"] for text, row in found.items()}
    assert truths == {"a": "7", "b": "2", "c": "9"}
    assert (found["a"]["extra_info"]["type"], found["a"]["extra_info"]["level"]) == ("Algebra", 5)
    number = write_rows(tmp_path / "number.jsonl", [{"problem": "a", "answer": 7}, {"problem": "b", "answer": 8}])
    files = prepare_math(number, tmp_path / "numbers", test_size=1)
    assert files.first_row["reward_model"]["ground_truth"] in ("7", "8")


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"$\boxed{5}$", "5"),
        (r"$\boxed{\{1, \frac{2}{3}\}}$ and $\boxed{\text{no", r"\{1, \frac{2}{3}\}"),
        (r"$x = \boxed 5$.", "5"),
        (r"so it is \boxed 5.", "5"),
        (r"\[\boxed \frac{1}{2}\]", r"\frac{1}{2}"),
        (r"\(\boxed\pi\)", r"\pi"),
        (r"${\boxed 2.5}$", "2.5"),
        (r"$\boxed  {x}$", "x"),
        (r"\fbox{12}", "12"),
        (r"$\fbox 12$", "12"),
        (r"\fbox{1} or \boxed{2}", "2"),
        (r"\boxed{1} or \fbox{2}", "2"),
        (r"\boxed{}", ""),
        (r"\boxed", ""),
        (r"\boxedup{3} and \framebox{4}", ""),
        ("five", ""),
    ],
)
def test_the_last_box_of_a_solution_is_its_answer(solution, answer):
    assert _boxed_answer(solution) == answer


@pytest.mark.parametrize("solution", [r"\boxed{" * 50_000, r"\boxed " * 50_000, r"\boxed 1" + "." * 50_000 + "x"])
def test_a_long_solution_is_read_in_linear_time(solution):
    _boxed_answer(solution)


@pytest.mark.parametrize("answer", [r"\frac{1}{2}", "5", "5.", r"\text{Evelyn}", "x^2 + 1", r"(-\infty, 2]"])
def test_a_correct_answer_has_the_score_1_by_the_default_reward(tmp_path, answer):
    row = {"problem": "Which?", "solution": rf"It is $\boxed{{{answer}}}$."}
    files = prepare_math(write_rows(tmp_path / "a.jsonl", [row, SUM]), tmp_path / "out", test_size=1)
    rows = [*rows_of(files.train_file), *rows_of(files.test_file)]
    made = next(row for row in rows if row["extra_info"]["question"] == "Which?")
    assert table_reward(made["data_source"], rf"So \boxed{{{answer}}}", made["reward_model"]["ground_truth"]) == 1.0
    assert table_reward(made["data_source"], r"So \boxed{17}", made["reward_model"]["ground_truth"]) == 0.0
    assert math_reward("math", "no answer", made["reward_model"]["ground_truth"]) == 0.0


def test_rows_that_are_dropped_are_counted_for_each_file(tmp_path):
    other = {**SUM, "problem": "What is 1 + 1?", "solution": r"\boxed{2}"}
    rows = [HALF, SUM, other, SUM, {**SUM, "solution": r"\boxed{6}"}, {**SUM, "problem": " "}, {**HALF, "solution": ""}]
    train = write_rows(tmp_path / "train.jsonl", rows)
    test = write_rows(tmp_path / "test.jsonl", [HALF, {**other, "solution": "two"}])
    files = prepare_math(train, tmp_path / "out", test_file=test)
    of_train, of_test = files.sources
    assert of_train.path == train
    assert of_train.dropped == {
        "repeats an earlier row": 1,
        "an earlier prompt with another answer": 1,
        "no prompt": 1,
        r"no answer and no \boxed{...} in the solution": 1,
        "the prompt is in the test set": 1,
    }
    assert of_test.dropped == {r"no answer and no \boxed{...} in the solution": 1}
    assert (of_train.num_read, of_train.num_kept, of_test.num_read, of_test.num_kept) == (7, 2, 2, 1)
    assert (len(rows_of(files.train_file)), len(rows_of(files.test_file))) == (2, 1)


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("a.jsonl", [], r"a.jsonl: the file has no rows"),
        ("a.jsonl", [{"problem": "a", "text": "b"}], r"line 1: 'solution' is missing; the row has problem, text"),
        ("a.parquet", [{"task": "a", "solution": "b"}], r"row 0: 'problem' is missing; the row has task, solution"),
        ("a.jsonl", [SUM, {**HALF, "problem": 3}], r"a.jsonl: line 2: 'problem' must be a text, got 3"),
        ("a.json", [SUM, {**HALF, "solution": ["b"]}], r"a.json: row 1: 'solution' must be a text, got \['b'\]"),
        ("a.json", [{**SUM, "answer": [5]}], r"row 0: 'answer' must be a text or a number, got \[5\]"),
        ("a.json", [SUM, "b"], r"a.json: row 1: is a str; expected an object"),
        ("a.jsonl", [{**SUM, "solution": "5"}], r"a.jsonl: all rows were dropped \(1: no answer and no \\boxed"),
        ("a.txt", [SUM], r"a.txt: the suffix '.txt' is invalid"),
    ],
)
def test_a_malformed_file_is_an_error_with_its_place(tmp_path, name, rows, message):
    with pytest.raises(DataError, match=message):
        prepare_math(write_rows(tmp_path / name, rows), tmp_path / "out", test_size=1)
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_missing_or_empty_is_an_error(tmp_path):
    with pytest.raises(DataConfigError, match=r"missing.csv: no such file"):
        prepare_math(tmp_path / "missing.csv", tmp_path / "out")
    for suffix in (".jsonl", ".csv"):
        (tmp_path / f"empty{suffix}").touch()
        with pytest.raises(DataError, match=rf"empty{suffix}: the file has no rows"):
            prepare_math(tmp_path / f"empty{suffix}", tmp_path / "out")


def test_a_test_file_with_all_training_problems_is_an_error(tmp_path):
    source = write_rows(tmp_path / "a.jsonl", [HALF, SUM])
    with pytest.raises(DataError, match=r"a.jsonl: each prompt is also in the test set; use a test file with other"):
        prepare_math(source, tmp_path / "out", test_file=source)
