"""The columns that a method reads and writes.

The declaration is resolved with the configuration when the method is bound. It is used to send only the columns that
are read, and to check the columns that are returned.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

from hybridflow.errors import DispatchError, FieldError
from hybridflow.protocol import FIELDS, DataProto, DataProtoFuture
from hybridflow.runtime.observe.trace import CONTROLLER, Sources

ColumnsOf = tuple[str, ...] | Callable[[Any], tuple[str, ...]] | None
_BATCHES = (DataProto, DataProtoFuture)
RowsOf = Literal["same", "one"] | int | Callable[[Any], int]


@dataclass(frozen=True)
class MethodColumns:
    """The resolved declaration of one method.

    `where`: the method in error messages, e.g. "ActorWorker.update_actor". `reads`, `writes`: None if not declared.
    `rows_per_row`: output rows per input row; None if the result does not have the rows of the batch.
    """

    where: str
    reads: tuple[str, ...] | None
    writes: tuple[str, ...] | None
    rows_per_row: int | None

    def check_reads(self, values: Sequence[Any]) -> None:
        """Check that the batches among the arguments of a call have every column that is read.

        Raises FieldError for a column missing from all batches. A future with undeclared columns is checked when it is
        read.
        """
        for batches in _batches_of_each_rank(values):
            present = [column for batch in batches for column in columns_of(batch)]
            for column in self.reads or ():
                if column not in present:
                    raise FieldError(self._missing(column, present))

    def select_reads(self, value: Any) -> Any:
        """Reduce batches, also inside a list, to the columns in `reads`; keep meta_info and other arguments."""
        if self.reads is None:
            return value
        if isinstance(value, (list, tuple)) and any(isinstance(element, _BATCHES) for element in value):
            return [self.select_reads(element) for element in value]
        if isinstance(value, DataProtoFuture) and value.is_table:
            return value.select_columns([column for column in self.reads if column in columns_of(value)])
        if isinstance(value, DataProto) and not set(columns_of(value)).issubset(self.reads):
            return select_columns(value, self.reads)
        return value

    def check_output(self, output: Any, rank: int, num_rows: int | None) -> None:
        """Check the output of a rank for a part of `num_rows` rows (None: the batch was not split).

        Raises FieldError for wrong columns, DispatchError for a wrong type or number of rows.
        """
        who = f"{self.where} on rank {rank}"
        if self.writes and not isinstance(output, DataProto):
            raise DispatchError(
                f"{who} returned {type(output).__name__}, but declares writes={self.writes}; return a DataProto."
            )
        if not isinstance(output, DataProto):
            return
        columns = columns_of(output)
        if self.writes is not None and set(columns) != set(self.writes):
            missing, extra = set(self.writes) - set(columns), set(columns) - set(self.writes)
            raise FieldError(
                f"{who} returned {_listed(columns)}, but declares writes={self.writes}: "
                f"missing {_listed(missing)}; not declared {_listed(extra)}."
            )
        if num_rows is None or not columns:
            return
        if self.rows_per_row is None and len(output) > 1:
            raise DispatchError(f"{who} returned {len(output)} rows, but declares rows='one'; correct its rows=...")
        if self.rows_per_row is not None and len(output) != self.rows_per_row * num_rows:
            raise DispatchError(
                f"{who} returned {len(output)} rows for {num_rows}, but declares {self.rows_per_row} for each; "
                f"correct rows=... of its @register, or return {self.rows_per_row * num_rows} rows."
            )

    def _missing(self, column: str, present: list[str]) -> str:
        hint = f" It comes from: {FIELDS[column].producer}." if column in FIELDS and FIELDS[column].producer else ""
        return f"{self.where} needs {column!r}, but the batch has {_listed(present)}.{hint}"


def resolve_columns(where: str, reads: ColumnsOf, writes: ColumnsOf, rows: RowsOf, config: Any) -> MethodColumns:
    """Resolve a declaration: call functions with `config`. Raises DispatchError if the declaration is invalid."""
    return MethodColumns(
        where,
        check_columns(f"{where}: reads", resolved(where, "reads", reads, config)),
        check_columns(f"{where}: writes", resolved(where, "writes", writes, config)),
        check_rows(f"{where}: rows", resolved(where, "rows", rows, config)),
    )


def resolved(where: str, name: str, declared: Any, config: Any) -> Any:
    """Return what a method declares; of a function, what it returns for `config`."""
    if not callable(declared):
        return declared
    if config is None:
        raise DispatchError(
            f"{where} declares {name} as a function of the configuration, but its worker is built without config; "
            f"pass config=... to ClassWithInitArgs."
        )
    return declared(config)


def check_columns(what: str, columns: Any) -> tuple[str, ...] | None:
    """Return `columns` as a tuple of names, or None. Raises DispatchError for any other value."""
    if columns is None:
        return None
    if (
        isinstance(columns, str)
        or not isinstance(columns, Iterable)
        or not all(isinstance(column, str) for column in columns)
    ):
        raise DispatchError(f"{what}={columns!r} is invalid: expected a tuple of column names, e.g. ('input_ids',).")
    return tuple(columns)


def check_rows(what: str, rows: Any) -> int | None:
    """Return the output rows per input row, None for "one". Raises DispatchError for any other value."""
    if rows == "one":
        return None
    if rows == "same":
        return 1
    if isinstance(rows, int) and not isinstance(rows, bool) and rows > 0:
        return rows
    raise DispatchError(
        f"{what}={rows!r} is invalid: expected 'same', 'one', a positive number, or a function of the configuration."
    )


def columns_of(batch: DataProto | DataProtoFuture) -> list[str]:
    """Return the names of all columns, tensors first; for a future, the declared columns."""
    if isinstance(batch, DataProtoFuture):
        return list(batch.columns or ())
    tensors = [] if batch.batch is None else [*batch.batch.keys()]  # pyright: ignore
    return [*tensors, *batch.non_tensor_batch]


def select_columns(batch: DataProto, columns: tuple[str, ...]) -> DataProto:
    """Return the batch with only the given columns and its meta_info; missing columns are ignored."""
    return batch.select(
        batch_keys=[column for column in columns if batch.batch is not None and column in batch.batch.keys()],  # noqa: SIM118
        non_tensor_batch_keys=[column for column in columns if column in batch.non_tensor_batch],
    )


def _batches_of_each_rank(values: Sequence[Any]) -> list[list[Any]]:
    """Return, for each rank, the batches it gets: batch arguments, and one element of each list argument.

    Empty if a future with unknown columns must be read first, or if there is no batch.
    """
    if any(isinstance(value, DataProtoFuture) and value.columns is None for value in values):
        return []
    whole = [value for value in values if isinstance(value, _BATCHES)]
    lists = [[v for v in value if isinstance(v, _BATCHES)] for value in values if isinstance(value, (list, tuple))]
    lists = [batches for batches in lists if batches]
    if not lists:
        return [whole] if whole else []
    return [whole + [batch for batch in group if batch is not None] for group in zip_longest(*lists)]


def _listed(columns: Iterable[str]) -> str:
    return ", ".join(sorted(columns)) or "nothing"


def sources_of(values: Iterable[Any]) -> Sources:
    """Return (producer, columns) pairs of the arguments, in order of first occurrence.

    An argument is a batch of the controller, a narrowed future, a handle, a list of these, or another value (ignored).
    """
    found: dict[str, dict[str, None]] = {}
    for value in values:
        for producer, columns in _producers(value):
            if columns:
                found.setdefault(producer or CONTROLLER, {}).update(dict.fromkeys(columns))
    return tuple((producer, tuple(columns)) for producer, columns in found.items())


def _producers(value: Any) -> Iterator[tuple[str, Iterable[str]]]:
    if isinstance(value, DataProto):
        yield CONTROLLER, columns_of(value)
    elif isinstance(value, DataProtoFuture):
        for handle, columns in value.sources():
            yield handle.where, columns
    elif isinstance(value, list | tuple):
        for element in value:
            yield from _producers(element)
    elif hasattr(value, "produced"):
        yield value.where, value.produced


def produced_columns(value: Any) -> tuple[str, ...]:
    """Return the columns of a value; empty if it is not a batch."""
    return tuple(columns_of(value)) if isinstance(value, DataProto) else ()
