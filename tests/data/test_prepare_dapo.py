import pytest

from fixtures.row_files import rows_of, write_rows
from hybridflow.data import prepare_dapo
from hybridflow.errors import DataConfigError, DataError
from hybridflow.rewards.table import ANSWERS, table_reward

ASK = "Solve the problem. The last line of your response should be of the form Answer: $Answer.\n\n"


def row(number: int, **other) -> dict:
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": f"{ASK}What is {number} + {number}?"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(2 * number), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"id-{number}"},
        **other,
    }


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_rows_keep_prompt_data_source_ability_and_index(tmp_path, suffix):
    train, test = write_rows(tmp_path / f"a{suffix}", [row(1)]), write_rows(tmp_path / f"b{suffix}", [row(2)])
    files = prepare_dapo(train, tmp_path / "out", test_file=test)
    assert rows_of(files.train_file) == [
        {
            "data_source": "math_dapo",
            "prompt": row(1)["prompt"],
            "ability": "MATH",
            "reward_model": {"style": "rule", "ground_truth": "2"},
            "extra_info": {"split": "train", "index": "id-1"},
        }
    ]
    assert rows_of(files.test_file)[0]["extra_info"] == {"split": "test", "index": "id-2"}


def test_each_problem_is_kept_once_and_its_copies_are_counted(tmp_path):
    source = write_rows(tmp_path / "a.parquet", [row(number) for _ in range(100) for number in range(5)])
    files = prepare_dapo(source, tmp_path / "out", test_size=2)
    assert (files.num_train, files.num_test, files.dropped) == (3, 2, {"repeats an earlier row": 495})
    (counts,) = files.sources
    assert (counts.num_read, counts.num_kept) == (500, 5)
    train, test = (
        {row["extra_info"]["index"] for row in rows_of(path)} for path in (files.train_file, files.test_file)
    )
    assert train | test == {f"id-{number}" for number in range(5)}
    assert not train & test


def test_a_parquet_file_is_read_in_parts_with_the_row_of_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("hybridflow.data.prepare.records.PARQUET_ROWS", 3)
    files = prepare_dapo(write_rows(tmp_path / "a.parquet", [row(n) for n in range(8)]), tmp_path / "out", test_size=1)
    assert files.sources[0].num_kept == 8
    source = write_rows(tmp_path / "b.parquet", [*(row(n) for n in range(7)), row(8, prompt=[])])
    assert prepare_dapo(source, tmp_path / "out", test_size=1).dropped == {"no prompt": 1}
    source = write_rows(tmp_path / "c.parquet", [*(row(n) for n in range(7)), row(8, data_source="")])
    with pytest.raises(DataError, match=r"c.parquet: row 7: 'data_source' is empty; it chooses the reward function"):
        prepare_dapo(source, tmp_path / "out", test_size=1)


def test_rows_that_are_dropped_are_counted_for_each_file(tmp_path):
    other_truth = row(1, reward_model={"ground_truth": "3", "style": "rule"})
    no_truth = row(4, reward_model={"ground_truth": None, "style": "rule"})
    train = write_rows(tmp_path / "a.jsonl", [row(1), other_truth, no_truth, row(5, prompt=""), row(2), row(3)])
    test = write_rows(tmp_path / "b.jsonl", [row(2), row(2)])
    files = prepare_dapo(train, tmp_path / "out", test_file=test)
    of_train, of_test = files.sources
    assert of_train.dropped == {
        "an earlier prompt with another answer": 1,
        "no answer": 1,
        "no prompt": 1,
        "the prompt is in the test set": 1,
    }
    assert of_test.dropped == {"repeats an earlier row": 1}
    assert (of_train.num_read, of_train.num_kept, len(rows_of(files.train_file))) == (6, 2, 2)
    assert (of_test.num_read, of_test.num_kept, len(rows_of(files.test_file))) == (2, 1, 1)


def test_a_correct_last_line_has_the_score_1_by_the_default_reward(tmp_path):
    files = prepare_dapo(write_rows(tmp_path / "a.jsonl", [row(17), row(3)]), tmp_path / "out", test_size=1)
    for made in [*rows_of(files.train_file), *rows_of(files.test_file)]:
        source, truth = made["data_source"], made["reward_model"]["ground_truth"]
        for text in (f"1 and 2.\n\nAnswer: {truth}", f"Answer: ${truth}$", rf"Answer: \boxed{{{truth}}}"):
            assert table_reward(source, text, truth) == 1.0
            assert ANSWERS[source](text) == truth
        assert table_reward(source, f"It is {truth}.\n\nAnswer: 99", truth) == 0.0
    assert ANSWERS["math_dapo"]("Answer: 1\nno, **Answer: 2**") == "2"
    assert ANSWERS["math_dapo"]("It is 3.\nAnswer:") is None
    assert ANSWERS["math_dapo"]("It is 3.") is None


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], r"a.json: the file has no rows"),
        (
            [{"prompt": "a", "answer": "b"}],
            r"row 0: 'reward_model.ground_truth' is missing; the row has prompt, answer",
        ),
        (
            [row(1), row(2, reward_model={"style": "rule"})],
            r"row 1: 'reward_model.ground_truth' is missing; the row has data_source, prompt, ability",
        ),
        ([{"prompt": "a", "reward_model": {"ground_truth": 1}}], r"'data_source' is missing; the row has prompt, rew"),
        ([row(1), row(2, prompt=7)], r"a.json: row 1: 'prompt' must be a text or a list of chat messages, got 7"),
        ([row(1, prompt=[{"content": "a"}])], r"row 0: message 0 of 'prompt' needs a role and a content"),
        (
            [row(1, reward_model={"ground_truth": [1]})],
            r"row 0: 'reward_model.ground_truth' must be a text or a number, got \[1\]",
        ),
        ([row(1, data_source=3)], r"row 0: 'data_source' must be a text, got 3"),
        ([row(1, extra_info="id-1")], r"row 0: 'extra_info' must be an object, got 'id-1'"),
        ([3], r"row 0: is a int; expected an object"),
    ],
)
def test_a_malformed_file_is_an_error_with_its_place(tmp_path, rows, message):
    with pytest.raises(DataError, match=message):
        prepare_dapo(write_rows(tmp_path / "a.json", rows), tmp_path / "out", test_size=1)
    assert not (tmp_path / "out").exists()


def test_a_missing_file_and_a_test_size_that_leaves_no_row_are_errors(tmp_path):
    with pytest.raises(DataConfigError, match=r"missing.parquet: no such file"):
        prepare_dapo(tmp_path / "missing.parquet", tmp_path / "out")
    source = write_rows(tmp_path / "a.jsonl", [row(1)])
    with pytest.raises(DataConfigError, match=r"test_size=100 is invalid for 1 rows; use a test file"):
        prepare_dapo(source, tmp_path / "out")
