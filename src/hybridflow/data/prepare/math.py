r"""MATH from its files, with the columns `problem` and `solution`: the answer is in the last \boxed{...}."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridflow.data.prepare.prompt_file import PreparedFiles
from hybridflow.data.prepare.records import answer_of, is_empty, text_of
from hybridflow.data.prepare.splits import prepare_splits, unsplit_row
from hybridflow.runtime.latex_box import last_boxed

MATH_INSTRUCTION = r"Let's think step by step and output the final answer within \boxed{}."

_FBOX = re.compile(r"\\fbox(?![a-zA-Z])")
_BOX_WITHOUT_BRACES = re.compile(
    r"\\boxed(?![a-zA-Z])\s*(?![\s{])((?:(?!\\[\])])[^\s$])+?)(?=[.,;]?(?:\s|\$|\\[\])]|$))"
)
r"""`\boxed 5`: the content ends at a space, a $, \] or \), and a sentence's last sign is not part of it."""


def prepare_math(
    train_file: str | Path,
    output_dir: str | Path,
    *,
    test_file: str | Path | None = None,
    test_size: int = 100,
    instruction: str = MATH_INSTRUCTION,
    seed: int = 0,
) -> PreparedFiles:
    r"""Write `train.parquet` and `test.parquet` from files in the format of MATH (.jsonl, .json, .csv or .parquet).

    The columns are `problem` and `solution`, optionally `answer`, `level`, and `type` or `subject`. The ground truth is
    the answer or, in a row without one, the content of the solution's last \boxed{...}. The instruction is appended to
    each problem after a space. `extra_info` has the level and the type (or subject, under the name type) of each
    problem. The data source is "math". Without a `test_file`, `test_size` random rows are the test set.

    A row without a problem or an answer, one that repeats an earlier problem, and a training row whose problem is in
    the test set are dropped and counted in `dropped`. Raises DataError, naming file and row, for a missing column or a
    malformed row, and DataConfigError for another suffix and for a `test_size` that leaves no training row.
    """

    def make_row(record: Mapping[str, Any], place: str) -> dict[str, Any] | str:
        problem = text_of(record, "problem", place)
        has_answer = not is_empty(record.get("answer"))
        solution = text_of(record, "solution", place) if "solution" in record or not has_answer else ""
        truth = answer_of(record, "answer", place) if has_answer else _boxed_answer(solution)
        truth = truth.removesuffix(".").rstrip()  # math-verify cannot parse "5."
        if is_empty(problem) or not truth:
            return "no prompt" if is_empty(problem) else r"no answer and no \boxed{...} in the solution"
        info = {"answer": solution, "question": problem}
        for name, column in (("level", "level"), ("type", "subject"), ("type", "type")):
            if column in record:
                info[name] = record[column]
        return unsplit_row("math", f"{problem} {instruction}" if instruction else problem, truth, extra_info=info)

    return prepare_splits(
        train_file,
        output_dir,
        make_row,
        columns=("problem", "solution"),
        test_file=test_file,
        test_size=test_size,
        seed=seed,
    )


def _boxed_answer(solution: str) -> str:
    r"""Return the content of the last \boxed{...}, `\boxed 5` or \fbox{...}, "" if there is none."""
    boxes = _FBOX.sub(r"\\boxed", solution)
    return last_boxed(_BOX_WITHOUT_BRACES.sub(r"\\boxed{\1}", boxes)) or ""
