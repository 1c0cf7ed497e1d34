"""The ends of the exchange between the judge, which runs the statements of a test, and the program.

The judge does not trust the program: no answer gives access to objects of the judge that the statements have not
passed, and a message that is not valid ends the judge. code_objects.py has the references to objects of the other end.
"""

from __future__ import annotations

from _thread import RLock
from _weakref import ref
from os import read, write
from sys import getrecursionlimit, setrecursionlimit, version_info
from types import CoroutineType, GeneratorType

from code_objects import (  # beside this file, which runs without hybridflow
    Reference,
    ReferenceClass,
    awaited,
    generated,
    keep_data,
    mirror,
    new_reference,
    origin_of,
    set_origin,
)
from code_operations import OPERATIONS, READING
from code_permissions import permit_attribute
from code_values import (
    PLAIN_TYPES,
    Codec,
    Reader,
    library_error_of_name,
    name_of_library_error,
    name_of_type,
    put_count,
    put_text,
    type_of_name,
)

TYPE_CHECKING = False  # importing `typing` would take longer than all else here
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

MAX_MESSAGE_BYTES = 2**28

_FRAMES = 10
"""At least the frames of these files for a call that arrives while another is under way; they do not count."""

_MAX_NESTED = 150 if version_info[:2] == (3, 12) else 1000
"""Calls that may be under way in one process when the program calls back; Python 3.12 allows 800 frames of C code."""

_MAX_NESTED_DATA = 10
"""Depth of data that is sent with an object; deeper data is asked for, so that no message nests too deeply."""

_ITERATING = ("next", "send")
"""Operations that a StopIteration of the program ends."""


