"""Encoding of values between the judge and the program; knows nothing of references, processes and rewards.

Decoding executes nothing and makes objects of a closed list of types: None, bool, int, float, complex, str, bytes,
Ellipsis, tuple, frozenset, range, and the mutable and standard types below; a subclass of them is not among them.
Everything else is left to a derived class. Mutable containers have numbers: both ends keep a copy, and a message brings
the contents of those that have changed, so that a function may sort the list that it is given. Nesting may be cyclic.
"""

from __future__ import annotations

import struct
import sys
from _operator import is_

TYPE_CHECKING = False  # importing `typing` would take longer than all else here
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

MAX_LINKED_ITEMS = 10_000
"""With more items, containers are no longer kept equal after a call has returned, so that messages stay short."""

MAX_COMPARED_ITEMS = 100
"""With more items, containers are not compared with their last state for each call of a callback."""

PLAIN_TYPES = (int, float, complex, str, bytes, tuple, frozenset, list, dict, set, bytearray)
"""Types whose subclasses have data that can be compared without them."""

_COUNT, _FLOAT, _COMPLEX = struct.Struct("<I"), struct.Struct("<d"), struct.Struct("<dd")
_SURROGATES = "surrogatepass"

_CONTAINERS = ("list", "dict", "set", "bytearray", "deque", "Counter", "OrderedDict", "defaultdict")
_PARTS: dict[str, tuple[type, ...]] = {
    "range": (int, int, int),
    "slice": (object, object, object),
    "Decimal": (str,),
    "Fraction": (int, int),
    "date": (int,) * 3,
    "time": (int,) * 4 + (object,),
    "datetime": (int,) * 7 + (object,),
    "timedelta": (int,) * 3,
    "timezone": (object,),
    **dict.fromkeys(("dict_keys", "dict_values", "dict_items"), (tuple,)),
    **dict.fromkeys(("PosixPath", "PurePosixPath"), (str,)),
}
"""Immutable types and the exact types of the arguments that make them; `object` is any."""

_MODULES = {
    **dict.fromkeys(("deque", "Counter", "OrderedDict", "defaultdict"), "collections"),
    "Decimal": "decimal",
    "Fraction": "fractions",
    **dict.fromkeys(("date", "time", "datetime", "timedelta", "timezone"), "datetime"),
    **dict.fromkeys(("PosixPath", "PurePosixPath"), "pathlib"),
}
"""Module of each type that is not built in; it is imported when such a value arrives."""

_BUILT_IN: dict[type, str] = {
    each: each.__name__
    for each in vars(__import__("builtins")).values()
    if isinstance(each, type)
    and (each in (*PLAIN_TYPES, object, bool, range, slice) or issubclass(each, BaseException))
    and each.__module__ == "builtins"
}
_BUILT_IN |= {type(view): type(view).__name__ for view in ({}.keys(), {}.values(), {}.items())}
_MAKERS: dict[str, Callable[..., Any]] = {
    "dict_keys": lambda items: dict.fromkeys(items).keys(),
    "dict_values": lambda items: dict(enumerate(items)).values(),
    "dict_items": lambda items: dict(items).items(),
}
_BUILT_IN_BY_NAME = {name: each for each, name in _BUILT_IN.items()}


def name_of_type(kind: type) -> str | None:
    """Return the name of a type that both ends have; None for any other."""
    if kind in _BUILT_IN:
        return _BUILT_IN[kind]
    name = kind.__name__
    module = sys.modules.get(_MODULES.get(name, ""))
    return name if module is not None and vars(module).get(name) is kind else None


def type_of_name(name: str) -> type:
    """Return the type with this `name_of_type`; raise KeyError for any other name."""
    return _BUILT_IN_BY_NAME.get(name) or vars(__import__(_MODULES[name]))[name]


def name_of_library_error(kind: type) -> str | None:
    """Return module and name of an exception of the standard library that is not built in; None for any other type.

    Exceptions by which `unittest` and `doctest` skip a test, and a cancellation, are not among them.
    """
    module = kind.__module__
    if not issubclass(kind, Exception) or type(module) is not str or module == "builtins":
        return None
    package = module.partition(".")[0]
    is_known = package in sys.stdlib_module_names and package not in ("unittest", "doctest")
    return f"{module}:{kind.__qualname__}" if is_known else None


