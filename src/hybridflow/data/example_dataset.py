"""The common base of data sets whose examples hold responses: SFT and preference data."""

from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

from hybridflow.data.data_rows import fingerprint
from hybridflow.data.parquet_rows import Row
from hybridflow.errors import DataConfigError, DataError
from hybridflow.runtime.observe import get_logger

logger = get_logger(__name__)

Example = TypeVar("Example")


class ExampleDataset(Generic[Example]):
    """Examples of rows, without those longer than the limits.

    `lengths` are the numbers of (prompt, response) tokens of each example and `limits` their maxima. `what` is the name
    of the examples in messages. `order_by` names the column with a number for each row. Raises DataError if no example
    is left.
    """

    num_dropped: int
    longest: int
    """Length of the longest example in tokens."""
    numbers: list[float] | None
    """Number of each example in the column `order_by`; None without `order_by`."""
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
        """Return the number of examples, without the dropped ones."""
        return len(self._examples)

    def _tokens(self, example: Example) -> Iterable[Any]:
        """Return the contents of an example as values that JSON can hold."""
        raise NotImplementedError

    def _at(self, indices: Sequence[int]) -> list[Example]:
        """Return the examples at `indices`; raise DataError for an index out of range."""
        check_indices(indices, len(self))
        return [self._examples[i] for i in indices]


def check_indices(indices: Sequence[int], num_rows: int) -> None:
    """Raise DataError unless every index is in 0..num_rows-1."""
    for index in indices:
        if not 0 <= index < num_rows:
            raise DataError(f"index={index} is out of range: the data set has rows 0 to {num_rows - 1}.")


def require_limits(max_prompt_length: int, max_response_length: int, max_samples: int) -> None:
    """Raise DataConfigError for limits that no example can meet."""
    if max_prompt_length < 1 or max_response_length < 1 or max_samples < 0:
        raise DataConfigError(
            f"max_prompt_length={max_prompt_length} and max_response_length={max_response_length} must be at least "
            f"1, max_samples={max_samples} at least 0."
        )


def _short_enough(
    rows: Sequence[Row], lengths: Sequence[tuple[int, int]], limits: tuple[int, int], what: str
) -> list[int]:
    """Return the indices of the examples within the limits; log how many are not, and the first of them."""
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
        raise DataConfigError(f"no {what} are left: {message} Raise the limits.")
    logger.warning("%s", message)
    return kept