class Peer(Codec):
    """One end of the connection; `trusts` is whether the other end may do everything with the objects of this one.

    `end` ends this process, when the other end has gone or has sent something that is not a message: no statement may
    take that for an exception of the program.
    """

    def __init__(self, connection: int, *, trusts: bool, end: Callable[[], NoReturn]) -> None:
        super().__init__(int(trusts))
        self._end = end
        self._connection, self.trusts, self._lock = connection, trusts, RLock()
        self.operations = dict(OPERATIONS)
        self._exported: dict[int, Any] = {}
        self._export_numbers: dict[int, int] = {}
        self._next_export = 1
        self._references: dict[int, ref[Any]] = {}
        self._dropped: set[int] = set()
        self._classes: dict[int, type] = {}
        self._sent_classes: set[int] = set()
        self._passed_classes: set[int] = set()  # ids of those that are values, not only the class of a value
        self._open: set[int] = set()  # ids of the objects whose data is being sent
        self.num_changes = self._num_served = 0

    def ask(self, operation: str, *operands: Any) -> Any:
        """Return the result of an operation of the other end, or raise its exception; serve it in the meantime."""
        with self._lock:
            changes = operation not in READING
            self._send(("ask", operation, operands), is_nested=self._num_served > 0)
            while True:
                self.num_changes += changes
                kind, *contents = self._receive()
                if kind == "ask":
                    self._serve(*contents)
                    continue
                if kind == "raise":
                    if isinstance(contents[0], StopIteration) and not self.trusts and operation not in _ITERATING:
                        raise RuntimeError("the program raised StopIteration") from contents[0]  # as in a generator
                    raise contents[0]
                return contents[0]

    def serve_forever(self) -> None:
        """Perform the operations that the other end asks for, until it ends this process."""
        while True:
            with self._lock:
                kind, *contents = self._receive()
            if kind != "ask":
                self._end()
            self._serve(*contents)

    def _serve(self, operation: str, operands: tuple[Any, ...]) -> None:
        setrecursionlimit(getrecursionlimit() + _FRAMES)
        self._num_served += 1
        try:
            if self._num_served > _MAX_NESTED:
                raise RecursionError("maximum depth of calls between the statements and the program exceeded")
            if not self.trusts:
                self._permit(operation, operands)
            answer = "answer", self.operations[operation](*operands)
        except BaseException as error:  # the other end decides what it means
            answer = "raise", error
        setrecursionlimit(getrecursionlimit() - _FRAMES)
        self._num_served -= 1
        self._send(answer, is_nested=not self.trusts or self._num_served > 0)

    def _permit(self, operation: str, operands: tuple[Any, ...]) -> None:
        """Raise an error for an operation that would let the program reach the judge's state."""
        is_class = isinstance(operands[0], type)
        is_passed = id(operands[0]) in (self._passed_classes if is_class else self._export_numbers)
        if operation == "call" and not is_passed:
            raise TypeError("the program may call only functions that the test has passed")
        if operation in ("derive", "super") or (operation == "call" and is_class and issubclass(operands[0], type)):
            raise TypeError("the program may not make classes of the test")
        if operation not in ("getattr", "setattr", "delattr"):
            return
        if not is_passed:
            raise AttributeError("the program may use only attributes of objects that the test has passed")
        permit_attribute(operation, *operands[:2])

    def _send(self, message: tuple[Any, ...], *, is_nested: bool) -> None:
        """Send the message; the last of an exchange, which the judge has begun, may end the link of containers."""
        may_unlink = not is_nested and message[0] != "ask"
        dropped, self._dropped = self._dropped, set()
        try:
            contents = self.encode((tuple(dropped), *message), is_nested=is_nested, may_unlink=may_unlink)
            rest = memoryview(len(contents).to_bytes(4, "little") + contents)
            while rest:
                rest = rest[write(self._connection, rest) :]
        except (OSError, RecursionError, MemoryError, OverflowError):
            self._end()  # both ends would no longer agree on what they know

    def _receive(self) -> tuple[Any, ...]:
        """Return the next message; end this process after anything else, which the statements must not see."""
        try:
            length = int.from_bytes(self._take_bytes(4), "little")
            if length > MAX_MESSAGE_BYTES:
                self._end()
            dropped, *message = self.decode(self._take_bytes(length))
            for number in dropped:
                self._forget(number)
            kind, *contents = message
            forms = {"ask": (str, tuple), "answer": (object,), "raise": (BaseException,)}
            if len(contents) != len(forms[kind]) or not all(map(isinstance, contents, forms[kind])):
                self._end()
        except BaseException:
            self._end()
        return tuple(message)

    def _take_bytes(self, length: int) -> bytes:
        chunks = []
        while length:
            chunk = read(self._connection, min(length, 2**20))
            if not chunk:
                self._end()
            chunks.append(chunk)
            length -= len(chunk)
        return b"".join(chunks)

    def put_other(self, out: bytearray, value: Any) -> None:
        """Append a reference: to an object of the other end, or with the class of an object of this end."""
        origin = origin_of(value)
        if origin is not None and origin[0] is self:
            out += b"P"
            put_count(out, origin[1])
        elif isinstance(value, type):
            self._put_class(out, value)
            self._passed_classes.add(id(value))
        elif type(value).__name__ == "_FIELD_BASE":  # whose identity dataclasses.fields() compares
            out += b"f"
            put_text(out, value.name)
        elif isinstance(value, BaseException):
            out += b"X"
            put_count(out, 0 if name_of_type(type(value)) else self._export(value))
            self._put_class(out, type(value))
            self._put_items(out, tuple(value.args))
            self.put(out, value.__cause__)
            self.put(out, tuple(vars(value).items()) if name_of_library_error(type(value)) else ())
        else:
            kind = type(value)
            has_data = self.trusts and issubclass(kind, PLAIN_TYPES)
            is_generator, is_coroutine = kind is GeneratorType, kind is CoroutineType
            out += b"L" if has_data else b"G" if is_generator else b"W" if is_coroutine else b"O"
            put_count(out, self._export(value))
            self._put_class(out, kind)
            if has_data:
                self._put_data(out, value)

    def take_other(self, tag: bytes, reader: Reader) -> Any:
        """Return the object or the class that is referred to."""
        if tag == b"P":
            return self._exported[reader.count()]
        if tag in (b"Y", b"K", b"E"):
            return self._take_class(tag, reader)
        if tag == b"f":
            name = reader.text()
            return next(each for each in _kinds_of_fields() if each.name == name)
        number = reader.count()
        kind = self._take_class(reader.take(1), reader)
        if tag == b"X":
            error = self._exception(kind, tuple(self._take_items(reader)), number)
            error.__cause__ = self.take(reader)
            attributes = dict(self.take(reader))
            if name_of_library_error(kind):
                vars(error).update(attributes)
            return error
        if tag not in (b"O", b"L", b"G", b"W"):
            raise ValueError(f"{tag!r} does not begin a value")
        known = self._references.get(number)
        reference = known() if known is not None else None
        if reference is None:
            reference = new_reference(kind if isinstance(kind, ReferenceClass) else Reference)
            self._refer(number, reference)
        if tag == b"L" and (data := self.take(reader)) is not None:
            (parts,) = data
            keep_data(reference, parts)
        return generated(reference) if tag == b"G" else awaited(reference) if tag == b"W" else reference

    def _put_data(self, out: bytearray, value: Any) -> None:
        """Append a tuple with the plain data of an object; None inside its own data."""
        if id(value) in self._open or len(self._open) >= _MAX_NESTED_DATA:
            self.put(out, None)
            return
        self._open.add(id(value))
        try:
            self.put(out, (self.operations["plain"](value),))
        finally:
            self._open.discard(id(value))

    def _export(self, value: Any) -> int:
        number = self._export_numbers.get(id(value))
        if number is None:
            number, self._next_export = self._next_export, self._next_export + 1
            self._exported[number] = value
            self._export_numbers[id(value)] = number
        return number

    def _forget(self, number: int) -> None:
        del self._export_numbers[id(self._exported.pop(number))]

    def _refer(self, number: int, reference: Any) -> None:
        """Make the object a reference, which the other end may forget when it is gone."""

        def drop(gone: Any) -> None:
            if self._references.get(number) is gone:
                del self._references[number]
                self._dropped.add(number)

        set_origin(reference, self, number)
        self._dropped.discard(number)
        self._references[number] = ref(reference, drop)

    def _put_class(self, out: bytearray, kind: type) -> None:
        origin, name = origin_of(kind), name_of_type(kind)
        if name is not None:
            out += b"Y"
            put_text(out, name)
        elif origin is not None and origin[0] is self:
            out += b"P"
            put_count(out, origin[1])
        else:
            library = name_of_library_error(kind)
            if library is not None:
                out += b"E"
                put_text(out, library)
            is_new = id(kind) not in self._export_numbers or self._export(kind) not in self._sent_classes
            number = self._export(kind)
            out += b"K"
            put_count(out, number)
            bases = kind.__bases__ if is_new else ()
            put_text(out, kind.__name__ if is_new else "")
            put_count(out, len(bases))
            self._sent_classes.add(number)
            for base in bases:
                self._put_class(out, base)

    def _take_class(self, tag: bytes, reader: Reader) -> type:
        if tag == b"Y":
            return type_of_name(reader.text())
        if tag == b"P":
            return self._exported[reader.count()]
        if tag == b"E":
            known = library_error_of_name(reader.text())
            own = self._take_class(reader.take(1), reader)
            return known or own
        if tag != b"K":
            raise ValueError(f"{tag!r} does not begin a class")
        number, name = reader.count(), reader.text()
        bases = [self._take_class(reader.take(1), reader) for _ in range(reader.count())]
        if number not in self._classes:
            self._classes[number] = mirror(self, number, name, bases)
        return self._classes[number]

    def _exception(self, kind: type, args: tuple[Any, ...], number: int) -> BaseException:
        if not issubclass(kind, BaseException):
            raise TypeError(f"{kind.__name__} is not an exception")
        error = kind(*args) if name_of_type(kind) else kind.__new__(kind, *args)
        if number and isinstance(type(error), ReferenceClass):
            self._refer(number, error)
        elif number:
            self._dropped.add(number)
        return error


def _kinds_of_fields() -> list[Any]:
    import dataclasses

    return [each for each in vars(dataclasses).values() if type(each).__name__ == "_FIELD_BASE"]