def library_error_of_name(name: str) -> type | None:
    """Return the exception with this `name_of_library_error`; None if its module has not been imported here."""
    module, _, kind_name = name.partition(":")
    kind = vars(sys.modules[module]).get(kind_name) if module in sys.modules else None
    return kind if isinstance(kind, type) and name_of_library_error(kind) == name else None


class Reader:
    """A message and the position in it; raises IndexError at its end."""

    def __init__(self, message: bytes) -> None:
        self._message, self._at = message, 0

    def take(self, length: int) -> bytes:
        """Return the next bytes."""
        start, self._at = self._at, self._at + length
        if self._at > len(self._message):
            raise IndexError("the message is too short")
        return self._message[start : self._at]

    def count(self) -> int:
        """Return the next count or number."""
        return _COUNT.unpack(self.take(4))[0]

    def sized(self) -> bytes:
        """Return the next bytes, whose length precedes them."""
        return self.take(self.count())

    def text(self) -> str:
        """Return the next text."""
        return self.sized().decode("utf-8", _SURROGATES)


def put_count(out: bytearray, count: int) -> None:
    """Append a count or number."""
    out += _COUNT.pack(count)


def put_sized(out: bytearray, contents: bytes) -> None:
    """Append bytes with their length."""
    out += _COUNT.pack(len(contents))
    out += contents


def put_text(out: bytearray, text: str) -> None:
    """Append a text."""
    put_sized(out, text.encode("utf-8", _SURROGATES))


