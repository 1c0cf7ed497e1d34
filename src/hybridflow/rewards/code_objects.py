"""References to objects of the other process: an operation on a reference is performed where the object lives.

A `Peer` is one end of the exchange between the judge, which runs the statements of a test, and the program. The judge
does not trust the program. What the program answers never decides a comparison with plain data, no answer gives access
to objects of the judge that the statements have not passed, and a message that is not valid ends the judge.
"""

from __future__ import annotations

import _operator as operator
from _thread import RLock
from _weakref import ref
from os import read, write
from sys import getrecursionlimit, setrecursionlimit
from types import (
    AsyncGeneratorType,
    CodeType,
    CoroutineType,
    FrameType,
    GeneratorType,
    MethodType,
    ModuleType,
    TracebackType,
)

from code_values import (  # pyright: ignore[reportMissingImports]  # beside this file, which runs without hybridflow
    PLAIN_TYPES,
    Codec,
    Reader,
    fill,
    name_of_type,
    put_count,
    put_text,
    type_of_name,
)

TYPE_CHECKING = False  # importing `typing` would take longer than all else here
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, NoReturn

MAX_MESSAGE_BYTES = 2**28
_HIDDEN = (GeneratorType, CoroutineType, AsyncGeneratorType, FrameType, TracebackType, CodeType, ModuleType)
"""Types of the judge's objects whose attributes would lead to its state."""

_OF = "_origin_of_reference"
"""Attribute with the peer and the number of a reference."""

_FRAMES = 10
"""At least the frames of this file for a call that arrives while another is under way; they do not count."""

_DATA = "_data_of_reference"
"""Attribute with the number of calls that had been made, and the plain data that a reference had then."""

_NAME_OF_STATEMENTS = "program"


def _kinds_of_fields() -> list[Any]:
    import dataclasses

    return [each for each in vars(dataclasses).values() if type(each).__name__ == "_FIELD_BASE"]


def _run(coroutine: Any) -> Any:
    import asyncio  # takes long

    return asyncio.run(coroutine)


_ACCESS = ("getitem", "setitem", "delitem")
_UNARY = ("index", "abs", "neg", "pos", "inv")
_COMPARISONS = ("eq", "lt", "le", "gt", "ge")
_NUMERIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "matmul")
_BITWISE = ("xor", "lshift", "rshift")
_ARITHMETIC = (*_NUMERIC, *_BITWISE, "and", "or", "pow")

OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, args, kwargs: function(*args, **dict(kwargs)),
    "getattr": getattr,
    "setattr": setattr,
    "delattr": delattr,
    "enter": lambda manager: type(manager).__enter__(manager),
    "exit": lambda manager, kind, error: bool(type(manager).__exit__(manager, kind, error, None)),
    "send": lambda generator, value: generator.send(value),
    "run": _run,
    "plain": lambda value: _plain_data(value),
    "iter": iter,
    "next": next,
    "len": len,
    "bool": bool,
    "str": str,
    "repr": repr,
    "format": format,
    "hash": hash,
    "int": int,
    "float": float,
    "complex": complex,
    "round": round,
    "reversed": reversed,
    "copy": lambda value: __import__("copy").copy(value),
    "deepcopy": lambda value: __import__("copy").deepcopy(value),
    "pow": pow,
    "and": operator.and_,
    "or": operator.or_,
    **{name: getattr(operator, name) for name in (*_ACCESS, *_UNARY, *_COMPARISONS, *_NUMERIC, *_BITWISE)},
}
"""What one end may ask the other to do with its objects."""

