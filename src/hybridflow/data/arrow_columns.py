"""Columns of Arrow, of which parquet files and saved data sets are made, as lists of plain values, and back."""

from collections.abc import Sequence
from itertools import chain, islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from hybridflow.data.values import from_json, plain, to_json

_ABSENT = object()
"""Stands for a null field of an object, which another row has brought in."""


def values_of(column: pa.Array) -> list[Any]:
    """Return the values of a column, without the null fields within them: an object of Arrow has the keys of all rows.

    Values of a column of JSON are as they were written, also with their nulls. Nested columns are read by their parts,
    which is faster than pyarrow's `to_pylist`.
    """
    kind = column.type
    if isinstance(kind, pa.JsonType):
        return [None if text is None else from_json(text) for text in column.storage.to_pylist()]
    if isinstance(kind, pa.UuidType):
        return [None if value is None else str(value) for value in column.to_pylist()]
    if isinstance(kind, pa.BaseExtensionType) and pa.types.is_nested(column.storage.type):
        return values_of(column.storage)
    if pa.types.is_dictionary(kind):
        return values_of(column.dictionary_decode())
    if pa.types.is_run_end_encoded(kind):
        return values_of(pc.call_function("run_end_decode", [column]))
    if pa.types.is_floating(kind):
        return [None if value != value else value for value in column.to_pylist()]
    if pa.types.is_temporal(kind):
        return [plain(value, True) for value in column.to_pylist()]
    if pa.types.is_struct(kind):
        return _objects(column)
    if pa.types.is_map(kind):
        return _maps(column)
    if hasattr(kind, "value_type"):
        return _lists(column)
    return column.to_pylist()


def column_of(values: Sequence[Any]) -> pa.Array:
    """Return plain values as a column of which `values_of` returns the same: of one type of Arrow, or of JSON."""
    try:
        column = pa.array(values)
        if pa.types.is_string(column.type):
            return column
        lacks_keys = "struct<>" in str(column.type)  # which parquet cannot hold
        if not lacks_keys and _holds(column, values):
            return column
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        pass
    texts = pa.array([None if value is None else to_json(value) for value in values], pa.string())
    return pa.ExtensionArray.from_storage(pa.json_(), texts)


def _holds(column: pa.Array, values: Sequence[Any]) -> bool:
    """Return whether a column has these values, also in type (1 and 1.0) and in the order of keys."""
    parts = range(0, len(values), 1000)  # short ones leave the garbage collector little to look at
    pairs = (zip(values_of(column.slice(i, 1000)), values[i : i + 1000], strict=True) for i in parts)
    return all(a is b or repr(a) == repr(b) for a, b in chain.from_iterable(pairs))


def _objects(column: pa.Array) -> list[Any]:
    names = [field.name for field in column.type.fields]
    if len(set(names)) < len(names):
        raise ValueError(f"an object has a key twice, of {', '.join(names)}")
    fields = [_where_valid(field, values_of(field), _ABSENT) for field in column.flatten()]
    rows = zip(*fields, strict=True) if fields else [()] * len(column)
    made = [{name: each for name, each in zip(names, row, strict=True) if each is not _ABSENT} for row in rows]
    return _where_valid(column, made, None)


def _where_valid(column: pa.Array, values: list[Any], instead: Any) -> list[Any]:
    """Return the values, with `instead` where the column is null."""
    if not column.null_count:
        return values
    return [value if valid else instead for value, valid in zip(values, column.is_valid().to_pylist(), strict=True)]


def _lists(column: pa.Array) -> list[Any]:
    values = iter(values_of(column.flatten()))
    sizes = pc.call_function("list_value_length", [column]).to_pylist()
    return [None if size is None else list(islice(values, size)) for size in sizes]


def _maps(column: pa.Array) -> list[Any]:
    kind = column.type
    if not (pa.types.is_string(kind.key_type) or pa.types.is_large_string(kind.key_type)):
        raise TypeError(f"the keys of a map must be texts, not {kind.key_type}")
    pairs = pa.struct([pa.field("key", kind.key_type, nullable=False), pa.field("value", kind.item_type)])
    return [None if value is None else _map(value) for value in _lists(column.cast(pa.list_(pairs)))]


def _map(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    made = {pair["key"]: pair.get("value") for pair in pairs}
    if len(made) < len(pairs):
        raise ValueError(f"a map has a key twice, of {', '.join(made)}")
    return made
