r"""Data sets in files: `DATASETS` names the columns of each and the function that makes a row of a record.

A row function gets the record, its place for errors and the options of its data set. It returns the row, or the reason
to drop the record, and raises DataError for a malformed one.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hybridflow.data.prepare.prompt_file import Messages, PreparedFiles, prompt_row
from hybridflow.data.prepare.records import answer_of, is_empty, messages_of, text_of, value_of
from hybridflow.data.prepare.splits import write_splits_of
from hybridflow.errors import DataConfigError, DataError
from hybridflow.runtime.latex_box import last_boxed

GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
"""What follows a question of GSM8K in its prompt."""
MATH_INSTRUCTION = r"Let's think step by step and output the final answer within \boxed{}."
"""What follows a problem of MATH in its prompt."""

_NUMBER = re.compile(
    r"[-+]?\$?-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+|(?=\.[0-9]))(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,3}|/0*[1-9][0-9]*)?"
)
_BOX_WITHOUT_BRACES = re.compile(
    r"\\(?:boxed|fbox)(?![a-zA-Z])\s*(?![\s{])((?:(?!\\[\])])[^\s$])+?)(?=[.,;]?(?:\s|\$|\\[\])]|$))"
)
r"""`\boxed 5`: the content ends at a space, a $, \] or \), and a sentence's last sign is not part of it."""

Record = Mapping[str, Any]
MadeRow = dict[str, Any] | str


class FileKind(NamedTuple):
    """A kind of files."""

    summary: str
    """Its line in `hybridflow prepare --help`."""
    columns: Sequence[str]
    """The columns that its files need."""
    make_row: Callable[..., MadeRow]
    """Its row function; keyword-only parameters are options of the command, whose help `OPTIONS` has."""
    unique: Sequence[str] = ("prompt",)
    """Columns by which duplicate rows are removed; (): keep all rows."""


def prepare_files(
    dataset: str,
    train_file: str | Path,
    output_dir: str | Path,
    *,
    test_file: str | Path | None = None,
    test_size: int = 100,
    seed: int = 0,
    **options: Any,
) -> PreparedFiles:
    """Write `train.parquet` and `test.parquet` from files of a data set of `DATASETS`.

    `options` are those of its row function. Files are .jsonl, .json, .csv or .parquet, or folders of `datasets`.
    Without a `test_file`, `test_size` random rows of the training file are the test set. A row that repeats an earlier
    prompt, a training row whose prompt is in the test set, and rows without a prompt or an answer are dropped and
    counted in `dropped`. Raises DataError, naming file and row, for a missing column or a malformed row, and
    DataConfigError for another suffix, an unknown data set or option, and a `test_size` that leaves no training row.
    """
    if dataset not in DATASETS:
        raise DataConfigError(f"dataset={dataset!r} is invalid: expected one of {', '.join(DATASETS)}.")
    _, columns, make_row, unique = DATASETS[dataset]
    valid = options_of(make_row)
    needed = [name for name, default in valid.items() if default is inspect.Parameter.empty and name not in options]
    if wrong := [*sorted(options.keys() - valid.keys()), *needed]:
        found = f"needs {needed[0]}" if wrong[0] in needed else f"has no option {wrong[0]!r}"
        raise DataConfigError(f"dataset={dataset!r} {found}; its options are {', '.join(valid) or 'none'}.")
    if dataset == "table":
        columns = (options.get("prompt", "prompt"), options.get("answer", "answer"))
    return write_splits_of(
        train_file,
        output_dir,
        lambda record, place: make_row(record, place, **options),
        columns=columns,
        unique=unique,
        test_file=test_file,
        test_size=test_size,
        seed=seed,
    )


def options_of(make_row: Callable[..., MadeRow]) -> dict[str, Any]:
    """Return the options of a row function by name, with their defaults; `inspect.Parameter.empty`: it needs one."""
    known = inspect.signature(make_row).parameters.values()
    return {each.name: each.default for each in known if each.kind is each.KEYWORD_ONLY}


