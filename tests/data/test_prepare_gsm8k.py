import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fixtures.row_files import SUFFIXES, rows_of, write_rows
from hybridflow.data import prepare_gsm8k
from hybridflow.errors import DataError

CLIPS = {
    "question": "Natalia sold clips to 48 of her friends in April, and then half as many in May. How many altogether?",
    "answer": "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 48+24 = <<48+24=72>>72.\n#### 72",
}
CARS = {"question": "How much do the cars cost?", "answer": "a lot\n#### $1,450"}


def write_jsonl(path: Path, records: list) -> Path:
    path.write_text("\n".join(json.dumps(record, ensure_ascii=False) for record in records) + "\n", encoding="utf-8")
    return path


def test_jsonl_becomes_prompt_rows_with_the_instruction(tmp_path):
    train = write_jsonl(tmp_path / "train.jsonl", [CLIPS, CARS])
    test = write_jsonl(tmp_path / "test.jsonl", [CARS])
    files = prepare_gsm8k(train, test, tmp_path / "out")
    rows = pq.read_table(files.train_file).to_pylist()
    assert rows[0] == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {
                "role": "user",
                "content": CLIPS["question"] + ' Let\'s think step by step and output the final answer after "####".',
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {"split": "train", "index": 0, "answer": CLIPS["answer"], "question": CLIPS["question"]},
    }
    assert rows[1]["reward_model"]["ground_truth"] == "1450"
    assert pq.read_table(files.test_file).to_pylist()[0]["extra_info"]["split"] == "test"


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_files_of_all_suffixes_give_equal_rows(tmp_path, suffix):
    jsonl, other = write_jsonl(tmp_path / "a.jsonl", [CLIPS, CARS]), write_rows(tmp_path / f"b{suffix}", [CLIPS, CARS])
    files = [prepare_gsm8k(source, source, tmp_path / source.stem) for source in (jsonl, other)]
    assert rows_of(files[0].train_file) == rows_of(files[1].train_file)


def test_rows_without_a_question_are_dropped_and_repeated_ones_are_kept(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", [CLIPS, CARS, CLIPS, {**CARS, "question": " "}])
    files = prepare_gsm8k(source, source, tmp_path / "out")
    assert [(counts.num_read, counts.num_kept) for counts in files.sources] == [(4, 3), (4, 3)]
    assert (files.num_train, files.num_test, files.dropped) == (3, 3, {"no prompt": 2})


def test_unicode_line_separator_does_not_end_a_line(tmp_path):
    odd = {"question": "one\u2028two", "answer": "#### -3.5"}
    file = write_jsonl(tmp_path / "odd.jsonl", [odd])
    files = prepare_gsm8k(file, file, tmp_path / "out", instruction="")
    row = pq.read_table(files.train_file).to_pylist()[0]
    assert row["prompt"][0]["content"] == "one\u2028two"
    assert row["reward_model"]["ground_truth"] == "-3.5"


def refused(tmp_path: Path, name: str, content: bytes | None) -> str:
    good = write_jsonl(tmp_path / "good.jsonl", [CLIPS])
    bad = tmp_path / name
    if content is not None:
        bad.write_bytes(content)
    with pytest.raises(DataError) as error:
        prepare_gsm8k(good, bad, tmp_path / "out")
    assert str(bad) in str(error.value)
    assert not (tmp_path / "out").exists()
    return str(error.value)


def test_malformed_file_is_an_error_with_file_and_line(tmp_path):
    assert "no such file" in refused(tmp_path, "none.jsonl", None)
    assert "no such file" in refused(tmp_path, "none.parquet", None)
    assert "the suffix '.txt' is invalid" in refused(tmp_path, "some.txt", b"question,answer")
    assert "has no rows" in refused(tmp_path, "empty.jsonl", b"\n")
    assert "line 2: is not JSON" in refused(tmp_path, "cut.jsonl", json.dumps(CLIPS).encode() + b'\n{"question": "a')
    assert "line 1: is a list" in refused(tmp_path, "list.jsonl", b"[1]")
    assert "'answer' is missing; the row has question" in refused(tmp_path, "column.jsonl", b'{"question": "a"}')
    assert "'question' must be a text, got 3" in refused(tmp_path, "type.jsonl", b'{"question": 3, "answer": "#### 1"}')
    assert "must end in '#### number'" in refused(tmp_path, "mark.jsonl", b'{"question": "a", "answer": "72"}')
    assert "must end in '#### number'" in refused(tmp_path, "word.jsonl", b'{"question": "a", "answer": "#### many"}')
    assert "line 1: byte 0 is not UTF-8" in refused(tmp_path, "bytes.jsonl", b"\xff\xfe")
    assert "not a readable parquet file" in refused(tmp_path, "cut.parquet", b"PAR1 and no more")


def test_parquet_without_the_answer_column_is_an_error(tmp_path):
    file = tmp_path / "questions.parquet"
    pq.write_table(pa.Table.from_pylist([{"question": "a"}]), file)
    with pytest.raises(DataError, match="row 0: 'answer' is missing; the row has question"):
        prepare_gsm8k(file, file, tmp_path / "out")
