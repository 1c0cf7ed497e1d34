"""`hybridflow prepare` with files of rows: every row is kept, or dropped for a reason that is counted."""

import argparse
import json
import re
from decimal import Decimal

import pytest

from fixtures.row_files import SUFFIXES, rows_of, write_rows
from hybridflow.cli import prepare
from hybridflow.data import (
    MATH_INSTRUCTION,
    prepare_files,
    prompt_row,
    write_prompt_file,
    write_sft_file,
)
from hybridflow.data.prepare.datasets import boxed_answer, gsm8k_row
from hybridflow.data.prepare.prompt_file import write_splits
from hybridflow.data.prepare.records import answer_of
from hybridflow.environments.rewards import math_reward
from hybridflow.environments.rewards.table import ANSWERS, table_reward
from hybridflow.errors import DataConfigError, DataError

STEPS = ' Let\'s think step by step and output the final answer after "####".'
NO_BOX = r"no answer and no \boxed{...} in the solution"


def messages(*texts: str) -> list[dict]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def gsm8k(n: int, **other) -> dict:
    return {"question": f"{n} + 1?", "answer": f"It is\n#### {n + 1}", **other}


def math(n: int, **other) -> dict:
    return {"problem": f"{n} + 1?", "level": "1", "type": "Algebra", "solution": rf"\boxed{{{n + 1}}}", **other}


def table(n: int, **other) -> dict:
    return {"question": f"{n} + 1?", "result": str(n + 1), "level": "2", **other}


def made(source: str, prompt: str, truth: str, **extra_info) -> dict:
    return {
        "data_source": source,
        "prompt": messages(prompt),
        "ability": "" if source == "sums" else "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": "train", "index": 0, **extra_info},
    }


TABLE = {"prompt": "question", "answer": "result", "data_source": "sums"}


def prepared(task, train, out, test):
    return prepare_files(task, train, out, test_file=test, **(TABLE if task == "table" else {}))


KINDS = {
    "gsm8k": (gsm8k, SUFFIXES, made("openai/gsm8k", f"1 + 1?{STEPS}", "2", answer="It is\n#### 2", question="1 + 1?")),
    "math": (
        math,
        SUFFIXES,
        made(
            "math", f"1 + 1? {MATH_INSTRUCTION}", "2", answer=r"\boxed{2}", question="1 + 1?", level="1", type="Algebra"
        ),
    ),
    "table": (table, SUFFIXES, made("sums", "1 + 1?", "2", level="2")),
}
"""Task -> (its rows by number, the suffixes of files that can hold them, the first written row)."""


@pytest.mark.parametrize(("task", "suffix"), [(task, suffix) for task, kind in KINDS.items() for suffix in kind[1]])
def test_rows_of_every_suffix_become_the_same_rows(task, suffix, tmp_path):
    row, _, expected = KINDS[task]
    train, test = write_rows(tmp_path / f"a{suffix}", [row(1)]), write_rows(tmp_path / f"b{suffix}", [row(2)])
    files = prepared(task, train, tmp_path / "out", test)
    assert rows_of(files.train_file) == [expected]
    (of_test,) = rows_of(files.test_file)
    assert of_test["prompt"][0]["content"] == expected["prompt"][0]["content"].replace("1 + 1", "2 + 1")
    assert of_test.get("extra_info", {"split": "test"})["split"] == "test"
    assert (files.num_train, files.num_test, files.dropped) == (1, 1, {})


REPEATS, TESTED = "repeats an earlier row", "the prompt is in the test set"
ANOTHER = "an earlier prompt with another answer"
DROPPED = {
    "gsm8k": (gsm8k, [gsm8k(1), gsm8k(0, question=" ")], {"no prompt": 1}),
    "math": (
        math,
        [math(1), math(2, solution=r"\boxed{9}"), math(0), math(5, problem=""), math(6, solution="six")],
        dict.fromkeys((REPEATS, ANOTHER, TESTED, "no prompt", NO_BOX), 1),
    ),
    "table": (
        table,
        [table(1), table(2, result="9"), table(0), table(5, question="  "), table(6, result=None)],
        dict.fromkeys((REPEATS, ANOTHER, TESTED, "no prompt", "no answer"), 1),
    ),
}
"""Task -> (its rows, further training rows, how many of these are dropped, by reason)."""


