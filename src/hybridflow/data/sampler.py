"""The order of the rows in an epoch: a function of the seed, the epoch and the rows' numbers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hybridflow.errors import DataConfigError, DataError
from hybridflow.runtime.random_streams import derive_seed
from hybridflow.runtime.user_code import require_arguments
from hybridflow.runtime.user_import import load_user_function

Order = Callable[[Sequence[float], torch.Generator], Sequence[int]]
"""(number of each row, random generator of the epoch) -> row indices."""


def sequential(numbers: Sequence[float], generator: torch.Generator) -> list[int]:
    """Keep the order of the files."""
    return list(range(len(numbers)))


def shuffled(numbers: Sequence[float], generator: torch.Generator) -> list[int]:
    """Draw a new permutation in each epoch."""
    return torch.randperm(len(numbers), generator=generator).tolist()


def curriculum(numbers: Sequence[float], generator: torch.Generator) -> list[int]:
    """Sort rows by ascending number, such as a difficulty; shuffle equal numbers anew in each epoch."""
    return sorted(shuffled(numbers, generator), key=numbers.__getitem__)


def weighted(numbers: Sequence[float], generator: torch.Generator) -> list[int]:
    """Draw as many rows as there are, with replacement, each with a probability proportional to its number."""
    if min(numbers) < 0 or sum(numbers) <= 0:
        raise DataError(
            f"data.order='weighted' has weights from {min(numbers)} to {max(numbers)}; expected weights of 0 or more, "
            "at least one of them above 0."
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
"""Order function by its name in `data.order`."""

NEEDS_NUMBERS = ("curriculum", "weighted")


class EpochSampler:
    """Orders of `num_rows` rows by a function of ORDERS, or by a user's: 'path.py:function', 'module:function'.

    A user's function is called with the arguments `numbers` and `generator` (a torch.Generator) and returns as many row
    indices as there are rows; a row may be missing or repeated. `numbers` are those of the column data.order_by, 0
    without it. torch's global random state is neither read nor changed.
    """

    def __init__(
        self, num_rows: int, *, seed: int = 0, order: str = "shuffled", numbers: Sequence[float] | None = None
    ) -> None:
        if num_rows < 1:
            raise DataError(f"num_rows={num_rows} is invalid: at least 1 row is needed.")
        if order in NEEDS_NUMBERS and numbers is None:
            raise DataConfigError(f"data.order={order!r} needs data.order_by: the column with a number for each row.")
        if numbers is not None and len(numbers) != num_rows:
            raise DataError(f"there are {num_rows} rows, but {len(numbers)} numbers to order them by.")
        self.num_rows, self.seed, self.name = num_rows, seed, order
        self.numbers = [0.0] * num_rows if numbers is None else list(numbers)
        self._order = ORDERS[order] if order in ORDERS else _user_order(order)
        self.order(0)  # raises now if the function is invalid

    def order(self, epoch: int) -> list[int]:
        """Return the row indices of an epoch."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
        try:
            order = self._order(self.numbers, generator)
        except DataError:
            raise
        except Exception as error:  # a user's function may raise any exception
            raise DataError(f"data.order={self.name!r} raised {type(error).__name__}: {error}.") from error
        return list(order) if self.name in ORDERS else self._checked(order)

    def _checked(self, order: Any) -> list[int]:
        try:
            rows = [int(row) for row in order]
        except (TypeError, ValueError) as error:
            raise DataError(f"data.order={self.name!r} returned no row indices: {error}.") from error
        wrong = [row for row in rows if not 0 <= row < self.num_rows]
        if len(rows) != self.num_rows or wrong:
            found = f"row {wrong[0]}" if wrong else f"{len(rows)} rows"
            raise DataError(
                f"data.order={self.name!r} returned {found}; expected {self.num_rows} indices of rows 0 to "
                f"{self.num_rows - 1}."
            )
        return rows


def _user_order(name: str) -> Order:
    function = load_user_function(name, "data.order", DataConfigError)
    require_arguments(function, name, "data.order", ("numbers", "generator"), DataConfigError)
    return lambda numbers, generator: function(numbers=list(numbers), generator=generator)