class Codec:
    """One end of the exchange; `first_number` is 0 at one end and 1 at the other."""

    def __init__(self, first_number: int) -> None:
        self._next_number = first_number
        self._containers: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}  # by id
        self._snapshots: dict[int, list[Any]] = {}
        self._new: list[int] = []
        self._is_decoding = False

    def encode(self, value: Any, *, is_nested: bool = False, may_unlink: bool = False) -> bytes:
        """Return a message with the value and what has changed in containers that both ends have.

        If they have many items, changes wait for a message that is not nested in a call, and with `may_unlink` both
        ends stop keeping the containers equal after this message.
        """
        num_items = sum(map(len, self._containers.values()))
        waits = self._is_decoding or (is_nested and num_items > MAX_COMPARED_ITEMS)
        known = [] if waits else list(self._containers)
        body, contents, self._new = bytearray(), bytearray(), []
        self.put(body, value)
        queue = [number for number in known if not self._is_same(number)]
        num_changed, done = len(queue), 0
        definitions = bytearray()
        while queue or done < len(self._new):
            if not queue:
                queue.append(self._new[done])
                done += 1
                self._put_definition(definitions, queue[0])
            number = queue.pop(0)
            put_count(contents, number)
            self._put_contents(contents, self._containers[number])
            self._snapshots[number] = _items(self._containers[number])
        out = bytearray()
        is_full = may_unlink and num_items > MAX_LINKED_ITEMS
        unused = list(self._containers) if is_full else self._unused(known)
        put_count(out, len(unused))
        for number in unused:
            put_count(out, number)
        put_count(out, done)
        out += definitions
        put_count(out, num_changed + done)
        out += contents
        out += body
        for number in unused:
            self._unlink(number)
        return bytes(out)

    def decode(self, message: bytes) -> Any:
        """Return the value of a message; raise any `Exception` if the message is not valid."""
        reader, outer = Reader(message), self._is_decoding
        self._is_decoding = True
        try:
            unused = [reader.count() for _ in range(reader.count())]
            for _ in range(reader.count()):
                number = reader.count()
                self._link(number, self._take_definition(reader))
            for _ in range(reader.count()):
                number = reader.count()
                container = self._containers[number]
                self._take_contents(reader, container)
                self._snapshots[number] = _items(container)
            value = self.take(reader)
        finally:
            self._is_decoding = outer
        for number in unused:
            self._unlink(number)
        return value

    def put(self, out: bytearray, value: Any) -> None:
        """Append a value."""
        kind = type(value)
        writer = _WRITERS.get(kind)
        if writer is not None:
            writer(self, out, value)
            return
        name = name_of_type(kind)
        if name in _CONTAINERS:
            out += b"@"
            put_count(out, self._number_of(value))
        elif name in _PARTS and (parts := _parts(name, value)) is not None:
            out += b"V"
            put_text(out, name)
            self._put_items(out, parts)
        else:
            self.put_other(out, value)

    def take(self, reader: Reader) -> Any:
        """Return the next value."""
        tag = reader.take(1)
        taker = _TAKERS.get(tag)
        return taker(self, reader) if taker is not None else self.take_other(tag, reader)

    def put_other(self, out: bytearray, value: Any) -> None:
        """Append a value of another type."""
        raise TypeError(f"a {type(value).__name__} cannot be sent")

    def take_other(self, tag: bytes, reader: Reader) -> Any:
        """Return a value of another type."""
        raise ValueError(f"{tag!r} does not begin a value")

    def _put_items(self, out: bytearray, items: list[Any] | tuple[Any, ...]) -> None:
        put_count(out, len(items))
        kinds = set(map(type, items))
        for kind, code in ((int, b"q"), (float, b"d")):
            if kinds == {kind}:
                try:
                    packed = struct.pack(f"<{len(items)}{code.decode()}", *items)
                except struct.error:  # a larger integer
                    break
                out += code
                out += packed
                return
        out += b"*"
        for item in items:
            self.put(out, item)

    def _take_items(self, reader: Reader) -> Iterable[Any]:
        count, code = reader.count(), reader.take(1)
        if code in (b"q", b"d"):
            return struct.unpack(f"<{count}{code.decode()}", reader.take(8 * count))
        return [self.take(reader) for _ in range(count)]

    def _put_definition(self, out: bytearray, number: int) -> None:
        container = self._containers[number]
        name = name_of_type(type(container))
        put_count(out, number)
        put_text(out, name or "")
        self.put(
            out, getattr(container, {"deque": "maxlen", "defaultdict": "default_factory"}.get(name or "", ""), None)
        )

    def _take_definition(self, reader: Reader) -> Any:
        name, setting = reader.text(), self.take(reader)
        if name not in _CONTAINERS:
            raise ValueError(f"{name!r} is not a container")
        kind = type_of_name(name)
        return kind((), setting) if name == "deque" else kind(setting) if name == "defaultdict" else kind()

    def _put_contents(self, out: bytearray, container: Any) -> None:
        if isinstance(container, bytearray):
            put_sized(out, bytes(container))
        else:
            self._put_items(out, _items(container))

    def _take_contents(self, reader: Reader, container: Any) -> None:
        fill(container, reader.sized() if isinstance(container, bytearray) else self._take_items(reader))

    def _number_of(self, container: Any) -> int:
        number = self._numbers.get(id(container))
        if number is None:
            number, self._next_number = self._next_number, self._next_number + 2
            self._link(number, container)
            self._new.append(number)
        return number

    def _link(self, number: int, container: Any) -> None:
        self._containers[number] = container
        self._numbers[id(container)] = number

    def _unlink(self, number: int) -> None:
        if number in self._containers:
            del self._numbers[id(self._containers.pop(number))]
            self._snapshots.pop(number, None)

    def _is_same(self, number: int) -> bool:
        items, before = _items(self._containers[number]), self._snapshots.get(number, [])
        return len(items) == len(before) and all(map(is_, items, before))

    def _unused(self, numbers: list[int]) -> list[int]:
        """Return the numbers of containers that only this object refers to."""
        containers = self._containers
        return [number for number in numbers if sys.getrefcount(containers[number]) <= _REFERENCES_OF_UNUSED]


def fill(container: Any, items: Iterable[Any]) -> None:
    """Replace the contents of a container; keys and values of a dict alternate."""
    if isinstance(container, list | bytearray):
        container[:] = items
        return
    container.clear()
    if isinstance(container, dict):
        pairs = iter(items)
        for key in pairs:
            container[key] = next(pairs)
    elif isinstance(container, set):
        container.update(items)
    else:
        container.extend(items)


def copy_of(value: Any, copies: dict[int, Any] | None = None) -> Any:
    """Return a value whose mutable containers are copies."""
    copies = {} if copies is None else copies
    if type(value) is tuple:
        return tuple(copy_of(item, copies) for item in value)
    if name_of_type(type(value)) not in _CONTAINERS:
        return value
    if id(value) not in copies:
        copies[id(value)] = copied = value.copy()
        if type(value) is not bytearray:
            fill(copied, [copy_of(item, copies) for item in _items(value)])
    return copies[id(value)]


