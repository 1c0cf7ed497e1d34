"""Generated problems: random test and training problems that share no group (problems of the same numbers).

Their rows are written with a prompt from a template, a text with {names}.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from hybridflow.data.prepare.prompt_file import PreparedFiles, prompt_row, write_splits
from hybridflow.errors import DataConfigError

# Consecutive draws without a new problem after which the space of problems counts as used up.
_MAX_FRUITLESS_DRAWS = 20_000


class Problem(Protocol):
    """A hashable problem; the problems of one group are all in the training set or all in the test set."""

    @property
    def group(self) -> Hashable:
        """Key of the problems that must stay together."""
        ...

    @property
    def target(self) -> int:
        """The result, which distinguishes the problems of a group."""
        ...


ProblemT = TypeVar("ProblemT", bound=Problem)


def draw_disjoint(
    draw: Callable[[], ProblemT | None], *, num_groups: int, train_size: int, test_size: int, widen: str
) -> tuple[list[ProblemT], list[ProblemT]]:
    """Return (train, test) of the given sizes, without repeated problems.

    The test set is drawn first, so it does not depend on `train_size`. Each of its problems takes a new group until it
    has half of the `num_groups` groups; from then on its groups get further targets. `draw` returns None for a failed
    draw. Raises DataError, with the advice `widen`, if there are not enough different problems.
    """
    if train_size < 1 or test_size < 1:
        raise DataConfigError(f"train_size={train_size} and test_size={test_size} must both be at least 1.")
    test_groups: set[Hashable] = set()
    max_test_groups = max(1, num_groups // 2)
    test_seen: set[Hashable] = set()

    def is_test_problem(problem: ProblemT) -> bool:
        if (problem.group, problem.target) in test_seen:
            return False
        if problem.group not in test_groups and len(test_groups) >= max_test_groups:
            return False
        test_groups.add(problem.group)
        test_seen.add((problem.group, problem.target))
        return True

    train_seen: set[ProblemT] = set()

    def is_train_problem(problem: ProblemT) -> bool:
        if problem.group in test_groups or problem in train_seen:
            return False
        train_seen.add(problem)
        return True

    test = _collect(draw, is_test_problem, test_size, "test_size", widen)
    train = _collect(draw, is_train_problem, train_size, "train_size", widen)
    return train, test


def _collect(
    draw: Callable[[], ProblemT | None], accept: Callable[[ProblemT], bool], size: int, name: str, widen: str
) -> list[ProblemT]:
    problems: list[ProblemT] = []
    fruitless = 0
    while len(problems) < size:
        problem = draw()
        if problem is not None and accept(problem):
            problems.append(problem)
            fruitless = 0
            continue
        fruitless += 1
        if fruitless >= _MAX_FRUITLESS_DRAWS:
            raise DataConfigError(
                f"{name}={size}: only {len(problems)} different problems were found (train and test share no numbers). "
                f"Ask for fewer, or {widen}."
            )
    return problems


def write_problems(
    output_dir: str | Path,
    data_source: str,
    problems: tuple[Sequence[ProblemT], Sequence[ProblemT]],
    describe: Callable[[ProblemT], tuple[str, Any, str]],
) -> PreparedFiles:
    """Write the (train, test) problems; `describe` returns the prompt, the ground truth and the answer of each."""

    def row(problem: ProblemT, split: str, index: int) -> dict[str, Any]:
        prompt, truth, answer = describe(problem)
        return prompt_row(
            data_source=data_source,
            prompt=prompt,
            ground_truth=truth,
            split=split,
            index=index,
            question=prompt,
            answer=answer,
        )

    train, test = (
        [row(problem, split, index) for index, problem in enumerate(of_split)]
        for split, of_split in zip(("train", "test"), problems, strict=True)
    )
    return write_splits(output_dir, train, test)


def fill_template(template: str, values: Mapping[str, str], required: Sequence[str]) -> str:
    """Return the template with each {name} replaced by its value, and other braces kept.

    Raises DataConfigError if a required name is missing.
    """
    missing = [f"{{{name}}}" for name in required if f"{{{name}}}" not in template]
    if missing:
        known = ", ".join(f"{{{name}}}" for name in values)
        raise DataConfigError(f"prompt_template={template!r} lacks {' and '.join(missing)}; valid names are {known}.")
    for name, value in values.items():
        template = template.replace(f"{{{name}}}", value)
    return template
