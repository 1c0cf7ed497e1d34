"""The size of a response group (the responses to one prompt) for calls that must keep each group on one rank."""

from collections.abc import Sequence

import numpy as np

from hybridflow.controller.columns import columns_of
from hybridflow.errors import DispatchError, FieldError
from hybridflow.protocol import DataProto, DataProtoFuture


def response_group_size(batches: Sequence[DataProto | DataProtoFuture], column: str, where: str) -> int:
    """Return the number of rows of each response group: adjacent rows with equal values of `column`.

    If the batch is a future, this column is read. Raises FieldError if no batch has the column, and DispatchError if
    the rows of a group are not adjacent or groups differ in size: equal parts could not keep them together.
    """
    holder = next((batch for batch in batches if column in columns_of(batch)), None)
    if holder is None:
        raise FieldError(
            f"{where} keeps groups of {column!r} on one rank, but no batch of the call has column {column!r}; add it."
        )
    data = DataProtoFuture.of(holder).get(column)
    values = data.non_tensor_batch[column] if column in data.non_tensor_batch else data.batch[column].numpy()
    starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
    sizes = np.diff(np.concatenate([starts, [len(values)]]))
    if len(set(values[starts].tolist())) < len(starts) or len(set(sizes.tolist())) > 1:
        raise DispatchError(
            f"{where} keeps groups of {column!r} on one rank, which requires groups of equal size with adjacent rows; "
            f"got {len(starts)} runs of {sorted(set(sizes.tolist()))} rows for {len(set(values.tolist()))} values. "
            f"Sort the batch by {column!r} (reorder), or give every group the same number of rows."
        )
    return int(sizes[0])
