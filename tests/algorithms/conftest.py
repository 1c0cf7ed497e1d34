"""Random ragged batches as plain Python lists, for comparison with scalar references."""

import random
from collections.abc import Callable, Iterator

import pytest

Row = list[float]


@pytest.fixture
def ragged_batches() -> Callable[..., Iterator[tuple[list[list[bool]], list[list[Row]]]]]:
    """Return a generator function of 200 (mask, columns) for a number of columns, with NaN where the mask is false.

    1 to 5 rows of 0 to 8 positions; most rows are a response and then padding, some have gaps, some are empty.
    """

    def batches(num_columns: int) -> Iterator[tuple[list[list[bool]], list[list[Row]]]]:
        rng = random.Random(num_columns)
        for _ in range(200):
            num_rows, width = rng.randint(1, 5), rng.randint(0, 8)
            mask = []
            for _ in range(num_rows):
                length, density = rng.randint(0, width), rng.choice([1.0, 1.0, 0.6])
                mask.append([t < length and rng.random() < density for t in range(width)])
            columns = [
                [[rng.gauss(0, 1) if valid else float("nan") for valid in row] for row in mask]
                for _ in range(num_columns)
            ]
            yield mask, columns

    return batches
