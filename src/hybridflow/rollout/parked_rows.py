"""Rows of a cache whose sequences have ended and are kept: they stay until a request goes on with one."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hybridflow.models.kv_cache import KeysValues, KVCache


@dataclass(eq=False)
class ParkedRow:
    """A parked row at present, and the number of its tokens."""

    rows: "ParkedRows"
    row: int
    length: int

    def copy(self) -> KeysValues:
        """Copy the row's keys and values."""
        return self.rows.cache.row(self.row, self.length)

    def release(self) -> None:
        """Give the row up; it is dropped when others move."""
        self.rows.release(self)


class ParkedRows:
    """The parked rows of one cache. They stand after those that run, and behind them there are no others."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self._rows: dict[ParkedRow, None] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def num_below(self, row: int) -> int:
        """Return how many have ended but not moved: they are before this row."""
        return sum(parked.row < row for parked in self._rows)

    def add(self, row: int, length: int) -> ParkedRow:
        """Park a row with its first `length` tokens."""
        parked = ParkedRow(self, row, length)
        self._rows[parked] = None
        return parked

    def release(self, parked: ParkedRow) -> None:
        """Give a row up, or take it for a sequence that runs."""
        del self._rows[parked]

    def move_after(self, front: Sequence[int]) -> None:
        """Let the rows `front` be the first ones, in this order, and the other parked rows follow; drop all others."""
        first = set(front)
        others = [parked.row for parked in self._rows if parked.row not in first]
        order = [*front, *in_places(others, len(front))]
        self.cache.keep(order)
        places = {row: place for place, row in enumerate(order)}
        for parked in self._rows:
            parked.row = places[parked.row]


def in_places(rows: Iterable[int], first: int) -> list[int]:
    """Return rows in an order for the places from `first` on in which those that are there already stay."""
    given = sorted(rows)
    places = range(first, first + len(given))
    others = iter([row for row in given if row not in places])
    staying = set(given).intersection(places)
    return [place if place in staying else next(others) for place in places]
