"""Columns of Arrow, of which parquet files and saved data sets are made, as lists of plain values, and back."""

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from hybridflow.data.values import from_json, plain, to_json

_Reader = Callable[[Any], Any]


def values_of(column: pa.Array) -> list[Any]:
    """Return the values of a column, without the null fields within them: an object of Arrow has the keys of all rows.

    Values of a column of JSON are as they were written, also with their nulls.
    """
    read = _reader(column)
    values = column.to_pylist(maps_as_pydicts="strict")
    return values if read is None else [None if value is None else read(value) for value in values]


def column_of(values: Sequence[Any]) -> pa.Array:
    """Return plain values as a column of which `values_of` returns the same: of one type of Arrow, or of JSON."""
    try:
        column = pa.array(values)
        lacks_keys = "struct<>" in str(column.type)  # which parquet cannot hold
        if not lacks_keys and _same(values_of(column), values):
            return column
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        pass
    texts = pa.array([None if value is None else to_json(value) for value in values], pa.string())
    return pa.ExtensionArray.from_storage(pa.json_(), texts)


def _same(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """Return whether values are equal, also in type (1 and 1.0) and in the order of keys."""
    return all(a is b or repr(a) == repr(b) for a, b in zip(ours, theirs, strict=True))


def _reader(column: pa.Array) -> _Reader | None:
    """Return the function that makes a value of a column plain; None if all are plain already, as most are."""
    kind = column.type
    if isinstance(kind, pa.JsonType):
        return from_json
    if isinstance(kind, pa.UuidType):
        return str
    if isinstance(kind, pa.BaseExtensionType):
        return _reader(column.storage)
    if pa.types.is_dictionary(kind):
        return _reader(column.dictionary)
    if pa.types.is_run_end_encoded(kind):
        return _reader(column.values)
    if pa.types.is_floating(kind):
        return lambda value: None if value != value else value
    if pa.types.is_temporal(kind):
        return lambda value: plain(value, True)
    if pa.types.is_struct(kind):
        fields = [(field.name, column.field(number)) for number, field in enumerate(kind.fields)]
        readers = {name: _reader(values) for name, values in fields}
        if not any(readers.values()) and not any(values.null_count for _, values in fields):
            return None
        return lambda value: {
            name: read(each) if (read := readers[name]) else each for name, each in value.items() if each is not None
        }
    if pa.types.is_map(kind):
        if not (pa.types.is_string(kind.key_type) or pa.types.is_large_string(kind.key_type)):
            raise TypeError(f"the keys of a map must be texts, not {kind.key_type}")
        return _of_each(_reader(column.items), lambda read, value: {key: read(each) for key, each in value.items()})
    if hasattr(kind, "value_type"):
        return _of_each(_reader(column.values), lambda read, value: [read(each) for each in value])
    return None


def _of_each(read: _Reader | None, apply: Callable[[_Reader, Any], Any]) -> _Reader | None:
    """Return a reader of values that hold several others, of which some may be null."""
    return read and (lambda value: apply(lambda each: None if each is None else read(each), value))
