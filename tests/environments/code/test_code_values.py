"""The encoding of values of a program: plain data, what is left of objects, limits, and random bytes."""

import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from contextlib import suppress
from decimal import Decimal
from enum import Enum, IntFlag
from fractions import Fraction

import pytest

from hybridflow.environments.code.code_values import MAX_DEPTH, MAX_HASHED, Opaque, decode, encode

VALUES = [
    *(None, ..., True, False, 0, -1, 255, -(2**63), 2**63, 10**1000, 1.5, -0.0, float("inf"), 1j),
    *("", "a", "\0", "é", "\ud800", b"", b"\xff", (), (1, (2, ("a",))), frozenset({1, "a"}), range(1, 9, 2)),
    *([], [1, 2], [1.0, 2], [2**70], [True], ["a", None], {}, {1: [2], "a": {"b": frozenset({3})}}),
    *(Decimal("1.50"), Fraction(1, 3)),
]

Point = namedtuple("Point", "x y")


class Lying(list):
    """Claims other contents than it has."""

    __eq__ = lambda self, other: True  # noqa: E731
    __iter__ = lambda self: iter([1, 2])  # noqa: E731
    __len__ = lambda self: 2  # noqa: E731


class Flag(IntFlag):
    ONE = 1


def test_values_arrive_with_their_exact_types():
    for value in VALUES:
        arrived = decode(encode(value))
        assert repr(arrived) == repr(value)
        assert type(arrived) is type(value)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (Point(1, 2), (1, 2)),
        (Counter("aab"), {"a": 2, "b": 1}),
        (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (defaultdict(list, a=[1]), {"a": [1]}),
        ({1, 2}, frozenset({1, 2})),
        ({1: 2}.keys(), frozenset({1})),
        ({1: 2}.items(), frozenset({(1, 2)})),
        (bytearray(b"ab"), b"ab"),
        (Flag.ONE, 1),
        (Lying([7]), [7]),
    ],
)
def test_a_subclass_arrives_as_its_plain_type(value, wanted):
    arrived = decode(encode(value))
    assert arrived == wanted
    assert type(arrived) is type(wanted)


def test_only_the_truth_of_any_other_object_arrives():
    class Kind(Enum):
        RED = 1

    for value, truth in ((object(), True), (Kind.RED, True), (deque(), False), (deque([1]), True), (len, True)):
        (arrived,) = decode(encode([value]))
        assert type(arrived) is Opaque
        assert bool(arrived) is truth
        assert arrived != value


def test_a_value_that_is_too_large_to_compare_is_refused():
    deep = []
    for _ in range(MAX_DEPTH):
        deep = [deep]
    assert decode(encode(deep)) == deep
    with pytest.raises(RecursionError):
        encode([deep])
    many = encode({"x": set(range(MAX_HASHED)), "y": {1: 2}})
    too_long = (encode(range(2**22)), encode(range(10**30)))
    for message in (many, *too_long, encode(Fraction(3**9000, 2)), encode(Decimal("1" * 2000)), b"[" * 2**22):
        with pytest.raises(ValueError, match=r"too many|limited size|not valid"):
            decode(message)
    assert len(decode(many, max_hashed=MAX_HASHED + 3)["x"]) == MAX_HASHED


@pytest.mark.parametrize("size", [1, 13, 100])
def test_damaged_messages_are_value_errors(size):
    generator, valid = random.Random(0), encode(VALUES)
    parts = [*"[]{}:,09.-e", '"["', '"("', '"{"', '":"', '"I"', '"r"', '"/"', '"e"', '"O"', "null", "NaN", '"\\ud800"']
    for _ in range(300):
        message = "".join(generator.choice(parts) for _ in range(size)).encode()
        damaged = bytearray(valid)
        for _ in range(size // 10 + 1):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        with pytest.raises(ValueError, match=r"Expecting|Unterminated|Invalid"):
            decode(valid[: generator.randrange(len(valid))])
        for each in (message, bytes(damaged)):
            with suppress(ValueError):
                decode(each)
