"""What data sets of prompts with given responses have in common, of whatever an example consists."""

from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

from hybridflow.data.fingerprint import fingerprint
from hybridflow.data.parquet_rows import Row
from hybridflow.errors import DataConfigError, DataError
from hybridflow.observability import get_logger

logger = get_logger(__name__)

Example = TypeVar("Example")


class ExampleDataset(Generic[Example]):
    """The examples of rows, without those that are longer than the limits.

    `lengths` are the (prompt, response) tokens of each example, `limits` their maxima; `what` the examples are called.
    `order_by` names the column with a number for each row. Raises DataError if no example is left.
    """

    num_dropped: int
    longest: int
    """Tokens of the longest example."""
    numbers: list[float] | None
    """The number of each example in the column `order_by`; None without one."""
    fingerprint: str
    """Hash of the examples' tokens, in order."""

    def __init__(
        self,
        rows: Sequence[Row],
        examples: Sequence[Example],
        lengths: Sequence[tuple[int, int]],
        limits: tuple[int, int],
        what: str,
        order_by: str,
    ) -> None:
        kept = _short_enough(rows, lengths, limits, what)
        self._examples = [examples[i] for i in kept]
        self.num_dropped = len(rows) - len(kept)
        self.longest = max(sum(lengths[i]) for i in kept)
        self.numbers = [rows[i].number(order_by) for i in kept] if order_by else None
        self.fingerprint = fingerprint(map(self._tokens, self._examples))

    def __len__(self) -> int:
        """Examples that can be used, without the dropped ones."""
        return len(self._examples)

    def _tokens(self, example: Example) -> Iterable[Any]:
        """What an example consists of, as JSON can hold it."""
        raise NotImplementedError

    def _at(self, indices: Sequence[int]) -> list[Example]:
        """Raises DataError unless every index is that of an example."""
        check_indices(indices, len(self))
        return [self._examples[i] for i in indices]


def check_indices(indices: Sequence[int], num_rows: int) -> None:
    """`DataError` unless every index is in 0..num_rows-1."""
    for index in indices:
        if not 0 <= index < num_rows:
            raise DataError(f"row {index} was asked for, but the data set has rows 0 to {num_rows - 1}.")


def require_limits(max_prompt_length: int, max_response_length: int, max_samples: int) -> None:
    """Raise DataConfigError for limits that leave nothing."""
    if max_prompt_length < 1 or max_response_length < 1 or max_samples < 0:
        raise DataConfigError(
            f"max_prompt_length={max_prompt_length} and max_response_length={max_response_length} must be at least "
            f"1, max_samples={max_samples} at least 0."
        )


def _short_enough(
    rows: Sequence[Row], lengths: Sequence[tuple[int, int]], limits: tuple[int, int], what: str
) -> list[int]:
    """Which examples are within the limits; says which are not."""
    kept = [i for i, (prompt, response) in enumerate(lengths) if prompt <= limits[0] and response <= limits[1]]
    if len(kept) == len(lengths):
        return kept
    first = min(set(range(len(lengths))) - set(kept))
    message = (
        f"dropped {len(lengths) - len(kept)} of {len(lengths)} {what} longer than "
        f"max_prompt_length={limits[0]} or max_response_length={limits[1]} tokens (the first is "
        f"{rows[first].place}: prompt {lengths[first][0]}, response {lengths[first][1]} tokens)."
    )
    if not kept:
        raise DataConfigError(f"none of the {what} is left: {message} Raise the limits.")
    logger.warning("%s", message)
    return kept