_MISSING = object()


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
        self.num_asked = self._num_served = 0

    def ask(self, operation: str, *operands: Any) -> Any:
        """Return the result of an operation of the other end, or raise its exception; serve it in the meantime."""
        with self._lock:
            self.num_asked += 1
            self._send(("ask", operation, operands), is_nested=self._num_served > 0)
            while True:
                kind, *contents = self._receive()
                if kind == "ask":
                    self._serve(*contents)
                    continue
                if kind == "raise":
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
        passed = self._passed_classes if isinstance(operands[0], type) else self._export_numbers
        is_passed = id(operands[0]) in passed
        if operation == "call" and not is_passed:
            raise TypeError("the program may call only functions that the test has passed")
        if operation not in ("getattr", "setattr", "delattr"):
            return
        owner, name = operands[:2]
        is_of_test = type(owner).__module__ == _NAME_OF_STATEMENTS
        is_hidden = type(name) is not str or isinstance(owner, _HIDDEN) or name.startswith("__" if is_of_test else "_")
        if not is_passed or (is_hidden and name != "__name__"):
            raise AttributeError(f"attribute {name!r:.100} of the test's object is not available to the program")
        if operation != "getattr" and not is_of_test:
            raise AttributeError(f"attribute {name!r:.100} of the test's object is read-only for the program")

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
        else:
            kind = type(value)
            out += b"G" if kind is GeneratorType else b"W" if kind is CoroutineType else b"O"
            put_count(out, self._export(value))
            self._put_class(out, kind)

    def take_other(self, tag: bytes, reader: Reader) -> Any:
        """Return the object or the class that is referred to."""
        if tag == b"P":
            return self._exported[reader.count()]
        if tag in (b"Y", b"K"):
            return self._take_class(tag, reader)
        if tag == b"f":
            name = reader.text()
            return next(each for each in _kinds_of_fields() if each.name == name)
        number = reader.count()
        kind = self._take_class(reader.take(1), reader)
        if tag == b"X":
            error = self._exception(kind, tuple(self._take_items(reader)), number)
            error.__cause__ = self.take(reader)
            return error
        if tag not in (b"O", b"G", b"W"):
            raise ValueError(f"{tag!r} does not begin a value")
        known = self._references.get(number)
        reference = known() if known is not None else None
        if reference is None:
            reference = object.__new__(kind if isinstance(kind, ReferenceClass) else Reference)
            object.__setattr__(reference, _DATA, None)
            self._refer(number, reference)
        return _generate(reference) if tag == b"G" else _await(reference) if tag == b"W" else reference

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

        object.__setattr__(reference, _OF, (self, number))
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
        if tag != b"K":
            raise ValueError(f"{tag!r} does not begin a class")
        number, name = reader.count(), reader.text()
        bases = [self._take_class(reader.take(1), reader) for _ in range(reader.count())]
        if number not in self._classes:
            self._classes[number] = self._mirror(number, name, bases)
        return self._classes[number]

    def _mirror(self, number: int, name: str, bases: list[type]) -> type:
        """Return a class that stands for one of the other end: of references, or of exceptions."""
        errors = tuple(base for base in bases if issubclass(base, BaseException))
        if errors:
            forwards = {"__getattr__": _error_attribute, "__str__": _error_text}
            kind = type.__new__(ReferenceClass, name, errors, forwards)
        else:
            mirrors = tuple(base for base in bases if issubclass(base, Reference))
            namespace = {"__slots__": (), "__doc__": _DOC}
            if name == "function":  # the only objects that become methods of a class that has them
                namespace["__get__"] = _bind
            kind = type.__new__(ReferenceClass, name, mirrors or (Reference,), namespace)
            plain = [base for base in bases if base not in mirrors and issubclass(base, PLAIN_TYPES)]
            if plain:
                type.__setattr__(kind, "_plain_type_of_reference", plain[0])
        type.__setattr__(kind, _OF + "_class", (self, number))
        return kind

    def _exception(self, kind: type, args: tuple[Any, ...], number: int) -> BaseException:
        if not issubclass(kind, BaseException):
            raise TypeError(f"{kind.__name__} is not an exception")
        error = kind(*args) if name_of_type(kind) else kind.__new__(kind, *args)
        if number:
            self._refer(number, error)
        return error


def origin_of(value: Any) -> tuple[Peer, int] | None:
    """Return the peer and the number of a reference, or of a class of references; None for anything else."""
    kind = type(value)
    if issubclass(kind, type):
        return vars(value).get(_OF + "_class")
    if kind is Mixed:
        return origin_of(object.__getattribute__(value, "_mixed_origin"))
    if isinstance(kind, ReferenceClass):
        if issubclass(kind, BaseException):
            return vars(value).get(_OF)
        return object.__getattribute__(value, _OF)
    return None


def _ask(operation: str, subject: Any, *operands: Any) -> Any:
    origin = origin_of(subject)
    if origin is None:
        raise TypeError(f"{type(subject).__name__} is not of the other process")
    return origin[0].ask(operation, subject, *operands)