def run(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    prepare.add_arguments(parser)
    return prepare.run(parser.parse_args([str(argument) for argument in arguments]))


@pytest.mark.parametrize("task", DROPPED)
def test_the_report_names_rows_read_kept_and_dropped_of_each_file(task, tmp_path, capsys):
    row, more, dropped = DROPPED[task]
    train = write_rows(tmp_path / "train.jsonl", [*(row(n) for n in (1, 2, 3)), *more])
    test = write_rows(tmp_path / "test.jsonl", [row(0)])
    options = ("--data-source", "sums", "--prompt", "question", "--answer", "result") if task == "table" else ()
    assert run(task, "--train-file", train, "--test-file", test, "--output-dir", tmp_path / "out", *options) == 0
    output = capsys.readouterr().out
    counts = re.findall(r"^(.*): read (\d+) rows, kept (\d+), dropped (\d+)$", output, re.MULTILINE)
    kept = 4 if task == "gsm8k" else 3  # which may repeat a question
    assert counts == [
        (str(train), str(3 + len(more)), str(kept), str(sum(dropped.values()))),
        (str(test), "1", "1", "0"),
    ]
    for name, number in (("train", kept), ("test", 1)):
        written = tmp_path / "out" / f"{name}.parquet"
        assert f"wrote {number} rows to {written}\n" in output
        assert len(rows_of(written)) == number
    reasons = re.findall(r"^  dropped (\d+) rows?: (.*)$", output, re.MULTILINE)
    assert {reason: int(count) for count, reason in reasons} == dropped
    first = rows_of(tmp_path / "out" / "train.parquet")[0]
    assert f"the first prompt: {first['prompt'][0]['content']}\n" in output
    assert f"its ground truth: {first['reward_model']['ground_truth']}\n" in output


def test_options_of_the_command_are_those_of_the_function(tmp_path, capsys):
    sums = write_rows(tmp_path / "sums.csv", [table(n) for n in range(4)])
    options = ("--test-size", 1, "--output-dir", tmp_path / "out")
    named = ("--prompt", "question", "--answer", "result", "--data-source", "sums", "--system", "Add.")
    assert run("table", "--train-file", sums, *named, "--instruction", "Now.", *options) == 0
    row = rows_of(tmp_path / "out" / "train.parquet")[0]
    assert row["prompt"][0] == {"role": "system", "content": "Add."}
    assert row["prompt"][1]["content"].endswith("? Now.")
    capsys.readouterr()
    problems = write_rows(tmp_path / "math.jsonl", [math(n) for n in range(4)])
    assert run("math", "--train-file", problems, "--instruction", "Use a box.", *options) == 0
    row = rows_of(tmp_path / "out" / "train.parquet")[0]
    assert row["prompt"][0]["content"] == f"{row['extra_info']['question']} Use a box."


def test_test_rows_are_drawn_by_the_seed_and_share_no_prompt(tmp_path):
    source = write_rows(tmp_path / "rows.jsonl", [table(n) for n in range(12)])
    splits = []
    for i, seed in enumerate([0, 0, 1]):
        files = prepare_files("table", source, tmp_path / str(i), test_size=4, seed=seed, **TABLE)
        splits.append(
            [[row["prompt"][0]["content"] for row in rows_of(p)] for p in (files.train_file, files.test_file)]
        )
        assert sorted([*splits[-1][0], *splits[-1][1]]) == sorted(f"{n} + 1?" for n in range(12))
    assert splits[0] == splits[1] != splits[2]


@pytest.mark.parametrize("size", [0, 12, -1])
def test_a_test_set_that_leaves_no_rows_is_an_error(tmp_path, size):
    rows = write_rows(tmp_path / "rows.csv", [table(n) for n in range(12)])
    with pytest.raises(DataConfigError, match=rf"test_size={size} is invalid for 12 rows; use 1 to 11 .--test-size"):
        prepare_files("table", rows, tmp_path / "out", test_size=size, **TABLE)
    one = write_rows(tmp_path / "a.jsonl", [math(1)])
    with pytest.raises(DataConfigError, match=r"test_size=500 is invalid for 1 rows; use a test file"):
        prepare_files("math", one, tmp_path / "out", test_size=500)
    with pytest.raises(DataError, match=r"a.jsonl: each prompt is also in the test set; use a test file with other"):
        prepare_files("math", one, tmp_path / "out", test_file=one)


def test_a_parquet_file_is_read_in_parts_with_the_row_of_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("hybridflow.data.parquet_rows.PARQUET_ROWS", 3)
    rows = [math(n) for n in range(8)]
    files = prepare_files("math", write_rows(tmp_path / "a.parquet", rows), tmp_path / "out", test_size=1)
    assert files.sources[0].num_kept == 8
    source = write_rows(tmp_path / "c.parquet", [gsm8k(n, answer="#### 1" if n < 7 else "72") for n in range(8)])
    with pytest.raises(DataError, match=r"c.parquet: row 7: the answer must end in '#### number', got '72'"):
        prepare_files("gsm8k", source, tmp_path / "out", test_size=1)


# Forms of rows


def test_gsm8k_truths_lose_commas_and_a_line_separator_is_no_line_end(tmp_path):
    rows = [gsm8k(1, question="one\u2028two", answer="#### -3.5"), gsm8k(2, answer="a lot\n#### $1,450")]
    file = tmp_path / "odd.jsonl"
    file.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), encoding="utf-8")
    first, second = rows_of(prepare_files("gsm8k", file, tmp_path / "out", test_file=file, instruction="").train_file)
    assert first["prompt"][0]["content"] == "one\u2028two"
    assert [row["reward_model"]["ground_truth"] for row in (first, second)] == ["-3.5", "1450"]
    for answer, truth in (("#### \u22125.", "-5"), ("#### +1,000", "1000"), ("#### $1/2$", "1/2"), ("#### .5", ".5")):
        assert gsm8k_row(gsm8k(1, answer=answer), "a: row 0")["reward_model"]["ground_truth"] == truth
    for answer in ("#### 1,2", "#### 10:30", "#### 1/0"):
        with pytest.raises(DataError, match="a: row 0: the answer must end in"):
            gsm8k_row(gsm8k(1, answer=answer), "a: row 0")
    assert answer_of({"answer": Decimal("1.50")}, "answer", "a: row 0") == "1.50"


