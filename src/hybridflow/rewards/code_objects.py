"""References to objects of the other process: an operation on a reference is performed where the object lives.

What the program answers never decides a comparison with plain data of the judge.
"""

from __future__ import annotations

import _operator as operator
import sys
from types import MethodType

from code_operations import (  # beside this file
    ARITHMETIC,
    OPERATIONS,
    made_of,
    members_of,
)
from code_values import PLAIN_TYPES, copy_of, name_of_type

TYPE_CHECKING = False  # importing `typing` would take longer than all else here
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from code_peer import Peer

_OF = "_origin_of_reference"
"""Attribute with the peer and the number of a reference."""

_DATA = "_data_of_reference"
"""Attribute with the number of changes that could have been made, and the plain data that a reference had then."""

_MUTABLE = (list, dict, set, bytearray)
_SET_QUERIES = frozenset(
    ("difference", "intersection", "isdisjoint", "issubset", "issuperset", "symmetric_difference", "union")
)
"""Methods that compare a set with one of the statements."""

_MISSING = object()


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


def _read(operation: str, *exact: type) -> Callable[..., Any]:
    """Return a method that reads the plain data of a reference, or else is forwarded."""
    forward = _forward(operation, *exact)

    def method(self: Any, *operands: Any) -> Any:
        plain = _plain_of(self)
        return forward(self, *operands) if plain is _MISSING else OPERATIONS[operation](plain, *operands)

    return method


def _attribute(self: Any, name: str) -> Any:
    plain = _plain_of(self) if name in _SET_QUERIES else _MISSING
    if isinstance(plain, set | frozenset):
        return getattr(plain, name)
    if name in _SET_QUERIES and sys._getframe(1).f_globals.get("__name__") == "unittest.case":
        raise AttributeError(f"assertSetEqual needs a set, got a {type(self).__name__}")
    return _ask("getattr", self, name)


def _item(self: Any, key: Any) -> Any:
    """Return an item; Counter compares and subtracts by items with the keys of the statements."""
    kind = getattr_static(type(self), "_plain_type_of_reference")
    plain: Any = _plain_of(self) if kind is not None and kind.__name__ == "Counter" else _MISSING
    return _ask("getitem", self, key) if plain is _MISSING else plain[key]


def _call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
    return _ask("call", self, args, tuple(kwargs.items()))


class ReferenceClass(type):
    """Class of a class of the other process; calls, attributes and items of the class are forwarded."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> type:
        """Create the class at the other end if it derives from a class of the other end."""
        origins = [origin_of(base) for base in bases]
        if not any(origins):
            return super().__new__(cls, name, bases, namespace)
        if origins[0] is None or None in origins or issubclass(bases[0], BaseException):
            raise TypeError(f"{name}: statements can derive only from classes of the program that are not exceptions")
        derived = origins[0][0].ask("derive", name, bases, members_of(namespace))
        if "__classcell__" in namespace:
            namespace["__classcell__"].cell_contents = derived
        return derived

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

    If its class derives from a plain type, its data is read when it arrives, and operators, iteration, length and truth
    use this data here. Any other object never gets plain data from an operator with plain data of the judge: the
    difference to an expected number could be made up.
    """

    __slots__ = ("__weakref__", _OF, _DATA)

    __call__ = _call
    __getattr__ = _attribute
    __setattr__ = _forward("setattr")
    __delattr__ = _forward("delattr")
    __getitem__ = _item
    __setitem__ = _forward("setitem")
    __delitem__ = _forward("delitem")
    __iter__ = _read("iter")
    __next__ = _forward("next")
    __reversed__ = _read("reversed")
    __len__ = _read("len", int)
    __bool__ = _read("bool", bool)
    __str__ = _forward("str", str)
    __repr__ = _forward("repr", str)
    __format__ = _forward("format", str)
    __int__ = _read("int", int)
    __float__ = _read("float", float)
    __complex__ = _read("complex", complex)
    __index__ = _read("index", int)
    __round__ = _read("round")
    __abs__ = _read("abs")
    __neg__ = _read("neg")
    __pos__ = _read("pos")
    __invert__ = _read("inv")
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

    __hash__ = _read("hash", int)  # pyright: ignore[reportAssignmentType]

    def __contains__(self, item: Any) -> bool:
        plain = _plain_of(self)
        return any(each is item or each == item for each in iter(self)) if plain is _MISSING else item in plain

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


