import pyarrow.parquet as pq
import pytest

from hybridflow.data import prompt_row, write_prompt_file, write_sft_file
from hybridflow.data.prepare.prompt_file import write_splits
from hybridflow.errors import DataError


def test_prompt_text_becomes_one_user_message():
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    plain = prompt_row(data_source="x", prompt="hi", ground_truth="1", split="train", index=0)
    assert plain["prompt"] == [{"role": "user", "content": "hi"}]
    assert prompt_row(data_source="x", prompt=messages, ground_truth="1", split="train", index=0)["prompt"] == messages


def test_sft_files_hold_messages_and_a_response(tmp_path):
    path = write_sft_file(tmp_path / "sft.parquet", [("2+2=", "4"), ("1+2=", "3")])
    assert pq.read_table(path).to_pylist()[1] == {"prompt": [{"role": "user", "content": "1+2="}], "response": "3"}


def test_no_rows_and_mixed_types_are_errors(tmp_path):
    with pytest.raises(DataError, match="no rows to write"):
        write_prompt_file(tmp_path / "a.parquet", [])
    rows = [
        prompt_row(data_source="x", prompt="a", ground_truth=truth, split="train", index=0)
        for truth in ("1", {"target": 1})
    ]
    with pytest.raises(DataError, match="one type per column"):
        write_prompt_file(tmp_path / "a.parquet", rows)
    assert list(tmp_path.iterdir()) == []


def test_path_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        write_sft_file(tmp_path / "file" / "a.parquet", [("a", "b")])


@pytest.mark.parametrize(
    ("value", "message"), [("a\ud800", "'a.ud800' is not valid Unicode"), ({}, "has no place for")]
)
def test_a_value_that_parquet_cannot_hold_is_an_error_that_names_the_file(tmp_path, value, message):
    row = prompt_row(data_source="d", prompt="a", ground_truth=value, split="train", index=0)
    with pytest.raises(DataError, match=rf"rows\.parquet: .*{message}"):
        write_prompt_file(tmp_path / "rows.parquet", [row])


def test_rows_that_cannot_be_written_leave_both_files_as_they_were(tmp_path):
    good, bad = (
        prompt_row(data_source="d", prompt="a", ground_truth=truth, split="train", index=0) for truth in ("1", "\ud800")
    )
    write_splits(tmp_path, [good], [good])
    before = (tmp_path / "train.parquet").read_bytes()
    with pytest.raises(DataError, match=r"test\.parquet"):
        write_splits(tmp_path, [good, good], [bad])
    assert (tmp_path / "train.parquet").read_bytes() == before
