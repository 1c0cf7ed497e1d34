"""Statements of a test, run on the objects of a program in another process: honest ones as in one interpreter."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from hybridflow.rewards import code_reward

pytestmark = pytest.mark.slow

ADD = "def add(a, b):\n    return a + b"
SORT = "def sort(items):\n    items.sort()"
LIST_NODE = """
class ListNode:
    def __init__(self, val=0, next=None):
        self.val = val
        self.next = next

class Solution:
    def reverse(self, head):
        before = None
        while head:
            head.next, before, head = before, head, head.next
        return before
"""
SHAPES = """
from dataclasses import dataclass
from collections import namedtuple
from enum import Enum, IntEnum
from typing import NamedTuple

Point = namedtuple("Point", "x y")

class Size(NamedTuple):
    width: int
    height: int = 1

class Color(Enum):
    RED = 1
    BLUE = 2

class Level(IntEnum):
    LOW = 1
    HIGH = 2

@dataclass(order=True, frozen=True)
class Version:
    major: int
    minor: int = 0

class Vector:
    def __init__(self, x, y):
        self.x, self.y = x, y
    def __add__(self, other):
        return Vector(self.x + other.x, self.y + other.y)
    def __mul__(self, factor):
        return Vector(self.x * factor, self.y * factor)
    __rmul__ = __mul__
    def __matmul__(self, other):
        return self.x * other.x + self.y * other.y
    def __eq__(self, other):
        return isinstance(other, Vector) and (self.x, self.y) == (other.x, other.y)
    def __repr__(self):
        return f"Vector({self.x}, {self.y})"
    def __abs__(self):
        return (self.x ** 2 + self.y ** 2) ** 0.5

class Matrix(list):
    def __add__(self, other):
        return Matrix([a + b for a, b in zip(self, other)])

class Animal:
    count = 0
    def __init__(self, name):
        self.name = name
        Animal.count += 1
    @classmethod
    def named(cls, name):
        return cls(name)
    @staticmethod
    def legs():
        return 4
    @property
    def loud(self):
        return self.name.upper()

class Dog(Animal):
    pass
"""
STACK = """
class Empty(LookupError):
    def __init__(self, what):
        super().__init__(f"{what} is empty")
        self.what = what

class Stack:
    def __init__(self):
        self.items = []
    def push(self, item):
        self.items.append(item)
    def pop(self):
        if not self.items:
            raise Empty("stack")
        return self.items.pop()
    def __len__(self):
        return len(self.items)
    def __iter__(self):
        return iter(self.items)
    def __getitem__(self, index):
        return self.items[index]
