import argparse
import json
import re

import pyarrow.parquet as pq
import pytest

from fixtures.row_files import rows_of, write_rows
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
    assert (
        f"{tmp_path / 'sums.csv'}: read 4 rows, kept 3, dropped 1\n  dropped 1 row: repeats an earlier row\n" in output
    )
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


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def answered(prompt: str, answer: str) -> list[dict]:
    return [*user(prompt), {"role": "assistant", "content": answer}]


GSM8K = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(4)]
MATH = [{"problem": f"{n} + 1?", "solution": rf"\boxed{{{n + 1}}}"} for n in range(4)]
DAPO = [
    {"prompt": user(f"{n} + 1?"), "data_source": "math_dapo", "reward_model": {"ground_truth": str(n + 1)}}
    for n in range(4)
]
PAIRS = [
    {"chosen": answered(f"{n} + 1?", str(n + 1)), "rejected": answered(f"{n} + 1?", "0"), "prompt": f"{n} + 1?"}
    | {"score_chosen": 2, "score_rejected": 1}
    for n in range(4)
]
TABLE = [{"prompt": f"{n} + 1?", "answer": str(n + 1)} for n in range(4)]
NO_BOX = r"no answer and no \boxed{...} in the solution"
DROPPED = {
    "gsm8k": (GSM8K, [{"question": "", "answer": "#### 0"}], {"no prompt": 1}),
    "math": (MATH, [MATH[1], MATH[2], {"problem": "?", "solution": "1"}], {"repeats an earlier row": 2, NO_BOX: 1}),
    "dapo": (DAPO, [DAPO[1], DAPO[0]], {"repeats an earlier row": 1, "the prompt is in the test set": 1}),
    "ultrafeedback": (PAIRS, [{**PAIRS[1], "score_rejected": 2}], {"the scores are equal": 1}),
    "table": (TABLE, [{"prompt": "1?", "answer": ""}], {"no answer": 1}),
}
"""Task -> (rows, whose first is the test file; further training rows; how many of these are dropped, by reason)."""


@pytest.mark.parametrize("task", DROPPED)
def test_the_report_names_rows_read_kept_and_dropped_of_each_file(task, tmp_path, capsys):
    rows, more, dropped = DROPPED[task]
    train = write_rows(tmp_path / "train.jsonl", [*rows[1:], *more])
    test = write_rows(tmp_path / "test.jsonl", rows[:1])
    options = ("--data-source", "sums") if task == "table" else ()
    files = ("--train-file", str(train), "--test-file", str(test), "--output-dir", str(tmp_path / "out"))
    assert run(task, *files, *options) == 0
    output = capsys.readouterr().out
    counts = re.findall(r"^(.*): read (\d+) rows, kept (\d+), dropped (\d+)$", output, re.MULTILINE)
    assert [path for path, *_ in counts] == [str(train), str(test)]
    for (_, *numbers), source, written in zip(counts, (train, test), ("train", "test"), strict=True):
        num_read, num_kept, num_dropped = map(int, numbers)
        assert num_read == num_kept + num_dropped == len(source.read_text().splitlines())
        assert num_kept == len(rows_of(tmp_path / "out" / f"{written}.parquet"))
        assert f"wrote {num_kept} rows to {tmp_path / 'out' / written}.parquet\n" in output
    reasons = re.findall(r"^  dropped (\d+) rows?: (.*)$", output, re.MULTILINE)
    assert {reason: int(count) for count, reason in reasons} == dropped
    assert counts[0][3] == str(sum(dropped.values()))


def test_prepare_ultrafeedback_prints_a_pair_and_keeps_equal_scores(tmp_path, capsys):
    ties = [{**row, "score_rejected": 2} for row in PAIRS]
    files = ("--train-file", str(write_rows(tmp_path / "a.jsonl", ties)), "--output-dir", str(tmp_path / "out"))
    with pytest.raises(DataError, match=r"all rows were dropped \(4: the scores are equal\)"):
        run("ultrafeedback", *files)
    assert run("ultrafeedback", *files, "--keep-equal-scores", "--test-size", "1", "--seed", "3") == 0
    output = capsys.readouterr().out
    row = rows_of(tmp_path / "out" / "train.parquet")[0]
    assert f"the first prompt: {row['prompt'][0]['content']}\nits chosen answer: {row['chosen']}\n" in output
    assert "its rejected answer: 0\n" in output


def test_prepare_math_appends_the_instruction(tmp_path):
    files = ("--train-file", str(write_rows(tmp_path / "a.jsonl", MATH)), "--output-dir", str(tmp_path / "out"))
    assert run("math", *files, "--test-size", "3", "--instruction", "Use a box.") == 0
    row = rows_of(tmp_path / "out" / "train.parquet")[0]
    assert row["prompt"][0]["content"] == f"{row['extra_info']['question']} Use a box."


def test_prepare_requires_a_task_and_passes_errors_on(tmp_path, capsys):
    with pytest.raises(DataError, match="no such file"):
        run("gsm8k", "--train-file", "nowhere.jsonl", "--test-file", "nowhere.jsonl", "--output-dir", str(tmp_path))
    with pytest.raises(SystemExit):
        run()
    assert "countdown|multiplication|gsm8k|math|dapo|ultrafeedback|table" in capsys.readouterr().err
    for task in ("countdown", "multiplication", *DROPPED):
        with pytest.raises(SystemExit) as stop:
            run(task, "--help")
        assert stop.value.code == 0
    assert "(default: 20000)" in capsys.readouterr().out
