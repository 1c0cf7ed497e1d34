"""Values of rows as plain Python, whichever file or library they come from, and as JSON that keeps their types."""

import datetime
import json
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from hybridflow.errors import DataError

_MARK = "hybridflow:"
"""Begins the only key of an object that stands in JSON for a value of `_KINDS`."""

_KINDS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "microseconds": (
        datetime.timedelta,
        lambda value: value // datetime.timedelta(microseconds=1),
        lambda number: datetime.timedelta(microseconds=number),
    ),
    "decimal": (Decimal, str, Decimal),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
}
"""Name -> (type, a value of it in JSON, and back); the first type that fits counts."""


def plain_row(record: Mapping[Any, Any], place: str, *, keep_nulls: bool = True) -> dict[str, Any]:
    """Return a row with plain values: lists for arrays and tuples, None for NaN, NaT and NA.

    `keep_nulls=False` drops the null fields within its values, for rows of a table, which have the keys of all rows.
    Raises DataError, naming the column, for a value that is not a text, number, time, list or dict, for a key that is
    not a text, for text that is not valid Unicode, and for a value that holds itself.
    """
    row = {}
    for name, value in record.items():
        if not isinstance(name, str):
            raise DataError(f"{place} has the column {name!r:.100}; the name of a column must be a text.")
        try:
            row[_text(name)] = plain(value, keep_nulls)
        except UnicodeEncodeError as error:
            text = error.object[max(error.start - 20, 0) : error.start + 20]
            raise DataError(
                f"{place}: column {name!r:.100}: the text {text!r} is not valid Unicode ({error.reason}); correct it, "
                "or remove the row."
            ) from None
        except TypeError as error:
            raise DataError(f"{place}: column {name!r:.100} has {error}.") from None
        except RecursionError:
            raise DataError(f"{place}: column {name!r:.100} is nested too deeply, or holds itself.") from None
        except KeyError as error:
            raise DataError(
                f"{place}: column {name!r:.100} has the key {error.args[0]!r:.100}; keys in values must be texts."
            ) from None
    return row


def plain(value: Any, keep_nulls: bool) -> Any:
    """Return one value of `plain_row`; raise UnicodeEncodeError, RecursionError, KeyError or TypeError for another."""
    if isinstance(value, str):
        return value if type(value) is str and value.isascii() else _text(value)
    if value is None or isinstance(value, int):  # also a bool
        return value
    if isinstance(value, float):
        return None if value != value else value if type(value) is float else float(value)
    if isinstance(value, (dict, Mapping)):
        fields = {_key(key): plain(each, keep_nulls) for key, each in value.items()}
        return fields if keep_nulls else {key: each for key, each in fields.items() if each is not None}
    if isinstance(value, (list, tuple)):
        return [plain(each, keep_nulls) for each in value]
    return _of_library(value, keep_nulls)


def _key(key: Any) -> str:
    if type(key) is str and key.isascii():
        return key
    if not isinstance(key, str):
        raise KeyError(key)
    return _text(key)


def _text(value: str) -> str:
    if not value.isascii():
        value.encode()  # raises UnicodeEncodeError for half of a surrogate pair
    return value if type(value) is str else str.__str__(value)


def _of_library(value: Any, keep_nulls: bool) -> Any:
    """Return a value of numpy, pandas or torch, known by its methods, as one of Python; raise TypeError for others."""
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    if getattr(getattr(value, "dtype", None), "kind", "") in ("m", "M"):  # tolist() makes numbers of nanoseconds
        value = value.astype(f"{value.dtype.kind}8[us]")
    if hasattr(value, "tolist"):
        return plain(value.tolist(), keep_nulls)
    for name in ("to_pydatetime", "to_pytimedelta"):
        if hasattr(value, name):
            return getattr(value, name)(**({"warn": False} if name == "to_pydatetime" else {}))
    if not isinstance(value, tuple(kind for kind, _, _ in _KINDS.values())):
        raise TypeError(f"a value of the type {type(value).__name__}; expected texts, numbers, times, lists and dicts")
    return value


def to_json(value: Any) -> str:
    """Return a plain value as JSON."""
    return json.dumps(value, ensure_ascii=False, default=_marked)


def from_json(text: str) -> Any:
    """Return the value of a JSON text, also one of `to_json`."""
    hook = _unmarked if _MARK in text else None
    return json.loads(text, object_hook=hook, parse_constant=lambda name: None if name == "NaN" else float(name))


def _marked(value: Any) -> dict[str, Any]:
    for name, (kind, write, _) in _KINDS.items():
        if isinstance(value, kind):
            return {f"{_MARK}{name}": write(value)}
    raise TypeError(f"{type(value).__name__} is not a plain value")


def _unmarked(fields: dict[str, Any]) -> Any:
    name = next(iter(fields), "")
    if len(fields) == 1 and name.startswith(_MARK) and name.removeprefix(_MARK) in _KINDS:
        return _KINDS[name.removeprefix(_MARK)][2](fields[name])
    return fields