def test_the_column_answer_of_math_is_the_truth_where_it_has_a_value(tmp_path):
    rows = [
        {"problem": "a", "solution": r"\boxed{1}", "answer": "7", "subject": "Algebra", "level": 5},
        {"problem": "b", "solution": r"\boxed{2}", "answer": " ", "subject": "Geometry", "level": 3},
        {"problem": "c", "solution": None, "answer": 9, "subject": "Geometry", "level": 3},
    ]
    files = prepare_files("math", write_rows(tmp_path / "a.jsonl", rows), tmp_path / "out", test_size=1, instruction="")
    found = {row["prompt"][0]["content"]: row for path in (files.train_file, files.test_file) for row in rows_of(path)}
    truths = {text: row["reward_model"]["ground_truth"] for text, row in found.items()}
    assert truths == {"a": "7", "b": "2", "c": "9"}
    assert (found["a"]["extra_info"]["type"], found["a"]["extra_info"]["level"]) == ("Algebra", 5)


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
        *((text, "") for text in (r"\boxed{}", r"\boxed", r"\boxedup{3} and \framebox{4}", "five")),
        *((text * 50_000, "") for text in (r"\boxed{", r"\boxed ")),  # in linear time
    ],
)
def test_the_last_box_of_a_solution_is_its_answer(solution, answer):
    found = boxed_answer(solution)
    assert found == answer or len(solution) > 1000