"""
FLATTEN = "def flatten(x):\n    return [z for y in x for z in flatten(y)] if isinstance(x, list) else [x]"
ASYNC = "import asyncio\nasync def twice(x):\n    await asyncio.sleep(0)\n    return 2 * x"

HONEST = [
    # MBPP and HumanEval: one function and plain data
    (ADD, "assert add(1, 2) == 3", True),
    (ADD, "assert add(1, 2) == 4", False),
    (ADD, "assert add(a=1, b=2) == 3\nassert add('a', 'b') == 'ab'\nassert add([1], [2]) == [1, 2]", True),
    (ADD, "assert add((1,), (2,)) == [1, 2]", False),
    (ADD, "def check(candidate):\n    for i in range(50):\n        assert candidate(i, i) == 2 * i\ncheck(add)", True),
    (ADD, "METADATA = {}\ndef check(candidate):\n    assert candidate(2, 3) == 6\ncheck(add)", False),
    (ADD, "import math\nassert math.isclose(add(0.1, 0.2), 0.3, rel_tol=1e-9)\nassert abs(add(.1, .2) - .3) < 1e-9", True),
    (ADD, "assert add(2**100, 1) == 2**100 + 1 and add(1j, 1) == 1 + 1j and add(b'a', b'b') == b'ab'", True),
    (ADD, "assert add(float('inf'), 1) == float('inf') and add(True, True) == 2 and add(-0.0, -0.0) == 0", True),
    ("def same(x):\n    return x", "for x in (None, True, 1, 1.5, 'a', b'a', (1, (2,)), [[]], {1: {2}}, {3}):\n"
     "    y = same(x)\n    assert y == x and type(y) is type(x)\nassert same(None) is None and same(True) is True\n"
     "x = []\nassert same(x) is x\nassert same(frozenset({1})) == {1} and same(range(3)) == range(3)", True),
    ("def unique(x):\n    return set(x)", "assert set(unique([1, 2, 2])) == {1, 2} and unique('') == set()", True),
    ("def split(x):\n    return x.split()", "assert sorted(split('b a')) == ['a', 'b']\nassert 'a' in split('b a')", True),
    (FLATTEN, "assert flatten([1, [2, [3, [4]]]]) == [1, 2, 3, 4]", True),
    ("def sum(a, b):\n    return a * b", "assert sum(10, 15) == 150", True),
    ("def f(n):\n    return f(n - 1) + 1 if n else 0", "assert f(900) == 900", True),
    ("import math\nfrom typing import List\ndef area(r: float) -> float:\n    return math.pi * r * r",
     "assert math.floor(area(1)) == 3\nassert area(2) == pytest", False),
    ("import math\ndef area(r):\n    return math.pi * r * r", "assert math.floor(area(1)) == 3", True),
    # results of the standard library
    ("from collections import Counter, OrderedDict, defaultdict, deque\ndef count(x):\n    return Counter(x)\n"
     "def kinds(x):\n    d = defaultdict(list)\n    for i in x:\n        d[i % 2].append(i)\n"
     "    return d, deque(x, 2), OrderedDict.fromkeys(x)",
     "from collections import Counter, OrderedDict, deque\nassert count('aab') == Counter('aab') == {'a': 2, 'b': 1}\n"
     "assert count('aab').most_common(1) == [('a', 2)]\nd, q, o = kinds([1, 2, 3])\n"
     "assert d == {1: [1, 3], 0: [2]} and d[7] == [] and q == deque([2, 3]) and q.maxlen == 2\n"
     "assert o == OrderedDict([(1, None), (2, None), (3, None)])", True),
    ("from fractions import Fraction\nfrom decimal import Decimal\nimport datetime as dt\ndef f(x):\n"
     "    return Fraction(x, 3), Decimal(x) / 4, dt.date(2020, 1, x), dt.datetime(2020, 1, x, 5), dt.timedelta(x, 1)",
     "from fractions import Fraction\nfrom decimal import Decimal\nimport datetime\na, b, c, d, e = f(2)\n"
     "assert a == Fraction(2, 3) and b == Decimal('0.5') and c == datetime.date(2020, 1, 2)\n"
     "assert d.hour == 5 and e.total_seconds() == 172801 and dt.date(2020, 1, 2) == c", True),
    # arguments that are changed in place, shared, or nested
    (SORT, "items = [3, 1, 2]\nassert sort(items) is None\nassert items == [1, 2, 3]", True),
    ("def sort(items):\n    sorted(items)", "items = [3, 1, 2]\nsort(items)\nassert items == [1, 2, 3]", False),
    ("def rotate(m):\n    m[:] = [list(r) for r in zip(*m[::-1])]\ndef zero(m):\n    m[0][0] = 0\n"
     "def put(d, s):\n    d['b'] = [s]\n    s.add(2)",
     "m = [[1, 2], [3, 4]]\nrotate(m)\nassert m == [[3, 1], [4, 2]]\nzero(m)\nassert m[0] == [0, 1]\n"
     "r = [0]\nn = [r, r]\nrow = n[0]\nzero(n)\nassert row is n[1]\nd, s = {'a': 1}, {1}\nput(d, s)\n"
     "assert d == {'a': 1, 'b': [{1, 2}]} and s == {1, 2} and d['b'][0] is s", True),
    ("def visit(x):\n    x.append(x)\n    return x", "x = visit([1])\nassert x[1] is x and len(x) == 2", True),
    # functions of the statements
    ("def apply(f, xs):\n    return [f(x) for x in xs]\ndef safe(f, x):\n    try:\n        return f(x)\n"
     "    except ZeroDivisionError:\n        return 'zero'\ndef adder(n):\n    return lambda x: x + n",
     "assert apply(lambda x: x * 2, [1, 2]) == [2, 4] and apply(str, [1]) == ['1'] and apply(len, ['ab']) == [2]\n"
     "assert safe(lambda x: 1 / x, 0) == 'zero' and safe(lambda x: 1 / x, 1) == 1\n"
     "seen = []\napply(seen.append, [1, 2])\nassert seen == [1, 2] and adder(3)(4) == 7\n"
     "assert list(map(adder(1), [1, 2])) == [2, 3] and sorted([1, 2], key=adder(0)) == [1, 2]", True),
    ("import functools\ndef memo(f):\n    seen = {}\n    @functools.wraps(f)\n    def inner(x):\n"
     "        if x not in seen:\n            seen[x] = f(x)\n        return seen[x]\n    return inner",
     "calls = []\n@memo\ndef g(x):\n    calls.append(x)\n    return -x\nassert g(1) == g(1) == -1\nassert calls == [1]\n"
     "assert g.__name__ == 'g'", True),
    # exceptions
    ("def root(x):\n    if x < 0:\n        raise ValueError('negative', x)\n    return x ** 0.5",
     "try:\n    root(-1)\n    assert False\nexcept ValueError as e:\n    assert e.args == ('negative', -1)\n"
     "try:\n    root('a')\nexcept TypeError:\n    pass\nelse:\n    assert False", True),
    ("def root(x):\n    return 0", "try:\n    root(-1)\nexcept ValueError:\n    pass\nelse:\n    assert False", False),
    (STACK, "s = Stack()\ntry:\n    s.pop()\n    assert False\nexcept Empty as e:\n"
     "    assert str(e) == 'stack is empty' and e.what == 'stack' and isinstance(e, LookupError)\n"
     "try:\n    raise Empty('x')\nexcept LookupError as e:\n    assert e.what == 'x'", True),
    (STACK, "import unittest\nclass Tests(unittest.TestCase):\n    def runTest(self):\n"
     "        with self.assertRaises(Empty):\n            Stack().pop()\n        self.assertEqual([*Stack()], [])\n"
     "        self.assertAlmostEqual(len(Stack()), 0)\nassert unittest.TextTestRunner().run(Tests()).wasSuccessful()", True),
    # classes
    ("class Solution:\n    def twoSum(self, nums, target):\n        seen = {}\n        for i, n in enumerate(nums):\n"
     "            if target - n in seen:\n                return [seen[target - n], i]\n            seen[n] = i",
     "s = Solution()\nassert s.twoSum([2, 7, 11], 9) == [0, 1]\nassert Solution().twoSum(nums=[3, 3], target=6) == [0, 1]"
     "\nassert s.twoSum([1], 3) is None\ncheck = Solution().twoSum\nassert check([1, 2], 3) == [0, 1]", True),
    (LIST_NODE, "def build(xs):\n    head = None\n    for x in reversed(xs):\n        head = ListNode(x, head)\n"
     "    return head\nnode, values = Solution().reverse(build([1, 2, 3])), []\nwhile node:\n"
     "    values.append(node.val)\n    node = node.next\nassert values == [3, 2, 1]\nassert Solution().reverse(None) is None",
     True),
    (STACK, "s = Stack()\nassert not s\ns.push(1)\ns.push([2])\nassert s and len(s) == 2 and list(s) == [1, [2]]\n"
     "assert s[0] == 1 and s[1:] == [[2]] and s.pop() == [2] and 1 in s and 5 not in s\n"
     "s.items.append(9)\nassert s.pop() == 9 and s.items == [1]\ns.items = []\nassert not s and isinstance(s, Stack)\n"
     "s.label = 'x'\nassert hasattr(s, 'label') and not hasattr(s, 'other')", True),
    (SHAPES, "p = Point(1, 2)\nassert p == (1, 2) and p.x == 1 and p[1] == 2 and p == Point(1, 2) and len(p) == 2\n"
     "x, y = p\nassert (x, y) == p and isinstance(p, tuple) and {p: 1}[(1, 2)] == 1 and p._replace(x=5) == (5, 2)\n"
     "assert Size(3) == (3, 1) and repr(Size(3)) == 'Size(width=3, height=1)' and sorted([Size(2), Size(1)])[0].width == 1",
     True),
    (SHAPES, "assert Color.RED is Color(1) and Color['RED'] == Color.RED != Color.BLUE and Color.RED.value == 1\n"
     "assert [c.name for c in Color] == ['RED', 'BLUE'] and len(Color) == 2 and {Color.RED: 1}[Color.RED] == 1\n"
     "assert Color.RED != 1 and Level.LOW == 1 and Level.HIGH > 1 and Level.HIGH > Level.LOW and Level.LOW + 1 == 2\n"
     "assert Color.BLUE in Color and sum([Level.LOW, Level.HIGH]) == 3 and max(Level) == 2", True),
    (SHAPES, "v = Version(1, 2)\nassert v == Version(1, 2) and v < Version(2) and v.minor == 2 and v != (1, 2)\n"
     "assert len({v, Version(1, 2)}) == 1 and max(v, Version(3)).major == 3 and str(v) == 'Version(major=1, minor=2)'\n"
     "try:\n    v.major = 5\nexcept AttributeError:\n    pass\nelse:\n    assert False", True),
    (SHAPES, "v = Vector(1, 2)\nassert v + v == Vector(2, 4) == 2 * v == v * 2 and (v * 3).x == 3 and v @ v == 5\n"
     "assert repr(v) == 'Vector(1, 2)' and f'{v}' == 'Vector(1, 2)' and abs(Vector(3, 4)) == 5 and v != Vector(0, 0)\n"
     "assert Matrix([1, 2]) == [1, 2] and (Matrix([1]) + Matrix([2]))[0] == 3 and isinstance(Matrix(), list)", True),
    (SHAPES, "d = Dog('rex')\nassert isinstance(d, Animal) and issubclass(Dog, Animal) and type(d) is Dog\n"
     "assert type(d).__name__ == 'Dog' and d.loud == 'REX' and Dog.legs() == 4 and Dog.named('a').name == 'a'\n"
     "assert Animal.count == 2 and d.__dict__ == {'name': 'rex'} and vars(d) == {'name': 'rex'}\n"
     "import copy\ne = copy.deepcopy(d)\ne.name = 'b'\nassert d.name == 'rex' and not isinstance(3, Dog)", True),
    ("count = 0\nlimits = [1]\ndef more():\n    global count\n    count += 1\n    limits.append(count)",
     "more()\nmore()\nassert count == 2 and limits == [1, 1, 2]\nassert 'more' in dir(__import__('program')) or more",
     True),
    # iteration, coroutines, context managers, streams, modules
    ("def evens(n):\n    for i in range(0, n, 2):\n        yield i\ndef echo():\n    x = yield 1\n    yield x\n"
     "def forever():\n    n = 0\n    while True:\n        yield n\n        n += 1",
     "import itertools, types\nassert list(evens(6)) == [0, 2, 4] and sum(evens(6)) == 6\n"
     "assert isinstance(evens(3), types.GeneratorType) and next(evens(3)) == 0\n"
     "e = echo()\nassert next(e) == 1 and e.send(5) == 5\nassert list(itertools.islice(forever(), 3)) == [0, 1, 2]\n"
     "assert [x for x in map(None or str, evens(3))] == ['0', '2']", True),
    (ASYNC, "import asyncio\nassert asyncio.run(twice(2)) == 4\nasync def main():\n"
     "    return await asyncio.gather(twice(1), twice(2))\nasync def one():\n    return await twice(3)\n"
     "assert asyncio.run(one()) == 6", True),
    ("class Timer:\n    def __enter__(self):\n        self.on = True\n        return self\n"
     "    def __exit__(self, *error):\n        self.on = False\n        return error[0] is ValueError\n",
     "with Timer() as t:\n    assert t.on\n    raise ValueError\nassert not t.on", True),
    ("def greet(name):\n    print('hello', name)\ndef ask():\n    return int(input('?')) + 1",
     "import io, contextlib, sys, builtins\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n    greet('you')\n"
     "assert out.getvalue() == 'hello you\\n'\nsys.stdin = io.StringIO('4\\n')\nassert ask() == 5\n"
     "builtins.input = lambda prompt: '7'\nassert ask() == 8", True),
    (ADD, "from program import add as plus\nimport program\nassert plus(1, 2) == program.add(1, 2) == 3", True),
    ("class LRU:\n    def __init__(self, n):\n        self.n, self.d = n, {}\n    def get(self, k):\n"
     "        return self.d.get(k, -1)\n    def put(self, k, v):\n        self.d.pop(k, None)\n        self.d[k] = v\n"
     "        if len(self.d) > self.n:\n            self.d.pop(next(iter(self.d)))",
     "c = LRU(2)\nfor k in range(200):\n    c.put(k, [k])\nassert c.get(198) == [198] and c.get(0) == -1", True),
    ("import threading\nclass Counter:\n    def __init__(self):\n        self.n, self.lock = 0, threading.Lock()\n"
     "    def add(self):\n        with self.lock:\n            self.n += 1",
     "import threading\nc = Counter()\nts = [threading.Thread(target=c.add) for _ in range(8)]\n"
     "[t.start() for t in ts]\n[t.join() for t in ts]\nassert c.n == 8", True),
    ("def mean(xs):\n    return sum(xs) / len(xs)", "xs = list(range(100_000))\nassert mean(xs) == 49999.5\n"
     "assert mean([float(x) for x in xs]) == 49999.5\nassert xs[0] == 0", True),
]  # fmt: skip


def passes(case) -> bool:
    program, statements, _ = case
    solution = f"```python\n{program}\n```"
    result = code_reward("code", solution, {"tests": [statements]}, timeout_s=60.0)
    assert result["compiled"] == 1.0
    return result["score"] == 1.0


def test_honest_programs_are_judged_as_in_one_interpreter():
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(passes, HONEST))
    wrong = [case[:2] for case, result in zip(HONEST, results, strict=True) if result != case[2]]
    assert not wrong
