"""Tables of questions and answers: every row is kept, or dropped for a reason that is counted."""

import pytest

from fixtures.row_files import rows_of, write_rows
from hybridflow.data import prepare_table
from hybridflow.errors import DataConfigError, DataError

ROWS = [{"question": f"What is {n} + {n}?", "result": str(2 * n), "level": n % 3} for n in range(12)]
COLUMNS = {"prompt": "question", "answer": "result", "data_source": "sums"}


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_rows_become_prompts_with_ground_truths_and_extra_info(tmp_path, suffix):
    source = write_rows(tmp_path / f"rows{suffix}", ROWS)
    files = prepare_table(source, tmp_path / "out", test_size=3, instruction="Be brief.", system="You add.", **COLUMNS)
    train, test = rows_of(files.train_file), rows_of(files.test_file)
    assert (files.num_train, files.num_test, files.dropped) == (len(train), len(test), {}) == (9, 3, {})
    asked = [row["prompt"][1]["content"] for row in (*train, *test)]
    assert sorted(asked) == sorted(f"{row['question']} Be brief." for row in ROWS)
    number = int(train[0]["prompt"][1]["content"].split()[2])
    assert train[0] == {
        "data_source": "sums",
        "prompt": [{"role": "system", "content": "You add."}, {"role": "user", "content": asked[0]}],
        "ability": "",
        "reward_model": {"style": "rule", "ground_truth": str(2 * number)},
        "extra_info": {"split": "train", "index": 0, "level": str(number % 3) if suffix == ".csv" else number % 3},
    }


def test_the_test_rows_depend_on_the_seed_alone(tmp_path):
    source = write_rows(tmp_path / "rows.jsonl", ROWS)
    tests = [
        rows_of(prepare_table(source, tmp_path / str(i), test_size=4, seed=seed, **COLUMNS).test_file)
        for i, seed in enumerate([0, 0, 1])
    ]
    assert tests[0] == tests[1] != tests[2]


def test_rows_that_are_dropped_are_counted_by_reason(tmp_path):
    more = [
        {"question": "", "result": "1", "level": 0},
        {"question": "  ", "result": "1", "level": 0},
        {"question": "Why?", "result": None, "level": 0},
        ROWS[0],
        ROWS[1] | {"result": "7"},
    ]
    train, test = write_rows(tmp_path / "train.jsonl", [*ROWS, *more]), write_rows(tmp_path / "test.jsonl", ROWS[4:6])
    files = prepare_table(train, tmp_path / "out", test_file=test, **COLUMNS)
    assert files.dropped == {
        "no prompt": 2,
        "no answer": 1,
        "repeats an earlier row": 1,
        "an earlier prompt with another answer": 1,
        "the prompt is in the test set": 2,
    }
    assert (files.num_train, files.num_test) == (10, 2)
    truths = [row["reward_model"]["ground_truth"] for row in rows_of(files.train_file)]
    assert truths == [row["result"] for row in ROWS if row not in ROWS[4:6]]


def test_nested_columns_and_messages_are_read(tmp_path):
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 1?"}]
    rows = [
        {"prompt": messages, "reward_model": {"ground_truth": 2}},
        {"prompt": "2 + 2?", "reward_model": {"ground_truth": 4}},
    ]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    options = {"answer": "reward_model.ground_truth", "data_source": "sums", "test_size": 1, "instruction": "Now."}
    files = prepare_table(source, tmp_path / "out", **options)
    found = {row["prompt"][-1]["content"]: row for path in (files.train_file, files.test_file) for row in rows_of(path)}
    assert {text: row["reward_model"]["ground_truth"] for text, row in found.items()} == {
        "1 + 1? Now.": 2,
        "2 + 2? Now.": 4,
    }
    assert found["1 + 1? Now."]["prompt"][0] == messages[0]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "x", r"the suffix '.txt' is invalid: expected .jsonl, .json, .csv, .parquet"),
        ("a.jsonl", '{"question": "a"}', r"a.jsonl: line 1: 'result' is missing; the row has question"),
        (
            "a.jsonl",
            '{"question": 3, "result": "a"}',
            r"line 1: 'question' must be a text or a list of chat messages, got 3",
        ),
        ("a.jsonl", '{"question": "", "result": "a"}', r"a.jsonl: all rows were dropped \(1: no prompt\)"),
        ("a.jsonl", "\n", r"a.jsonl: the file has no rows"),
        ("a.json", '{"question": "a"}', r"holds a dict; expected a list of objects"),
        ("a.json", "[1]", r"row 0: is a int; expected an object"),
        ("a.json", "[", r"is not JSON"),
        ("a.csv", "question,result\na,b,c\n", r"row 0: has more fields; the first line has 2"),
        ("a.csv", "question,result\na\n", r"row 0: has 1 fields; the first line has 2"),
        ("a.csv", 'question,result\n"a', r"is not a CSV file in UTF-8"),
        ("a.parquet", "no", r"a.parquet: not a readable parquet file"),
    ],
)
def test_a_malformed_file_is_an_error_with_its_place(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        prepare_table(tmp_path / name, tmp_path / "out", **COLUMNS)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", [0, 12, -1])
def test_a_test_set_that_leaves_no_rows_is_an_error(tmp_path, size):
    with pytest.raises(DataConfigError, match=rf"test_size={size} is invalid for 12 rows; use 1 to 11 .--test-size"):
        prepare_table(write_rows(tmp_path / "rows.csv", ROWS), tmp_path / "out", test_size=size, **COLUMNS)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(DataConfigError, match="no such file"):
        prepare_table(tmp_path / "missing.csv", tmp_path / "out", **COLUMNS)