@pytest.mark.parametrize("answer", [r"\frac{1}{2}", "5", "5.", r"\text{Evelyn}", "x^2 + 1", r"(-\infty, 2]"])
def test_a_correct_answer_has_the_score_1_by_the_default_reward(tmp_path, answer):
    row = {"problem": "Which?", "solution": rf"It is $\boxed{{{answer}}}$."}
    files = prepare_files(
        "math",
        write_rows(tmp_path / "a.jsonl", [row]),
        tmp_path / "out",
        test_file=write_rows(tmp_path / "b.jsonl", [math(1)]),
    )
    (made_row,) = rows_of(files.train_file)
    source, truth = made_row["data_source"], made_row["reward_model"]["ground_truth"]
    assert table_reward(source, rf"So \boxed{{{answer}}}", truth) == 1.0
    assert table_reward(source, r"So \boxed{17}", truth) == math_reward("math", "no answer", truth) == 0.0
    for text in ("1 and 2.\n\nAnswer: 34", "Answer: $34$", r"Answer: \boxed{34}"):
        assert (table_reward("math_dapo", text, "34"), ANSWERS["math_dapo"](text)) == (1.0, "34")
    assert table_reward("math_dapo", "It is 34.\n\nAnswer: 99", "34") == 0.0
    texts = ("Answer: 1\nno, **Answer: 2**", "It is 3.\nAnswer:", "It is 3.")
    assert [ANSWERS["math_dapo"](text) for text in texts] == ["2", None, None]


def test_nested_columns_and_messages_of_a_table_are_read(tmp_path):
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 1?"}]
    train = write_rows(tmp_path / "a.jsonl", [{"prompt": chat, "reward_model": {"ground_truth": 2}}])
    test = write_rows(tmp_path / "b.jsonl", [{"prompt": "2 + 2?", "reward_model": {"ground_truth": 4}}])
    options = {"answer": "reward_model.ground_truth", "data_source": "sums", "instruction": "Now."}
    (row,) = rows_of(prepare_files("table", train, tmp_path / "out", test_file=test, **options).train_file)
    assert row["prompt"] == [chat[0], {"role": "user", "content": "1 + 1? Now."}]
    assert row["reward_model"]["ground_truth"] == 2


# Errors


