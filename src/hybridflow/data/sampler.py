"""The order in which an epoch visits the rows: a function of seed, epoch and the rows' numbers, and of nothing else."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hybridflow.errors import DataConfigError, DataError
from hybridflow.runtime import derive_seed, load_user_function, require_arguments

Order = Callable[[Sequence[float], torch.Generator], Sequence[int]]
"""(the number of each row, what to draw from in this epoch) -> the rows to visit."""


def sequential(numbers: Sequence[float], generator: torch.Generator) -> list[int]:
    """As the files have them."""
    return list(range(len(numbers)))


def shuffled(numbers: Sequence[float], generator: torch.Generator) -> list[int]:
    """A new permutation each epoch."""
    return torch.randperm(len(numbers), generator=generator).tolist()


def curriculum(numbers: Sequence[float], generator: torch.Generator) -> list[int]:
    """Ascending by their numbers, such as a difficulty; equal ones in a new order each epoch."""
    return sorted(shuffled(numbers, generator), key=numbers.__getitem__)


def weighted(numbers: Sequence[float], generator: torch.Generator) -> list[int]:
    """As many draws as there are rows, with replacement, each row in proportion to its number."""
    if min(numbers) < 0 or sum(numbers) <= 0:
        raise DataError(
            f"data.order='weighted' draws rows by weights from {min(numbers)} to {max(numbers)}; give weights of 0 or "
            "more, one of them above 0."
        )
    weights = torch.tensor(numbers, dtype=torch.float64)
    edges = (weights / weights.max()).cumsum(0)
    draws = torch.rand(len(numbers), dtype=torch.float64, generator=generator) * edges[-1]
    found = torch.searchsorted(edges, draws, right=True)
    return found.clamp(max=int(weights.nonzero()[-1])).tolist()


ORDERS: Mapping[str, Order] = {
    "shuffled": shuffled,
    "sequential": sequential,
    "curriculum": curriculum,
    "weighted": weighted,
}
"""What `data.order` names."""

NEEDS_NUMBERS = ("curriculum", "weighted")


class EpochSampler:
    """Orders of `num_rows` rows by a function of ORDERS, or one of the user's: 'path.py:function', 'module:function'.

    That is called as (numbers, a torch.Generator) and returns as many row indices as there are rows; a row may be
    missing or come again. `numbers` are the rows' in the column data.order_by, 0 without one. Neither reads nor moves
    torch's global random state.
    """

    def __init__(
        self, num_rows: int, *, seed: int = 0, order: str = "shuffled", numbers: Sequence[float] | None = None
    ) -> None:
        if num_rows < 1:
            raise DataError(f"there are {num_rows} rows to visit; at least 1 is needed.")
        if order in NEEDS_NUMBERS and numbers is None:
            raise DataConfigError(f"data.order={order!r} needs data.order_by, a column with a number for each row.")
        if numbers is not None and len(numbers) != num_rows:
            raise DataError(f"there are {num_rows} rows, but {len(numbers)} numbers to order them by.")
        self.num_rows, self.seed, self.name = num_rows, seed, order
        self.numbers = [0.0] * num_rows if numbers is None else list(numbers)
        self._order = ORDERS[order] if order in ORDERS else _function_of_user(order)
        self.order(0)  # what is wrong with it shows now

    def order(self, epoch: int) -> list[int]:
        """The row indices of an epoch."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
        try:
            order = self._order(self.numbers, generator)
        except DataError:
            raise
        except Exception as error:  # a function of the user's may raise anything
            raise DataError(f"data.order={self.name!r} raised {type(error).__name__}: {error}.") from error
        return list(order) if self.name in ORDERS else self._checked(order)

    def _checked(self, order: Any) -> list[int]:
        try:
            rows = [int(row) for row in order]
        except (TypeError, ValueError) as error:
            raise DataError(f"data.order={self.name!r} returned no row indices: {error}.") from error
        wrong = [row for row in rows if not 0 <= row < self.num_rows]
        if len(rows) != self.num_rows or wrong:
            what = f"row {wrong[0]}" if wrong else f"{len(rows)} rows"
            raise DataError(
                f"data.order={self.name!r} returned {what}; it must return {self.num_rows} indices of rows 0 to "
                f"{self.num_rows - 1}."
            )
        return rows


def _function_of_user(name: str) -> Order:
    function = load_user_function(name, "data.order", DataConfigError)
    require_arguments(function, name, "data.order", ("numbers", "generator"), DataConfigError)
    return lambda numbers, generator: function(numbers=list(numbers), generator=generator)
