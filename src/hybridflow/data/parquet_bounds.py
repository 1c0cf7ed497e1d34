"""Bounds of a parquet file, checked before its values are expanded: a file of kilobytes can hold terabytes.

A page of equal values is one value and a count, and a dictionary has each text once. The file's metadata tells the
number of values; the texts' sizes are counted without expanding them.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hybridflow.errors import DataError

MAX_ROWS = 10_000_000
MAX_VALUES = 100_000_000
"""Values in one column; a list has a value for each item."""

MAX_BYTES = 8 * 2**30
"""Bytes of one column, uncompressed and with each text as often as it occurs."""

MAX_COLUMNS = 10_000

_MAX_LIST = 100_000
"""Entries of a list in the metadata, such as columns or row groups, which are all read when a file is opened."""

_PART_BYTES = 2**28
_PREFIXES = "DELTA_BYTE_ARRAY"
_EXPANDING = {"RLE_DICTIONARY", "PLAIN_DICTIONARY", _PREFIXES}
_SPLIT = "Split the file, or remove what is not needed."


def require_bounded(path: Path, columns: Sequence[str]) -> None:
    """Raise DataError if the columns of a parquet file are beyond the bounds, and what pyarrow raises."""
    with pq.ParquetFile(path) as file:
        metadata = file.metadata
        if metadata.num_rows > MAX_ROWS:
            raise DataError(f"{path}: the file has {metadata.num_rows:,} rows; at most {MAX_ROWS:,}. {_SPLIT}")
        paths = [file.schema.column(leaf).path for leaf in range(metadata.num_columns)]
        wanted = [leaf for leaf, name in enumerate(paths) if f"{name}.".startswith(tuple(f"{c}." for c in columns))]
        expanding = [leaf for leaf in wanted if _require_bounded_leaf(path, file, leaf)]
    for leaf in expanding:
        num_bytes = 0
        for array, name in _texts_of(path, leaf):
            num_bytes += _expanded_bytes(array)
            _require_bytes(path, name, num_bytes)


def column_names(path: Path) -> list[str]:
    """Return the names of a file's columns. Raises DataError for more than MAX_COLUMNS, and what pyarrow raises."""
    with pq.ParquetFile(path, thrift_container_size_limit=_MAX_LIST) as file:
        names = file.schema_arrow.names
    if len(names) > MAX_COLUMNS:
        raise DataError(f"{path}: the file has {len(names):,} columns; at most {MAX_COLUMNS:,}. {_SPLIT}")
    return names


def _require_bounded_leaf(path: Path, file: pq.ParquetFile, leaf: int) -> bool:
    """Check a leaf by the metadata; return whether its texts may expand beyond the bound."""
    metadata, name = file.metadata, file.schema.column(leaf).path
    chunks = [metadata.row_group(group).column(leaf) for group in range(metadata.num_row_groups)]
    num_values = sum(chunk.num_values for chunk in chunks)
    if num_values > MAX_VALUES:
        raise DataError(f"{path}: column '{name}' has {num_values:,} values; at most {MAX_VALUES:,}. {_SPLIT}")
    _require_bytes(path, name, sum(chunk.total_uncompressed_size for chunk in chunks))
    most = sum(
        chunk.num_values * chunk.total_uncompressed_size for chunk in chunks if _EXPANDING & set(chunk.encodings)
    )
    return most > MAX_BYTES and file.schema.column(leaf).physical_type == "BYTE_ARRAY"


def _require_bytes(path: Path, name: str, num_bytes: int) -> None:
    if num_bytes > MAX_BYTES:
        size, most = num_bytes / 2**30, MAX_BYTES / 2**30
        raise DataError(f"{path}: column '{name}' has {size:,.1f} GiB uncompressed; at most {most:g} GiB. {_SPLIT}")


def _texts_of(path: Path, leaf: int) -> Iterator[tuple[pa.Array, str]]:
    """Yield a leaf's column part by part, and the leaf's path; texts of a dictionary are indices into it."""
    with pq.ParquetFile(path) as file:
        chunks = [file.metadata.row_group(group).column(leaf) for group in range(file.metadata.num_row_groups)]
    # Texts with common prefixes are expanded while they are read; none is longer than the largest chunk.
    has_prefixes = any(_PREFIXES in chunk.encodings for chunk in chunks)
    largest = max(chunk.total_uncompressed_size for chunk in chunks)
    num_rows = max(1, min(2**16, _PART_BYTES // largest)) if has_prefixes else 2**16
    with pq.ParquetFile(path, read_dictionary=None if has_prefixes else [leaf]) as file:
        name = file.schema.column(leaf).path
        for group in range(file.num_row_groups):  # pyarrow cannot read a nested column's part of two dictionaries
            for batch in file.iter_batches(num_rows, row_groups=[group], columns=[name]):
                yield batch.column(0), name


def _expanded_bytes(array: pa.Array) -> int:
    kind = array.type
    if pa.types.is_dictionary(kind):
        lengths = pc.call_function("binary_length", [array.dictionary]).take(array.indices)
        return pc.call_function("sum", [lengths]).as_py() or 0
    if pa.types.is_struct(kind):
        return sum(map(_expanded_bytes, array.flatten()))
    if pa.types.is_map(kind):
        return _expanded_bytes(array.keys) + _expanded_bytes(array.items)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _expanded_bytes(array.flatten())
    return array.nbytes