def mirror(peer: Peer, number: int, name: str, bases: list[type]) -> type:
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
    type.__setattr__(kind, _OF + "_class", (peer, number))
    return kind


def new_reference(kind: type) -> Any:
    """Return a reference of this class, whose origin is still to be set."""
    reference = object.__new__(kind)
    object.__setattr__(reference, _DATA, None)
    return reference


def set_origin(reference: Any, peer: Peer, number: int) -> None:
    """Set the peer and the number of a reference or of an exception."""
    object.__setattr__(reference, _OF, (peer, number))


def getattr_static(kind: type, name: str) -> Any:
    """Return an attribute of a class of references or its bases, without asking the other end."""
    return next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)


def _is_trusted(reference: Any) -> bool:
    origin = origin_of(reference)
    return origin is not None and origin[0].trusts


def keep_data(reference: Any, parts: Any) -> None:
    """Keep the parts of plain data that has arrived with a reference.

    Of an immutable object only the first are kept, of a mutable one only those after something that may change it:
    an object that changes with each comparison would equal one of many.
    """
    kind = getattr_static(type(reference), "_plain_type_of_reference")
    peer, known = object.__getattribute__(reference, _OF)[0], object.__getattribute__(reference, _DATA)
    if kind is None or not _is_outdated(kind, known, peer.num_changes):
        return
    object.__setattr__(reference, _DATA, (peer.num_changes, made_of(kind, parts)))


def _is_outdated(kind: type, known: tuple[int, Any] | None, num_changes: int) -> bool:
    return known is None or (known[0] != num_changes and issubclass(kind, _MUTABLE))


def _plain_of(reference: Any) -> Any:
    """Return the data of an object whose class derives from a plain type; `_MISSING` for any other object."""
    kind = getattr_static(type(reference), "_plain_type_of_reference")
    if kind is None or _is_trusted(reference):
        return _MISSING
    peer = object.__getattribute__(reference, _OF)[0]
    if _is_outdated(kind, object.__getattribute__(reference, _DATA), peer.num_changes):
        keep_data(reference, peer.ask("plain", reference))
    return object.__getattribute__(reference, _DATA)[1]


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

    __iter__ = None  # or Python would iterate by the items, until the program says that there are no more

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
    plain = _MISSING if is_mixed else _plain_of(reference)
    if plain is not _MISSING:
        return OPERATIONS[operation](*(plain if each is reference else each for each in (left, right)))
    if operation in ("sub", "isub") and name_of_type(type(other)) in ("date", "datetime"):
        return NotImplemented  # the days of a difference to the expected date could be made up
    try:
        result = _ask_operator(reference, operation, copy_of(left), copy_of(right))
    except TypeError:
        return NotImplemented
    return Mixed(result) if isinstance(type(result), ReferenceClass) else NotImplemented


def _ask_operator(reference: Any, operation: str, left: Any, right: Any) -> Any:
    origin = origin_of(reference)
    assert origin is not None
    return origin[0].ask(operation, left, right)


def _operate_in_place(operation: str, reference: Any, other: Any) -> Any:
    """Return NotImplemented for plain data, which has the operator itself."""
    has_data = type(reference) is not Mixed and _plain_of(reference) is not _MISSING
    return NotImplemented if has_data else _operate(operation, reference, reference, other, other)


def _operators(operation: str) -> Iterator[tuple[str, Callable[[Any, Any], Any]]]:
    yield f"__{operation}__", lambda self, other: _operate(operation, self, self, other, other)
    yield f"__r{operation}__", lambda self, other: _operate(operation, self, other, self, other)
    if operation != "divmod":
        yield f"__i{operation}__", lambda self, other: _operate_in_place(f"i{operation}", self, other)


for _operation in ARITHMETIC:
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


def generated(reference: Any) -> Iterator[Any]:
    """Return a generator that continues one of the other process."""
    value = None
    while True:
        try:
            item = _ask("send", reference, value)
        except StopIteration as end:
            return end.value
        value = yield item


async def awaited(reference: Any) -> Any:
    """Return a coroutine that runs one of the other process to its end."""
    return _ask("run", reference)
