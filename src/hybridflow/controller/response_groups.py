"""How many rows form a response group (the responses to one prompt), where these must stay on one rank."""

from collections.abc import Sequence

import numpy as np

from hybridflow.controller.columns import columns_of
from hybridflow.errors import DispatchError, FieldError
from hybridflow.protocol import DataProto, DataProtoFuture


def response_group_size(batches: Sequence[DataProto | DataProtoFuture], column: str, where: str) -> int:
    """Return the rows of each response group: rows that follow each other with equal values of `column`.

    Of a future, this column is read. Raises FieldError if no batch has the column, DispatchError if the rows of a group
    are apart or groups differ in size: parts of equal length could not keep them together.
    """
    holder = next((batch for batch in batches if column in columns_of(batch)), None)
    if holder is None:
        raise FieldError(f"{where} keeps groups of {column!r} on one rank, but no batch of the call has that column.")
    data = DataProtoFuture.of(holder).get(column)
    values = data.non_tensor_batch[column] if column in data.non_tensor_batch else data.batch[column].numpy()
    starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
    sizes = np.diff(np.concatenate([starts, [len(values)]]))
    if len(set(values[starts].tolist())) < len(starts) or len(set(sizes.tolist())) > 1:
        raise DispatchError(
            f"{where} keeps groups of {column!r} on one rank, which needs groups of equal size whose rows follow each "
            f"other; they have {sorted(set(sizes.tolist()))} rows in {len(starts)} runs of {len(set(values.tolist()))} "
            f"values. Sort the batch by {column!r} (reorder), or give every group as many rows."
        )
    return int(sizes[0])