def _items(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [part for pair in container.items() for part in pair]
    return list(container)


def _parts(name: str, value: Any) -> tuple[Any, ...] | None:
    zone = getattr(value, "tzinfo", None)
    if zone is not None and name_of_type(type(zone)) != "timezone":
        return None
    if name == "timezone":
        return (value.utcoffset(None),)
    if name.startswith("dict_"):
        return (tuple(value),)
    if name in ("Decimal", "PosixPath", "PurePosixPath"):
        return (str(value),)
    if name in ("range", "slice"):
        return value.start, value.stop, value.step
    if name == "Fraction":
        return value.numerator, value.denominator
    if name == "timedelta":
        return value.days, value.seconds, value.microseconds
    fields = ("year", "month", "day", "hour", "minute", "second", "microsecond")
    parts = tuple(getattr(value, field) for field in fields if hasattr(value, field))
    return parts if name == "date" else (*parts, zone)


_TABLE = {0: []}
_REFERENCES_OF_UNUSED = sys.getrefcount(_TABLE[0])


def _put_tag(tag: bytes) -> Callable[[Codec, bytearray, Any], None]:
    def put(codec: Codec, out: bytearray, value: Any) -> None:
        out += tag

    return put


def _put_bool(codec: Codec, out: bytearray, value: bool) -> None:
    out += b"T" if value else b"F"


def _put_int(codec: Codec, out: bytearray, value: int) -> None:
    out += b"I"
    put_sized(out, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _put_float(codec: Codec, out: bytearray, value: float) -> None:
    out += b"D"
    out += _FLOAT.pack(value)


def _put_complex(codec: Codec, out: bytearray, value: complex) -> None:
    out += b"C"
    out += _COMPLEX.pack(value.real, value.imag)


def _put_str(codec: Codec, out: bytearray, value: str) -> None:
    out += b"S"
    put_text(out, value)


def _put_bytes(codec: Codec, out: bytearray, value: bytes) -> None:
    out += b"B"
    put_sized(out, value)


def _put_tuple(codec: Codec, out: bytearray, value: tuple[Any, ...]) -> None:
    out += b"("
    codec._put_items(out, value)


def _put_frozenset(codec: Codec, out: bytearray, value: frozenset[Any]) -> None:
    out += b"{"
    codec._put_items(out, tuple(value))


_WRITERS: dict[type, Callable[[Codec, bytearray, Any], None]] = {
    type(None): _put_tag(b"N"),
    type(...): _put_tag(b"."),
    bool: _put_bool,
    int: _put_int,
    float: _put_float,
    complex: _put_complex,
    str: _put_str,
    bytes: _put_bytes,
    tuple: _put_tuple,
    frozenset: _put_frozenset,
}


def _take_parts(codec: Codec, reader: Reader) -> Any:
    name, parts = reader.text(), tuple(codec._take_items(reader))
    kinds = _PARTS[name]
    if len(parts) != len(kinds) or not all(
        kind in (object, type(part)) for kind, part in zip(kinds, parts, strict=True)
    ):
        raise TypeError(f"a {name} is not made of {parts!r:.100}")
    return _MAKERS.get(name, type_of_name(name))(*parts)


_TAKERS: dict[bytes, Callable[[Codec, Reader], Any]] = {
    b"N": lambda codec, reader: None,
    b".": lambda codec, reader: ...,
    b"T": lambda codec, reader: True,
    b"F": lambda codec, reader: False,
    b"I": lambda codec, reader: int.from_bytes(reader.sized(), "little", signed=True),
    b"D": lambda codec, reader: _FLOAT.unpack(reader.take(8))[0],
    b"C": lambda codec, reader: complex(*_COMPLEX.unpack(reader.take(16))),
    b"S": lambda codec, reader: reader.text(),
    b"B": lambda codec, reader: reader.sized(),
    b"(": lambda codec, reader: tuple(codec._take_items(reader)),
    b"{": lambda codec, reader: frozenset(codec._take_items(reader)),
    b"@": lambda codec, reader: codec._containers[reader.count()],
    b"V": _take_parts,
}