def gsm8k_row(record: Record, place: str, *, instruction: str = GSM8K_INSTRUCTION) -> MadeRow:
    """Return the row of a problem of GSM8K: the truth is the number after "####", without commas and $.

    The instruction is appended to the question after a space.
    """
    question, answer = text_of(record, "question", place), text_of(record, "answer", place)
    if is_empty(question):
        return "no prompt"
    prompt = f"{question} {instruction}" if instruction else question
    _, marker, tail = answer.rpartition("####")
    number = tail.replace("\u2212", "-").strip(" $\t\n").removesuffix(".")
    if not marker or not _NUMBER.fullmatch(number):
        raise DataError(f"{place}: the answer must end in '#### number', got {answer[-60:]!r}.")
    number = number.replace(",", "").replace("$", "").removeprefix("+")
    return _row("openai/gsm8k", prompt, number, extra_info={"answer": answer, "question": question})


def math_row(record: Record, place: str, *, instruction: str = MATH_INSTRUCTION) -> MadeRow:
    r"""Return the row of a problem of MATH: the truth is `answer` or the last \boxed{...} of `solution`.

    The instruction is appended to the problem after a space. `extra_info` has the level and the type (or subject).
    """
    problem = text_of(record, "problem", place)
    has_answer = not is_empty(record.get("answer"))
    solution = text_of(record, "solution", place) if "solution" in record or not has_answer else ""
    truth = answer_of(record, "answer", place) if has_answer else boxed_answer(solution)
    truth = truth.removesuffix(".").rstrip()  # math-verify cannot parse "5."
    if is_empty(problem) or not truth:
        return "no prompt" if is_empty(problem) else r"no answer and no \boxed{...} in the solution"
    info = {"answer": solution, "question": problem}
    for name, column in (("level", "level"), ("type", "subject"), ("type", "type")):
        if column in record:
            info[name] = record[column]
    return _row("math", f"{problem} {instruction}" if instruction else problem, truth, extra_info=info)


def boxed_answer(solution: str) -> str:
    r"""Return the content of the last \boxed{...}, `\boxed 5` or \fbox{...}, "" if there is none."""
    return last_boxed(_BOX_WITHOUT_BRACES.sub(r"\\boxed{\1}", solution)) or ""


def table_row(
    record: Record,
    place: str,
    *,
    data_source: str,
    prompt: str = "prompt",
    answer: str = "answer",
    instruction: str = "",
    system: str = "",
) -> MadeRow:
    """Return the row of any prompt and answer; all other columns become entries of `extra_info`.

    `prompt` and `answer` name the columns; a name with dots goes into nested values (`reward_model.ground_truth`). A
    prompt is a text or chat messages; `instruction` is appended to its last message after a space, `system` is put
    before it.
    """
    question, truth = value_of(record, prompt, place), value_of(record, answer, place)
    if is_empty(question) or is_empty(truth):
        return "no prompt" if is_empty(question) else "no answer"
    used = {column.partition(".")[0] for column in (prompt, answer)}
    others = {name: value for name, value in record.items() if name not in used}
    messages = messages_of(question, prompt, place, instruction, system)
    return _row(data_source, messages, truth, ability="", extra_info=others)


def _row(
    data_source: str,
    prompt: str | Messages,
    ground_truth: Any,
    ability: str = "math",
    extra_info: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a row of a prompt file; `write_splits_of` adds split and index to its `extra_info`."""
    row = prompt_row(
        data_source=data_source, prompt=prompt, ground_truth=ground_truth, ability=ability, split="", index=0
    )
    return {**row, "extra_info": dict(extra_info or {})}


DATASETS = {
    "gsm8k": FileKind(
        "grade-school word problems, from files with the columns question and answer",
        ("question", "answer"),
        gsm8k_row,
        unique=(),
    ),
    "math": FileKind(
        "competition problems, from files with the columns problem and solution", ("problem", "solution"), math_row
    ),
    "table": FileKind(
        "your own prompts and answers, from a .jsonl, .json, .csv or .parquet file", ("prompt", "answer"), table_row
    ),
}

OPTIONS = {
    "instruction": ("TEXT", "appended to each prompt after a space"),
    "system": ("TEXT", "system message before each prompt"),
    "prompt": ("COLUMN", "column of the prompts: texts or messages"),
    "answer": ("COLUMN", "column of the answers, as a.b if nested"),
    "data_source": ("NAME", "a name, which can choose the reward function"),
}
"""The placeholder and the help of each option of a row function."""
