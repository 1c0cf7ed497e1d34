"""Union of the columns of two batches with the same rows."""

from collections.abc import Mapping

from hybridflow.errors import FieldError
from hybridflow.protocol.consistency import Column
from hybridflow.protocol.equality import is_equal


def union_columns(mine: Mapping[str, Column], theirs: Mapping[str, Column]) -> dict[str, Column]:
    """Return all columns of both. Raises FieldError for a column with different contents; NaN equals NaN."""
    joined = dict(mine)
    for name, column in theirs.items():
        if name in joined and not is_equal(joined[name], column):
            raise FieldError(
                f"union: both batches have {name!r} with different contents: {_difference(joined[name], column)}. "
                "Drop it from one of them (select, pop) or rename it."
            )
        joined.setdefault(name, column)
    return joined


def _difference(mine: Column, theirs: Column) -> str:
    kinds = [f"{column.dtype} {tuple(column.shape)}" for column in (mine, theirs)]
    if kinds[0] != kinds[1]:
        return f"{kinds[0]} here, {kinds[1]} there"
    rows = [row for row in range(len(mine)) if not is_equal(mine[row], theirs[row])]
    return f"{kinds[0]} that differ in {len(rows)} of {len(mine)} rows, first in row {rows[0]}"