@pytest.mark.parametrize(
    ("task", "name", "rows", "message"),
    [
        # files
        *(
            (task, f"a{suffix}", None, r"no such file")
            for task, suffix in (("gsm8k", ".jsonl"), ("table", ".csv"), ("math", ".parquet"))
        ),
        ("gsm8k", "a.txt", "question", "the suffix '.txt' is invalid: expected .jsonl, .json, .csv, .parquet"),
        *(("math", f"a{suffix}", "", "the file has no rows") for suffix in (".jsonl", ".csv")),
        ("table", "a.json", [], "a.json: the file has no rows"),
        ("gsm8k", "a.jsonl", f'{json.dumps(gsm8k(1))}\n{{"question": "a', "line 2: is not JSON"),
        ("gsm8k", "a.jsonl", "[1]", "line 1: is a list"),
        ("gsm8k", "a.jsonl", b"\xff\xfe", "line 1: byte 0 is not UTF-8"),
        ("table", "a.json", '{"rows":\n[]}', "holds a dict; expected a list of objects"),
        ("math", "a.json", [math(1), "b"], r"a.json: row 1: is a str; expected an object"),
        ("table", "a.json", "[", "is not JSON"),
        ("table", "a.csv", "question,result\na,b,c\n", "row 0: has 3 fields; the first line has 2"),
        ("table", "a.csv", "question,result\na\n", "row 0: has 1 fields; the first line has 2"),
        ("table", "a.csv", 'question,result\n"a', "is not a CSV file: unexpected end"),
        ("gsm8k", "a.parquet", "PAR1 and no more", "not a readable parquet file"),
        # columns
        ("gsm8k", "a.jsonl", [{"question": "a"}], "'answer' is missing; the row has question"),
        ("gsm8k", "a.parquet", [{"question": "a"}], "row 0: 'answer' is missing; the row has question"),
        ("gsm8k", "a.jsonl", [gsm8k(1, question=3)], "'question' must be a text, got 3"),
        ("gsm8k", "a.jsonl", [gsm8k(1, answer="72")], "must end in '#### number'"),
        ("gsm8k", "a.jsonl", [gsm8k(1, answer="#### many")], "must end in '#### number'"),
        ("math", "a.jsonl", [{"problem": "a", "text": "b"}], "line 1: 'solution' is missing; the row has problem,"),
        ("math", "a.jsonl", [math(1), math(2, problem=3)], "a.jsonl: line 2: 'problem' must be a text, got 3"),
        ("math", "a.json", [math(1), math(2, solution=["b"])], r"row 1: 'solution' must be a text, got \['b'\]"),
        ("math", "a.json", [math(1, answer=[5])], r"row 0: 'answer' must be a text or a number, got \[5\]"),
        ("math", "a.jsonl", [math(1, solution="5")], r"a.jsonl: all rows were dropped \(1: no answer and no \\boxed"),
        ("table", "a.jsonl", [{"question": "a"}], r"a.jsonl: line 1: 'result' is missing; the row has question"),
        ("table", "a.jsonl", [table(1, question=3)], "line 1: 'question' must be a text or a list of chat messages,"),
        ("table", "a.jsonl", [table(1, question="")], r"a.jsonl: all rows were dropped \(1: no prompt\)"),
    ],
)
def test_a_malformed_file_is_an_error_with_its_place(tmp_path, task, name, rows, message):
    path = tmp_path / name
    if isinstance(rows, list):
        write_rows(path, rows)
    elif rows is not None:
        path.write_bytes(rows if isinstance(rows, bytes) else rows.encode())
    test = write_rows(tmp_path / "test.jsonl", [KINDS[task][0](9)])
    with pytest.raises(DataError, match=message) as error:
        prepared(task, path, tmp_path / "out", test)
    assert str(error.value).startswith(str(path))
    assert not (tmp_path / "out").exists()


# Writing


@pytest.mark.parametrize(
    ("truths", "message"),
    [
        ([], "no rows to write"),
        (["1", {"target": {1, 2}}], r"rows\.parquet: row 1: column 'reward_model' has a value of the type set;"),
        (["1", {2: 1}], r"rows\.parquet: row 1: column 'reward_model' has the key 2; keys in values must be texts"),
        (["1", "a\ud800"], r"rows\.parquet: row 1: column 'reward_model': the text 'a.ud800' is not valid Unicode"),
    ],
)
def test_rows_that_cannot_be_written_leave_the_files_as_they_were(tmp_path, truths, message):
    def rows(*truths):
        return [prompt_row(data_source="x", prompt="a", ground_truth=t, split="train", index=0) for t in truths]

    with pytest.raises(DataError, match=message):
        write_prompt_file(tmp_path / "rows.parquet", rows(*truths))
    assert list(tmp_path.iterdir()) == []
    write_splits(tmp_path, rows("1"), rows("1"))
    before = (tmp_path / "train.parquet").read_bytes()
    with pytest.raises(DataError, match=r"test\.parquet"):
        write_splits(tmp_path, rows("1", "1"), rows("\ud800"))
    assert (tmp_path / "train.parquet").read_bytes() == before
    with pytest.raises(DataError, match="cannot be written"):
        write_sft_file(tmp_path / "train.parquet" / "a.parquet", [("a", "b")])


@pytest.mark.parametrize(
    ("dataset", "options", "problem"),
    [
        ("gsm8k", {"prompt": "x"}, "dataset='gsm8k' has no option 'prompt'; its options are instruction."),
        ("table", {}, "dataset='table' needs data_source; its options are data_source, prompt, answer, "),
    ],
)
def test_an_option_that_a_data_set_does_not_have_or_needs_is_named(tmp_path, dataset, options, problem):
    with pytest.raises(DataConfigError) as caught:
        prepare_files(dataset, tmp_path / "absent.jsonl", tmp_path, **options)
    assert problem in str(caught.value)
