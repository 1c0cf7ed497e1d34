"""Concatenation of batches. Columns of different lengths are padded by the rules of the glossary."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from tensordict import TensorDict

from hybridflow.errors import BatchError, FieldError
from hybridflow.protocol.batch import Batches, tensors_of
from hybridflow.protocol.fields import FIELDS, PROMPT, RESPONSE, SEQUENCE, TOKEN_COLUMNS, Number
from hybridflow.protocol.meta_info import concat_meta_info, copy_structure

Tensors = dict[str, torch.Tensor]


def concat_batches(parts: Sequence[Batches], are_checked: bool = False, pad_token_id: int | None = None) -> Batches:
    """Return the rows of all parts, in order; see `DataProto.concat`.

    `are_checked=True` skips the consistency check. `pad_token_id` is used if meta_info of the parts has none.
    """
    if not parts:
        raise BatchError("concat needs at least one batch, got an empty list.")
    for part in () if are_checked else parts:
        part.check_consistency()
    rows = [len(part) for part in parts]
    meta_info = concat_meta_info([part.meta_info for part in parts])
    tensors = [tensors_of(part.batch) for part in parts]
    arrays = [part.non_tensor_batch for part in parts]
    _require_same_names(tensors, "batch")
    _require_same_names(arrays, "non_tensor_batch")
    batch = None
    batches = [part.batch for part in parts if part.batch is not None]
    if batches:
        joined = _concat_tensors(tensors, meta_info.get("pad_token_id") or pad_token_id or 0)
        batch = TensorDict(joined, [sum(rows)], device=batches[0].device)
    columns = {name: _concat_arrays(name, [part[name] for part in arrays]) for name in arrays[0]}
    return parts[0]._unchecked(batch, columns, copy_structure(meta_info), any(part.auto_padding for part in parts))


def _require_same_names(parts: Sequence[Mapping], where: str) -> None:
    for index, part in enumerate(parts):
        if part.keys() != parts[0].keys():
            raise FieldError(
                f"concat: {where} of part 0 has {sorted(parts[0])}, but that of part {index} has {sorted(part)}; "
                "give all parts the same columns (select)."
            )


def _concat_tensors(parts: list[Tensors], pad_token_id: int) -> Tensors:
    if len(parts) == 1:
        return parts[0]
    for name in parts[0]:
        _require_same_kind(name, [part[name] for part in parts])
    if all(part[name].shape[1:] == column.shape[1:] for part in parts for name, column in parts[0].items()):
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    prompt_lens, response_lens = _lengths(parts)
    moved = any(lens is not None and len(set(lens)) > 1 for lens in (prompt_lens, response_lens))
    joined: Tensors = {}
    for name in parts[0]:
        columns = [part[name] for part in parts]
        field = FIELDS.get(name)
        is_sequence = field is not None and field.shape[:2] == SEQUENCE
        if len({column.shape[1:] for column in columns}) == 1 and not (is_sequence and moved):
            joined[name] = torch.cat(columns)
            continue
        if field is None or field.padding_side is None or field.padding_value is None:
            raise _cannot_pad(name, columns, "only columns with a padding side in the glossary (FIELDS) are padded")
        value = pad_token_id if name in TOKEN_COLUMNS else field.padding_value
        if is_sequence:
            if prompt_lens is None or response_lens is None:
                raise _cannot_pad(name, columns, "the batch needs prompts or responses, which say where a prompt ends")
            joined[name] = _concat_sequences(columns, prompt_lens, response_lens, value)
            continue
        widths = [column.shape[1] for column in columns]
        if field.shape[1] == "response_len|1":
            _require_same_granularity(name, columns, response_lens)
        left = field.padding_side == "left"
        joined[name] = _place(columns, max(widths), [max(widths) - w if left else 0 for w in widths], value)
    return joined


def _require_same_kind(name: str, columns: list[torch.Tensor]) -> None:
    first = columns[0]
    for index, column in enumerate(columns):
        same_shape = column.ndim == first.ndim and column.shape[2:] == first.shape[2:]
        if not same_shape or column.dtype != first.dtype or column.device != first.device:
            raise BatchError(
                f"concat: {name!r} is {tuple(first.shape)} {first.dtype} on {first.device} in part 0, but "
                f"{tuple(column.shape)} {column.dtype} on {column.device} in part {index}; convert one of them."
            )


def _lengths(parts: list[Tensors]) -> tuple[list[int] | None, list[int] | None]:
    """Return the prompt and response length of each part, each None if no column determines it."""
    prompt_lens = _lengths_of(parts, PROMPT)
    response_lens = _lengths_of(parts, RESPONSE)
    sequence_lens = _lengths_of(parts, SEQUENCE)
    if sequence_lens is None:
        return prompt_lens, response_lens
    if prompt_lens is None and response_lens is not None:
        prompt_lens = [s - r for s, r in zip(sequence_lens, response_lens, strict=True)]
    elif response_lens is None and prompt_lens is not None:
        response_lens = [s - p for s, p in zip(sequence_lens, prompt_lens, strict=True)]
    if prompt_lens is not None and response_lens is not None:
        for index, (p, r, s) in enumerate(zip(prompt_lens, response_lens, sequence_lens, strict=True)):
            if p < 0 or r < 0 or p + r != s:
                raise BatchError(
                    f"concat: in part {index} a prompt of length {p} and a response of length {r} do not add up to the "
                    f"length {s} of input_ids, attention_mask and position_ids."
                )
    return prompt_lens, response_lens


def _lengths_of(parts: list[Tensors], shape: tuple[str, ...]) -> list[int] | None:
    names = [name for name in parts[0] if name in FIELDS and FIELDS[name].shape == shape and parts[0][name].ndim > 1]
    return [part[names[0]].shape[1] for part in parts] if names else None


def _require_same_granularity(name: str, columns: list[torch.Tensor], response_lens: list[int] | None) -> None:
    """Raise BatchError if one part has a number per row and another part a number per token.

    A width of 1 is one number per row, unless the responses have length 1.
    """
    for index, column in enumerate(columns):
        if column.shape[1] == 1 and (response_lens is None or response_lens[index] != 1):
            reason = f"part {index} has one number per row, another part one per token; expand it first"
            raise _cannot_pad(name, columns, reason)


def _concat_sequences(
    columns: list[torch.Tensor], prompt_lens: list[int], response_lens: list[int], value: Number
) -> torch.Tensor:
    """Return (sum of rows, longest prompt + longest response); every response starts at the same index."""
    longest = max(prompt_lens)
    starts = [longest - prompt_len for prompt_len in prompt_lens]
    return _place(columns, longest + max(response_lens), starts, value)


def _place(columns: list[torch.Tensor], width: int, starts: list[int], value: Number) -> torch.Tensor:
    """Return the rows of all columns in a tensor of this width filled with `value`, each column from its start on."""
    first = columns[0]
    joined = first.new_full((sum(len(column) for column in columns), width, *first.shape[2:]), value)
    row = 0
    for column, start in zip(columns, starts, strict=True):
        joined[row : row + len(column), start : start + column.shape[1]] = column
        row += len(column)
    return joined


def _concat_arrays(name: str, arrays: list[np.ndarray]) -> np.ndarray:
    if len(arrays) == 1:
        return arrays[0]
    first = arrays[0]
    for index, array in enumerate(arrays):
        same_dtype = array.dtype == first.dtype or array.dtype.kind == first.dtype.kind == "U"
        if not same_dtype or array.shape[1:] != first.shape[1:]:
            raise BatchError(
                f"concat: {name!r} is {first.shape} {first.dtype} in part 0, but {array.shape} {array.dtype} "
                f"in part {index}; convert one of them."
            )
    return np.concatenate(arrays)


def _cannot_pad(name: str, columns: list[torch.Tensor], reason: str) -> BatchError:
    shapes = ", ".join(str(tuple(column.shape)) for column in columns)
    return BatchError(f"concat: {name!r} has different lengths in the parts: {shapes}; {reason}.")
