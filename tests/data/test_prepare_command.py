import argparse
import json

import pyarrow.parquet as pq
import pytest

from hybridflow.cli import prepare
from hybridflow.errors import DataError


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    prepare.add_arguments(parser)
    return prepare.run(parser.parse_args(arguments))


def test_prepare_countdown_writes_files_and_prints_a_summary(tmp_path, capsys):
    sizes = ("--train-size", "7", "--test-size", "3", "--output-dir", str(tmp_path / "out"))
    options = (
        "--num-operands",
        "3",
        "--max-number",
        "20",
        "--operators",
        "+-",
        "--prompt-template",
        "{numbers}={target}:",
    )
    assert run("countdown", *sizes, *options, "--number-separator", " ", "--seed", "4") == 0
    row = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()[0]
    output = capsys.readouterr().out
    assert f"wrote 7 rows to {tmp_path / 'out' / 'train.parquet'}" in output
    assert f"wrote 3 rows to {tmp_path / 'out' / 'test.parquet'}" in output
    assert f"the first prompt: {row['prompt'][0]['content']}\n" in output


def test_prepare_table_prints_what_was_dropped(tmp_path, capsys):
    rows = "question,answer\n1 + 1?,2\n2 + 2?,4\n2 + 2?,4\n3 + 3?,6\n"
    (tmp_path / "sums.csv").write_text(rows)
    files = ("--train-file", str(tmp_path / "sums.csv"), "--output-dir", str(tmp_path / "out"), "--test-size", "1")
    assert run("table", *files, "--prompt", "question", "--data-source", "sums", "--system", "Add.") == 0
    output = capsys.readouterr().out
    assert f"wrote 2 rows to {tmp_path / 'out' / 'train.parquet'}\n" in output
    assert "dropped 1 row: repeats an earlier row\n" in output
    row = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()[0]
    assert f"the first prompt: {row['prompt'][1]['content']}\n" in output


def test_prepare_multiplication_and_gsm8k_write_files(tmp_path):
    sizes = ("--train-size", "7", "--test-size", "3")
    assert run("multiplication", *sizes, "--digits-a", "2", "--digits-b", "1", "--output-dir", str(tmp_path / "m")) == 0
    assert pq.read_table(tmp_path / "m" / "test.parquet").num_rows == 3
    source = tmp_path / "g.jsonl"
    source.write_text(json.dumps({"question": "1+1?", "answer": "#### 2"}))
    files = ("--train-file", str(source), "--test-file", str(source), "--output-dir", str(tmp_path / "g"))
    assert run("gsm8k", *files) == 0
    assert pq.read_table(tmp_path / "g" / "train.parquet").num_rows == 1


def test_prepare_requires_a_task_and_passes_errors_on(tmp_path, capsys):
    with pytest.raises(DataError, match="no such file"):
        run("gsm8k", "--train-file", "nowhere.jsonl", "--test-file", "nowhere.jsonl", "--output-dir", str(tmp_path))
    with pytest.raises(SystemExit):
        run()
    assert "countdown|multiplication|gsm8k" in capsys.readouterr().err
    for task in ("countdown", "multiplication", "gsm8k"):
        with pytest.raises(SystemExit) as stop:
            run(task, "--help")
        assert stop.value.code == 0
    assert "(default: 20000)" in capsys.readouterr().out