def _forward(operation: str, *exact: type) -> Callable[..., Any]:
    def method(self: Any, *operands: Any) -> Any:
        result = _ask(operation, self, *operands)
        if exact and type(result) not in exact:
            raise TypeError(f"{operation} of {type(self).__name__} gives a {type(result).__name__}")
        return result

    return method


def _call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
    return _ask("call", self, args, tuple(kwargs.items()))


class ReferenceClass(type):
    """Class of a class of the other process; calls, attributes and items of the class are forwarded."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> type:
        """Refuse a subclass, except for the classes of this file."""
        if any(origin_of(base) for base in bases):
            raise TypeError(f"{name}: statements of a test cannot derive from a class of the program")
        return super().__new__(cls, name, bases, namespace)

    __call__ = _call  # pyright: ignore[reportAssignmentType]  # a keyword may be named `self`
    __getattr__ = _forward("getattr")
    __setattr__ = _forward("setattr")
    __delattr__ = _forward("delattr")
    __iter__ = _forward("iter")
    __len__ = _forward("len", int)
    __getitem__ = _forward("getitem")

    def __bool__(cls) -> bool:
        """Return True, as for any class."""
        return True


def _bind(self: Any, instance: Any, owner: type | None = None) -> Any:
    return self if instance is None else MethodType(self, instance)


_DOC = property(lambda self: _ask("getattr", self, "__doc__"))


class Reference(metaclass=ReferenceClass):
    """An object of the other process.

    An operator with plain data of the judge never gives plain data of the program: the difference to an expected
    number could be made up.
    """

    __slots__ = ("__weakref__", _OF, _DATA)

    __call__ = _call
    __getattr__ = _forward("getattr")
    __setattr__ = _forward("setattr")
    __delattr__ = _forward("delattr")
    __getitem__ = _forward("getitem")
    __setitem__ = _forward("setitem")
    __delitem__ = _forward("delitem")
    __iter__ = _forward("iter")
    __next__ = _forward("next")
    __reversed__ = _forward("reversed")
    __len__ = _forward("len", int)
    __bool__ = _forward("bool", bool)
    __str__ = _forward("str", str)
    __repr__ = _forward("repr", str)
    __format__ = _forward("format", str)
    __int__ = _forward("int", int)
    __float__ = _forward("float", float)
    __complex__ = _forward("complex", complex)
    __index__ = _forward("index", int)
    __round__ = _forward("round")
    __abs__ = _forward("abs")
    __neg__ = _forward("neg")
    __pos__ = _forward("pos")
    __invert__ = _forward("inv")
    __enter__ = _forward("enter")
    __copy__ = _forward("copy")

    @property
    def __class__(self) -> type:
        """Return the plain type that the object's class derives from, for isinstance(); else its class."""
        return getattr_static(type(self), "_plain_type_of_reference") or type(self)

    def __deepcopy__(self, memo: Any) -> Any:
        return _ask("deepcopy", self)

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: Any) -> bool:
        suppresses = _ask("exit", self, kind, error)
        return suppresses is True and not isinstance(error, AssertionError)

    def __hash__(self) -> int:
        plain = _plain_of(self)
        return _ask("hash", self) if plain is _MISSING else hash(plain)

    def __eq__(self, other: object) -> bool:
        return _compare("eq", self, other)

    def __lt__(self, other: object) -> bool:
        return _compare("lt", self, other)

    def __le__(self, other: object) -> bool:
        return _compare("le", self, other)

    def __gt__(self, other: object) -> bool:
        return _compare("gt", self, other)

    def __ge__(self, other: object) -> bool:
        return _compare("ge", self, other)


def getattr_static(kind: type, name: str) -> Any:
    """Return an attribute of a class of references or its bases, without asking the other end."""
    return next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)


def _is_trusted(reference: Any) -> bool:
    origin = origin_of(reference)
    return origin is not None and origin[0].trusts


def _plain_of(reference: Any) -> Any:
    """Return the data of an object whose class derives from a plain type; `_MISSING` for any other object.

    Data is asked for once: an object that changes with each comparison would equal one of many.
    """
    kind = getattr_static(type(reference), "_plain_type_of_reference")
    if _is_trusted(reference) or kind is None:
        return _MISSING
    peer = object.__getattribute__(reference, _OF)[0]
    known = object.__getattribute__(reference, _DATA)
    if known is None or (known[0] != peer.num_asked and issubclass(kind, list | dict | set | bytearray)):
        data = peer.ask("plain", reference)
        if type(data) not in PLAIN_TYPES:
            raise TypeError(f"the data of {type(reference).__name__} is a {type(data).__name__}")
        known = peer.num_asked, data
        object.__setattr__(reference, _DATA, known)
    return known[1]


