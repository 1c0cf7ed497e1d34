"""`ColumnTable`: a map from each column to the shards that hold it and its stored name.

Operations on columns change the map, operations on rows change the index of the shards; only `read` reads contents.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hybridflow.errors import FieldError
from hybridflow.protocol.batch import require_names
from hybridflow.protocol.data_proto import DataProto
from hybridflow.protocol.fields import FIELDS
from hybridflow.protocol.handle import Columns, Handle, wait_for, with_names
from hybridflow.protocol.padding import mark_copies
from hybridflow.protocol.rows import RowIndex
from hybridflow.protocol.shards import Shards
from hybridflow.protocol.side_by_side import join_columns


class StoredColumn(NamedTuple):
    """The location of a column: the number of its shards, and its stored name. Rows with `copies` True hold `fill`."""

    shards: int
    name: str
    copies: np.ndarray | None = None
    fill: Any = None


class ColumnTable:
    """Columns in shards: `places` maps names to locations. A table without columns still has rows and meta_info."""

    __slots__ = ("_names", "places", "shards")

    def __init__(
        self, shards: Sequence[Shards], places: Mapping[str, StoredColumn], names: Sequence[Columns] | None = None
    ) -> None:
        self.shards, self.places, self._names = shards, places, names

    @classmethod
    def of(cls, handles: Sequence[Handle], sizes: Sequence[int], columns: Columns) -> "ColumnTable":
        """Return the table of handles that have `sizes` rows, all with the same columns."""
        return cls([Shards.of(handles, sizes)], {name: StoredColumn(0, name) for name in columns})

    def names_in(self, number: int) -> Columns:
        """Return the stored names of the columns of one of the shards."""
        if self._names is None:
            names: list[dict[str, None]] = [{} for _ in self.shards]
            for place in self.places.values():
                names[place.shards][place.name] = None
            self._names = [tuple(of_shards) for of_shards in names]
        return self._names[number]

    # Rows

    def choose(self, rows: RowIndex) -> "ColumnTable":
        """Return the table of the selected rows."""
        places = self.places
        if any(place.copies is not None for place in places.values()):
            places = {n: p if p.copies is None else p._replace(copies=p.copies[rows]) for n, p in places.items()}
        return ColumnTable([shards.choose(rows) for shards in self.shards], places, self._names)

    def pad(self, num_rows: int, padded: int) -> "ColumnTable":
        """Return the `num_rows` rows followed by copies of the first ones, marked by `duplicate_value`."""
        rows = np.arange(padded)
        table, is_copy, places = self.choose(rows % num_rows), rows >= num_rows, {}
        for name, place in table.places.items():
            fill = FIELDS[name].duplicate_value if name in FIELDS else None
            copies = is_copy if place.copies is None else is_copy | place.copies
            places[name] = place if fill is None else place._replace(copies=copies, fill=fill)
        return ColumnTable(table.shards, places)

    @staticmethod
    def concat(tables: "Sequence[ColumnTable]", lengths: Sequence[int]) -> "ColumnTable":
        """Return the rows of all tables, which have `lengths` rows. Raises FieldError for different columns."""
        first = tables[0].places
        for table in tables:
            if set(table.places) != set(first):
                raise FieldError(
                    f"concat: one future has {tuple(first)}, another has {tuple(table.places)}; "
                    "select the same columns first."
                )
        # Columns that are in the same shards of every table stay together, so that a call still reads them at once.
        groups: dict[tuple[int, ...], list[str]] = {}
        for name in first:
            groups.setdefault(tuple(table.places[name].shards for table in tables), []).append(name)
        shards, places = [], {}
        for number, (of_tables, names) in enumerate((groups or {(0,) * len(tables): []}).items()):
            parts = [table.shards[index] for table, index in zip(tables, of_tables, strict=True)]
            # A column may have another stored name in each table; then all parts are read under its present name.
            if any(table.places[name].name != first[name].name for table in tables for name in names):
                stored = [{name: table.places[name].name for name in names} for table in tables]
                parts = [_renamed(part, names_of_part) for part, names_of_part in zip(parts, stored, strict=True)]
                places |= {name: StoredColumn(number, name) for name in names}
            else:
                places |= {name: StoredColumn(number, first[name].name) for name in names}
            shards.append(Shards.concat(parts))
        for name in first:  # rows that are copies in one of the tables stay so
            marked = next((t.places[name] for t in tables if t.places[name].copies is not None), None)
            if marked is not None:
                masks = [t.places[name].copies for t in tables]
                copies = [np.zeros(n, bool) if mask is None else mask for n, mask in zip(lengths, masks, strict=True)]
                places[name] = places[name]._replace(copies=np.concatenate(copies), fill=marked.fill)
        return ColumnTable(shards, {name: places[name] for name in first})

    # Columns

    def select(self, columns: Sequence[str]) -> "ColumnTable":
        """Return the named columns. Raises FieldError for one that is missing."""
        require_names(columns, self.places, "select: the future")
        return self._with_places({name: self.places[name] for name in columns})

    def rename(self, old: Sequence[str], new: Sequence[str]) -> "ColumnTable":
        """Return the columns under new names, all renamed at once."""
        if len(old) != len(new):
            raise FieldError(
                f"rename: {len(old)} old names and {len(new)} different new names; give one new name per old name."
            )
        require_names(old, self.places, "rename: the future")
        names = dict(zip(old, new, strict=True))
        places = {names.get(name, name): place for name, place in self.places.items()}
        if len(places) < len(self.places):
            has = tuple(self.places)
            raise FieldError(
                f"rename {list(old)} to {list(new)}: the future already has one of the new names; it has {has}."
            )
        return ColumnTable(self.shards, places, self._names)

    def union(self, other: "ColumnTable") -> "ColumnTable":
        """Return the columns of both; a column in both must consist of the same rows of the same shards."""
        mine = self.places
        differing = sorted(name for name in mine if name in other.places and not self._is_same_column(name, other))
        if differing:
            raise FieldError(f"union: both futures have {differing}; select or rename first.")
        shards, number = list(self.shards), {}
        for index, of_other in enumerate(other.shards):
            number[index] = next((own for own, known in enumerate(shards) if known is of_other), len(shards))
            if number[index] == len(shards):  # not shards of this table
                shards.append(of_other)
        more = {n: p._replace(shards=number[p.shards]) for n, p in other.places.items() if n not in mine}
        return ColumnTable(shards, mine)._with_places({**mine, **more})

    # Reading, and sending to a reader in another process

    def narrow(self) -> "ColumnTable":
        """Return the same columns and rows without unused handles, and without unused rows of local batches."""
        shards = [of_one.narrow().without_excess(self.names_in(i)) for i, of_one in enumerate(self.shards)]
        return ColumnTable(shards, self.places, self._names)

    def map_shards(self, change: Callable[[Shards], Shards]) -> "ColumnTable":
        """Return the same columns with `change` applied to the shards."""
        return ColumnTable([change(shards) for shards in self.shards], self.places, self._names)

    def sources(self) -> list[tuple[Handle, Columns]]:
        """Return the handles, each with the stored names of the columns that are read from it."""
        return [source for number, shards in enumerate(self.shards) for source in shards.sources(self.names_in(number))]

    def read(self, columns: Columns | None, meta_info: dict[str, Any]) -> DataProto:
        """Return the contents of the columns (None: all), with `meta_info` and that of the handles' batches."""
        table, parts = (self if columns is None else self.select(columns)).narrow(), []
        wait_for(handle for shards in table.shards for handle in shards.handles)
        for number, shards in enumerate(table.shards):
            names = {name: place.name for name, place in table.places.items() if place.shards == number}
            parts.append(with_names(shards.read(table.names_in(number), meta_info.get("pad_token_id")), names))
        batch = join_columns([*parts, DataProto(meta_info=meta_info)] if meta_info else parts)
        for name, place in table.places.items():
            if place.copies is not None and place.copies.any():
                mark_copies(batch, name, place.copies, place.fill)
        return batch

    def _with_places(self, places: Mapping[str, StoredColumn]) -> "ColumnTable":
        """Return the table of these columns, without the shards that hold none of them."""
        used = sorted({place.shards for place in places.values()})
        if not used or len(used) == len(self.shards):
            return ColumnTable(self.shards, places)
        number = {old: new for new, old in enumerate(used)}
        moved = {name: place._replace(shards=number[place.shards]) for name, place in places.items()}
        return ColumnTable([self.shards[old] for old in used], moved)

    def _is_same_column(self, name: str, other: "ColumnTable") -> bool:
        mine, theirs = self.places[name], other.places[name]
        has_same_copies = _copies_of(mine) == _copies_of(theirs)
        return (
            mine.name == theirs.name
            and has_same_copies
            and self.shards[mine.shards].is_same(other.shards[theirs.shards])
        )


def _copies_of(place: StoredColumn) -> list[int]:
    return [] if place.copies is None else np.flatnonzero(place.copies).tolist()


def _renamed(shards: Shards, names: Mapping[str, str]) -> Shards:
    """Return the shards with each column `names[new]` renamed to `new`."""
    return shards.with_views(
        lambda view: view._replace(names={new: view.stored_name(old) for new, old in names.items()})
    )
