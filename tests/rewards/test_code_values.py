"""The encoding between the judge and the program: values, containers that both ends keep, and random bytes."""

import json
import random
import struct
import unittest
from collections import Counter, OrderedDict, defaultdict, deque
from contextlib import suppress
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest

from hybridflow.rewards.code_values import (
    MAX_LINKED_ITEMS,
    Codec,
    copy_of,
    library_error_of_name,
    name_of_library_error,
)

VALUES = [
    *(None, ..., True, False, 0, -1, 255, -(2**63), 2**63, 10**1000, 1.5, -0.0, float("inf"), 1j),
    *("", "a", "\0", "é", "\ud800", b"", b"\xff", (), (1, (2, ("a",))), frozenset({1, "a"}), range(1, 9, 2)),
    *([], [1, 2], [1.0, 2.0], [1, 2.0], [2**70], [True], ["a", None], {}, {1: [2], "a": {3}}, {1, 2}, bytearray(b"ab")),
    *(deque([1], 3), Counter("aab"), OrderedDict(a=1, b=2), defaultdict(list, a=[1]), Decimal("1.50"), Fraction(1, 3)),
    *(date(2020, 2, 3), time(1, 2), datetime(2020, 2, 3, 4, 5, 6, 7), timedelta(1, 2, 3), UTC, Path("a/b")),
    *(datetime(2020, 1, 1, tzinfo=UTC), time(1, tzinfo=timezone(timedelta(hours=-2))), slice(1, None), int, KeyError),
    *({1: 2}.keys(), {1: 2}.values(), {1: 2}.items()),
]


class Types(Codec):
    """An end that also sends types, as the derived class does."""

    def put_other(self, out, value):
        out += b"t" + bytes([{int: 0, KeyError: 1, list: 2}[value]])

    def take_other(self, tag, reader):
        if tag != b"t":
            return super().take_other(tag, reader)
        return (int, KeyError, list)[reader.take(1)[0]]


@pytest.fixture
def ends():
    return Types(0), Types(1)


def test_values_arrive_with_their_exact_types(ends):
    for value in VALUES:
        arrived = ends[1].decode(ends[0].encode(value))
        assert repr(arrived) == repr(value)
        assert type(arrived) is type(value)


def test_shared_cyclic_and_deep_containers_arrive_as_such(ends):
    row = [0]
    rows = [row, row, {"self": None}]
    rows[2]["self"] = rows
    arrived = ends[1].decode(ends[0].encode((rows, row)))
    assert arrived[0][0] is arrived[0][1] is arrived[1]
    assert arrived[0][2]["self"] is arrived[0]
    value = inner = []
    for _ in range(10_000):
        inner.append([])
        inner = inner[0]
    arrived, depth = ends[1].decode(ends[0].encode(value)), 0
    while arrived:
        arrived, depth = arrived[0], depth + 1
    assert depth == 10_000


def test_a_copy_shares_no_mutable_container():
    inner = deque([1], 3)
    value = ([inner, inner], {"a": {1}}, defaultdict(list, b=[2]), Counter("aab"), bytearray(b"ab"))
    value[0].append(value[0])
    copied = copy_of(value)
    assert repr(copied) == repr(value)
    assert copied[0][0] is copied[0][1] is not inner
    assert copied[0][2] is copied[0] is not value[0]
    assert copied[1]["a"] is not value[1]["a"]
    assert all(ours is not theirs for ours, theirs in zip(copied, value, strict=True))


def test_exceptions_of_the_library_have_names_unless_they_skip_tests():
    class Own(ValueError):
        pass

    assert name_of_library_error(json.JSONDecodeError) == "json.decoder:JSONDecodeError"
    assert library_error_of_name("json.decoder:JSONDecodeError") is json.JSONDecodeError
    assert name_of_library_error(unittest.SkipTest) is name_of_library_error(Own) is None
    for name in ("unittest.case:SkipTest", "json.decoder:JSONDecoder", "json.decoder:Other", "antigravity:Error"):
        assert library_error_of_name(name) is None


def test_changes_of_a_container_arrive_at_the_end_that_made_it(ends):
    ours, theirs = ends
    items, table = [3, 1, 2], {"a": [1]}
    their_items, their_table = theirs.decode(ours.encode((items, table)))
    their_items.sort()
    their_table["a"].append(their_items)
    result = ours.decode(theirs.encode(their_items))
    assert result is items
    assert items == [1, 2, 3]
    assert table == {"a": [1, items]}
    assert table["a"][1] is items
    items.append(4)
    theirs.decode(ours.encode(None))
    assert their_items == [1, 2, 3, 4]
    large = [0] * (MAX_LINKED_ITEMS + 1)
    arrived = theirs.decode(ours.encode(large))
    arrived.append(1)
    ours.decode(theirs.encode(None, may_unlink=True))
    arrived.append(2)  # a copy after the end of an exchange
    ours.decode(theirs.encode(None))
    assert len(large) == MAX_LINKED_ITEMS + 2


def test_containers_that_one_end_has_dropped_are_forgotten_by_both(ends):
    ours, theirs = ends
    kept = theirs.decode(ours.encode([[1], [2]]))
    for _ in range(3):
        theirs.decode(ours.encode(None))
        ours.decode(theirs.encode(None))
    assert kept == [[1], [2]]
    assert ours._containers == theirs._containers == {}


def test_values_of_other_types_are_refused():
    class Number(int):
        pass

    class Zone(tzinfo):
        pass

    aware = datetime(2020, 1, 1, tzinfo=Zone())
    for value in (Number(1), object(), len, aware, type("list", (list,), {})()):
        with pytest.raises(TypeError, match="cannot be sent"):
            Codec(0).encode(value)


@pytest.mark.parametrize("size", [1, 13, 100])
def test_damaged_messages_raise_at_most_an_exception(size):
    generator, valid = random.Random(0), Types(0).encode(VALUES)
    tags = b"NTFIDCSB({@V.*qd\0\1\2"
    for _ in range(100):
        message = bytearray(12) + bytes(generator.choice(tags) for _ in range(size))
        damaged = bytearray(valid)
        for _ in range(size // 10 + 1):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        with pytest.raises((IndexError, struct.error)):
            Types(1).decode(valid[: generator.randrange(len(valid))])
        for each in (message, damaged):
            with suppress(
                LookupError, TypeError, ValueError, ArithmeticError, RecursionError, AttributeError, struct.error
            ):
                Types(1).decode(bytes(each))