def _plain_data(value: Any) -> Any:
    kind: Any
    for kind in PLAIN_TYPES:
        if isinstance(value, kind):
            if issubclass(kind, list | set | dict):
                data = kind()
                pairs = dict.items(value) if kind is dict else ()
                fill(data, [part for pair in pairs for part in pair] if kind is dict else kind.__iter__(value))
                return data
            if issubclass(kind, tuple | frozenset):
                return kind(kind.__iter__(value))
            if issubclass(kind, str | bytes | bytearray):
                return kind.__getitem__(value, slice(None)) if kind is not str else "".join(str.__iter__(value))
            return kind.__pos__(value)
    raise TypeError(f"{type(value).__name__} does not derive from a plain type")


def _compare(operation: str, reference: Any, other: Any) -> Any:
    """Compare two references at the other end; compare the data of a reference with any other object here."""
    if origin_of(other) is not None or _is_trusted(reference):
        return _ask(operation, reference, other) is True
    plain = _plain_of(reference)
    return NotImplemented if plain is _MISSING else getattr(operator, operation)(plain, other)


class Mixed:
    """An object that the program made of one of its own and of plain data of the judge, such as `vector * 2`.

    It has attributes, items and operators, and compares only with references; it has no number, length or truth.
    """

    __slots__ = ("_mixed_origin",)

    def __init__(self, origin: Any) -> None:
        object.__setattr__(self, "_mixed_origin", origin)

    def __getattr__(self, name: str) -> Any:
        return _ask("getattr", self, name)

    def __getitem__(self, key: Any) -> Any:
        return _ask("getitem", self, key)

    @property
    def __class__(self) -> type:
        """Return the class of the object, for isinstance()."""
        return type(object.__getattribute__(self, "_mixed_origin"))

    def __eq__(self, other: object) -> bool:
        return origin_of(other) is not None and _ask("eq", self, other) is True

    def __hash__(self) -> int:
        return _ask("hash", self)

    def __bool__(self) -> bool:
        raise TypeError("the truth of an object that the program made of the test's data is not known")

    def __str__(self) -> str:
        return str(_ask("str", self))

    def __repr__(self) -> str:
        return str(_ask("repr", self))


def _operate(operation: str, reference: Any, left: Any, right: Any, other: Any) -> Any:
    if _is_trusted(reference):
        return _ask_operator(reference, operation, left, right)
    is_mixed = type(reference) is Mixed or type(other) is Mixed
    if origin_of(other) is not None and not is_mixed:
        return _ask_operator(reference, operation, left, right)
    try:
        result = _ask_operator(reference, operation, left, right)
    except TypeError:
        result = None
    if isinstance(type(result), ReferenceClass):
        return Mixed(result)
    plain = _MISSING if is_mixed else _plain_of(reference)
    if plain is _MISSING:
        return NotImplemented
    operands = [plain if each is reference else each for each in (left, right)]
    return OPERATIONS[operation](*operands)


def _ask_operator(reference: Any, operation: str, left: Any, right: Any) -> Any:
    origin = origin_of(reference)
    assert origin is not None
    return origin[0].ask(operation, left, right)


def _operators(operation: str) -> Iterator[tuple[str, Callable[[Any, Any], Any]]]:
    yield f"__{operation}__", lambda self, other: _operate(operation, self, self, other, other)
    yield f"__r{operation}__", lambda self, other: _operate(operation, self, other, self, other)


for _operation in _ARITHMETIC:
    for _name, _method in _operators(_operation):
        type.__setattr__(Reference, _name, _method)
        setattr(Mixed, _name, _method)


def _error_attribute(self: BaseException, name: str) -> Any:
    if name.startswith("__") or origin_of(self) is None:
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
    return _ask("getattr", self, name)


def _error_text(self: BaseException) -> str:
    text = BaseException.__str__(self) if origin_of(self) is None else _ask("str", self)
    return text if type(text) is str else ""


def _generate(reference: Any) -> Iterator[Any]:
    value = None
    while True:
        try:
            item = _ask("send", reference, value)
        except StopIteration as end:
            return end.value
        value = yield item


async def _await(reference: Any) -> Any:
    return _ask("run", reference)
