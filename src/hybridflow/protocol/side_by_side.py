"""Joining of batches that hold different columns of the same rows.

Columns read for some rows may be narrower than columns computed for all rows: responses are as long as the longest
among the rows that were read together. The narrower columns are padded by the rules of the glossary.
"""

from collections.abc import Sequence
from functools import reduce

from tensordict import TensorDict

from hybridflow.errors import BatchError, FieldError
from hybridflow.protocol.batch import tensors_of
from hybridflow.protocol.concat import concat_batches
from hybridflow.protocol.data_proto import DataProto
from hybridflow.protocol.fields import FIELDS, PROMPT, RESPONSE, RESPONSE_OR_ROW, SEQUENCE


def join_columns(parts: Sequence[DataProto]) -> DataProto:
    """Return the columns of all parts.

    Raises FieldError for a column that two parts have, and BatchError for sequences of unknown response length next to
    responses of several lengths.
    """
    lengths = [response_len(part) for part in parts]
    longest = max((length or 0 for length in lengths), default=0)
    if len({length for length in lengths if length is not None}) > 1:
        pad_token_id = next(
            (part.meta_info["pad_token_id"] for part in parts if "pad_token_id" in part.meta_info), None
        )
        parts = [_lengthened(part, longest, pad_token_id) for part in parts]
    return reduce(_disjoint_union, parts)


def response_len(data: DataProto) -> int | None:
    """Return the length of the response columns, or None if there are none or they hold one number per row."""
    for name, column in tensors_of(data.batch).items():
        shape = FIELDS[name].shape if name in FIELDS else ()
        is_wide = column.ndim > 1 and (shape[:2] == RESPONSE or (shape == RESPONSE_OR_ROW and column.shape[1] > 1))
        if is_wide:
            return column.shape[1]
    widths = {
        FIELDS[name].shape: column.shape[1]
        for name, column in tensors_of(data.batch).items()
        if name in FIELDS and column.ndim > 1
    }
    return widths[SEQUENCE] - widths[PROMPT] if SEQUENCE in widths and PROMPT in widths else None


def _disjoint_union(first: DataProto, second: DataProto) -> DataProto:
    names = [{*(() if d.batch is None else d.batch.keys()), *d.non_tensor_batch} for d in (first, second)]
    shared = sorted(names[0] & names[1])
    if shared:
        raise FieldError(f"union: both futures have {shared}; select or rename first.")
    return first.union(second)


def _lengthened(data: DataProto, longest: int, pad_token_id: int | None) -> DataProto:
    """Return the batch with responses padded to `longest`, by concatenating it with zero rows of that length."""
    mine = response_len(data)
    sequences = [name for name in tensors_of(data.batch) if name in FIELDS and FIELDS[name].shape[:2] == SEQUENCE]
    if mine is None and sequences:
        raise BatchError(
            f"the response length of {', '.join(sequences)} is unknown, and other columns have responses of different "
            "lengths; read response_mask together with them."
        )
    if mine is None or mine >= longest:
        return data
    tensors, more = tensors_of(data.batch), longest - mine
    empty = {}
    for name, column in tensors.items():
        shape = FIELDS[name].shape if name in FIELDS else ()
        is_wide = column.ndim > 1
        grows = is_wide and (
            shape[:2] == RESPONSE or shape[:2] == SEQUENCE or (shape == RESPONSE_OR_ROW and column.shape[1] == mine)
        )
        width = [column.shape[1] + more, *column.shape[2:]] if grows else list(column.shape[1:])
        empty[name] = column.new_empty([0, *width])
    narrow = data.select(non_tensor_batch_keys=[], meta_info_keys=[])
    if pad_token_id is not None:
        narrow.meta_info["pad_token_id"] = pad_token_id
    wide = type(data)(TensorDict(empty, [0], device=data.batch.device), meta_info=narrow.meta_info)  # pyright: ignore
    batch = data.select()
    batch.batch = concat_batches([narrow, wide]).batch
    return batch
