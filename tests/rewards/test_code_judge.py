"""Statements of a test, run on the objects of a program in another process: honest ones as in one interpreter."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from hybridflow.rewards import code_reward

pytestmark = pytest.mark.slow

ADD = """
def add(a, b):
    return a + b
"""

SORT = """
def sort(items):
    items.sort()
"""

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

MEMO = """
import functools
def memo(f):
    seen = {}
    @functools.wraps(f)
    def inner(x):
        if x not in seen:
            seen[x] = f(x)
        return seen[x]
    return inner
"""

FLATTEN = """
def flatten(x):
    return [z for y in x for z in flatten(y)] if isinstance(x, list) else [x]
"""

ASYNC = """
import asyncio
async def twice(x):
    await asyncio.sleep(0)
    return 2 * x
"""

HONEST = [
    # MBPP and HumanEval: one function and plain data
    (ADD, "assert add(1, 2) == 3", True),
    (ADD, "assert add(1, 2) == 4", False),
    (
        ADD,
        """
assert add(a=1, b=2) == 3
assert add('a', 'b') == 'ab'
assert add([1], [2]) == [1, 2]
""",
        True,
    ),
    (ADD, "assert add((1,), (2,)) == [1, 2]", False),
    (
        ADD,
        """
def check(candidate):
    for i in range(50):
        assert candidate(i, i) == 2 * i
check(add)
""",
        True,
    ),
    (
        ADD,
        """
METADATA = {}
def check(candidate):
    assert candidate(2, 3) == 6
check(add)
""",
        False,
    ),
    (
        ADD,
        """
import math
assert math.isclose(add(0.1, 0.2), 0.3, rel_tol=1e-9)
assert abs(add(.1, .2) - .3) < 1e-9
""",
        True,
    ),
    (ADD, """assert add(2**100, 1) == 2**100 + 1 and add(1j, 1) == 1 + 1j and add(b'a', b'b') == b'ab'""", True),
    (ADD, """assert add(float('inf'), 1) == float('inf') and add(True, True) == 2 and add(-0.0, -0.0) == 0""", True),
    (
        """
def same(x):
    return x
""",
        """
for x in (None, True, 1, 1.5, 'a', b'a', (1, (2,)), [[]], {1: {2}}, {3}):
    y = same(x)
    assert y == x and type(y) is type(x)
assert same(None) is None and same(True) is True
x = []
assert same(x) is x
assert same(frozenset({1})) == {1} and same(range(3)) == range(3)
""",
        True,
    ),
    (
        """
def unique(x):
    return set(x)
""",
        """assert set(unique([1, 2, 2])) == {1, 2} and unique('') == set()""",
        True,
    ),
    (
        """
def split(x):
    return x.split()
""",
        """
assert sorted(split('b a')) == ['a', 'b']
assert 'a' in split('b a')
""",
        True,
    ),
    (FLATTEN, "assert flatten([1, [2, [3, [4]]]]) == [1, 2, 3, 4]", True),
    (
        """
def sum(a, b):
    return a * b
""",
        "assert sum(10, 15) == 150",
        True,
    ),
    (
        """
def f(n):
    return f(n - 1) + 1 if n else 0
""",
        "assert f(900) == 900",
        True,
    ),
    (
        """
import math
from typing import List
def area(r: float) -> float:
    return math.pi * r * r
""",
        """
assert math.floor(area(1)) == 3
assert area(2) == pytest
""",
        False,
    ),
    (
        """
import math
def area(r):
    return math.pi * r * r
""",
        "assert math.floor(area(1)) == 3",
        True,
    ),
    # results of the standard library
    (
        """
from collections import Counter, OrderedDict, defaultdict, deque
def count(x):
    return Counter(x)
def kinds(x):
    d = defaultdict(list)
    for i in x:
        d[i % 2].append(i)
    return d, deque(x, 2), OrderedDict.fromkeys(x)
""",
        """
from collections import Counter, OrderedDict, deque
assert count('aab') == Counter('aab') == {'a': 2, 'b': 1}
assert count('aab').most_common(1) == [('a', 2)]
d, q, o = kinds([1, 2, 3])
assert d == {1: [1, 3], 0: [2]} and d[7] == [] and q == deque([2, 3]) and q.maxlen == 2
assert o == OrderedDict([(1, None), (2, None), (3, None)])
""",
        True,
    ),
    (
        """
from fractions import Fraction
from decimal import Decimal
import datetime as dt
def f(x):
    return Fraction(x, 3), Decimal(x) / 4, dt.date(2020, 1, x), dt.datetime(2020, 1, x, 5), dt.timedelta(x, 1)
""",
        """
from fractions import Fraction
from decimal import Decimal
import datetime
a, b, c, d, e = f(2)
assert a == Fraction(2, 3) and b == Decimal('0.5') and c == datetime.date(2020, 1, 2)
assert d.hour == 5 and e.total_seconds() == 172801 and dt.date(2020, 1, 2) == c
""",
        True,
    ),
    # arguments that are changed in place, shared, or nested
    (
        SORT,
        """
items = [3, 1, 2]
assert sort(items) is None
assert items == [1, 2, 3]
""",
        True,
    ),
    (
        """
def sort(items):
    sorted(items)
""",
        """
items = [3, 1, 2]
sort(items)
assert items == [1, 2, 3]
""",
        False,
    ),
    (
        """
def rotate(m):
    m[:] = [list(r) for r in zip(*m[::-1])]
def zero(m):
    m[0][0] = 0
def put(d, s):
    d['b'] = [s]
    s.add(2)
""",
        """
m = [[1, 2], [3, 4]]
rotate(m)
assert m == [[3, 1], [4, 2]]
zero(m)
assert m[0] == [0, 1]
r = [0]
n = [r, r]
row = n[0]
zero(n)
assert row is n[1]
d, s = {'a': 1}, {1}
put(d, s)
assert d == {'a': 1, 'b': [{1, 2}]} and s == {1, 2} and d['b'][0] is s
""",
        True,
    ),
    (
        """
def visit(x):
    x.append(x)
    return x
""",
        """
x = visit([1])
assert x[1] is x and len(x) == 2
""",
        True,
    ),
    # functions of the statements
    (
        """
def apply(f, xs):
    return [f(x) for x in xs]
def safe(f, x):
    try:
        return f(x)
    except ZeroDivisionError:
        return 'zero'
def adder(n):
    return lambda x: x + n
""",
        """
assert apply(lambda x: x * 2, [1, 2]) == [2, 4] and apply(str, [1]) == ['1'] and apply(len, ['ab']) == [2]
assert safe(lambda x: 1 / x, 0) == 'zero' and safe(lambda x: 1 / x, 1) == 1
seen = []
apply(seen.append, [1, 2])
assert seen == [1, 2] and adder(3)(4) == 7
assert list(map(adder(1), [1, 2])) == [2, 3] and sorted([1, 2], key=adder(0)) == [1, 2]
""",
        True,
    ),
    (
        MEMO,
        """
calls = []
@memo
def g(x):
    calls.append(x)
    return -x
assert g(1) == g(1) == -1
assert calls == [1]
assert g.__name__ == 'g'
""",
        True,
    ),
    (
        MEMO,
        """
@memo
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)
assert fib(100) == 354224848179261915075
assert len(str(fib(300))) == 63
""",
        True,
    ),
    # exceptions
    (
        """
def root(x):
    if x < 0:
        raise ValueError('negative', x)
    return x ** 0.5
""",
        """
try:
    root(-1)
    assert False
except ValueError as e:
    assert e.args == ('negative', -1)
try:
    root('a')
except TypeError:
    pass
else:
    assert False
""",
        True,
    ),
    (
        """
def root(x):
    return 0
""",
        """
try:
    root(-1)
except ValueError:
    pass
else:
    assert False
""",
        False,
    ),
    (
        STACK,
        """
s = Stack()
try:
    s.pop()
    assert False
except Empty as e:
    assert str(e) == 'stack is empty' and e.what == 'stack' and isinstance(e, LookupError)
try:
    raise Empty('x')
except LookupError as e:
    assert e.what == 'x'
""",
        True,
    ),
    (
        STACK,
        """
import unittest
class Tests(unittest.TestCase):
    def runTest(self):
        with self.assertRaises(Empty):
            Stack().pop()
        self.assertEqual([*Stack()], [])
        self.assertAlmostEqual(len(Stack()), 0)
assert unittest.TextTestRunner().run(Tests()).wasSuccessful()
""",
        True,
    ),
    # classes
    (
        """
class Solution:
    def twoSum(self, nums, target):
        seen = {}
        for i, n in enumerate(nums):
            if target - n in seen:
                return [seen[target - n], i]
            seen[n] = i
""",
        """
s = Solution()
assert s.twoSum([2, 7, 11], 9) == [0, 1]
assert Solution().twoSum(nums=[3, 3], target=6) == [0, 1]
assert s.twoSum([1], 3) is None
check = Solution().twoSum
assert check([1, 2], 3) == [0, 1]
""",
        True,
    ),
    (
        LIST_NODE,
        """
def build(xs):
    head = None
    for x in reversed(xs):
        head = ListNode(x, head)
    return head
node, values = Solution().reverse(build([1, 2, 3])), []
while node:
    values.append(node.val)
    node = node.next
assert values == [3, 2, 1]
assert Solution().reverse(None) is None
""",
        True,
    ),
    (
        STACK,
        """
s = Stack()
assert not s
s.push(1)
s.push([2])
assert s and len(s) == 2 and list(s) == [1, [2]]
assert s[0] == 1 and s[1:] == [[2]] and s.pop() == [2] and 1 in s and 5 not in s
s.items.append(9)
assert s.pop() == 9 and s.items == [1]
s.items = []
assert not s and isinstance(s, Stack)
s.label = 'x'
assert hasattr(s, 'label') and not hasattr(s, 'other')
""",
        True,
    ),
    (
        SHAPES,
        """
p = Point(1, 2)
assert p == (1, 2) and p.x == 1 and p[1] == 2 and p == Point(1, 2) and len(p) == 2
x, y = p
assert (x, y) == p and isinstance(p, tuple) and {p: 1}[(1, 2)] == 1 and p._replace(x=5) == (5, 2)
assert Size(3) == (3, 1) and repr(Size(3)) == 'Size(width=3, height=1)' and sorted([Size(2), Size(1)])[0].width == 1
""",
        True,
    ),
    (
        SHAPES,
        """
assert Color.RED is Color(1) and Color['RED'] == Color.RED != Color.BLUE and Color.RED.value == 1
assert [c.name for c in Color] == ['RED', 'BLUE'] and len(Color) == 2 and {Color.RED: 1}[Color.RED] == 1
assert Color.RED != 1 and Level.LOW == 1 and Level.HIGH > 1 and Level.HIGH > Level.LOW and Level.LOW + 1 == 2
assert Color.BLUE in Color and sum([Level.LOW, Level.HIGH]) == 3 and max(Level) == 2
""",
        True,
    ),
    (
        SHAPES,
        """
v = Version(1, 2)
assert v == Version(1, 2) and v < Version(2) and v.minor == 2 and v != (1, 2)
assert len({v, Version(1, 2)}) == 1 and max(v, Version(3)).major == 3 and str(v) == 'Version(major=1, minor=2)'
try:
    v.major = 5
except AttributeError:
    pass
else:
    assert False
""",
        True,
    ),
    (
        SHAPES,
        """
v = Vector(1, 2)
assert v + v == Vector(2, 4) == 2 * v == v * 2 and (v * 3).x == 3 and v @ v == 5
assert repr(v) == 'Vector(1, 2)' and f'{v}' == 'Vector(1, 2)' and abs(Vector(3, 4)) == 5 and v != Vector(0, 0)
assert Matrix([1, 2]) == [1, 2] and (Matrix([1]) + Matrix([2]))[0] == 3 and isinstance(Matrix(), list)
""",
        True,
    ),
    (
        SHAPES,
        """
d = Dog('rex')
assert isinstance(d, Animal) and issubclass(Dog, Animal) and type(d) is Dog
assert type(d).__name__ == 'Dog' and d.loud == 'REX' and Dog.legs() == 4 and Dog.named('a').name == 'a'
Animal.count += 5
Dog('max')
assert Animal.count == 8 and d.__dict__ == {'name': 'rex'} and vars(d) == {'name': 'rex'}
import copy
e = copy.deepcopy(d)
e.name = 'b'
assert d.name == 'rex' and not isinstance(3, Dog)
""",
        True,
    ),
    (
        """
count = 0
limits = [1]
def more():
    global count
    count += 1
    limits.append(count)
""",
        """
more()
more()
assert count == 2 and limits == [1, 1, 2]
assert 'more' in dir(__import__('program')) or more
""",
        True,
    ),
    # iteration, coroutines, context managers, streams, modules
    (
        """
def evens(n):
    for i in range(0, n, 2):
        yield i
def echo():
    x = yield 1
    yield x
def forever():
    n = 0
    while True:
        yield n
        n += 1
""",
        """
import itertools, types
assert list(evens(6)) == [0, 2, 4] and sum(evens(6)) == 6
assert isinstance(evens(3), types.GeneratorType) and next(evens(3)) == 0
e = echo()
assert next(e) == 1 and e.send(5) == 5
assert list(itertools.islice(forever(), 3)) == [0, 1, 2]
assert [x for x in map(None or str, evens(3))] == ['0', '2']
""",
        True,
    ),
    (
        ASYNC,
        """
import asyncio
assert asyncio.run(twice(2)) == 4
async def main():
    return await asyncio.gather(twice(1), twice(2))
async def one():
    return await twice(3)
assert asyncio.run(one()) == 6
""",
        True,
    ),
    (
        """
class Timer:
    def __enter__(self):
        self.on = True
        return self
    def __exit__(self, *error):
        self.on = False
        return error[0] is ValueError
""",
        """
with Timer() as t:
    assert t.on
    raise ValueError
assert not t.on
""",
        True,
    ),
    (
        """
def greet(name):
    print('hello', name)
def ask():
    return int(input('?')) + 1
""",
        """
import io, contextlib, sys, builtins
out = io.StringIO()
with contextlib.redirect_stdout(out):
    greet('you')
assert out.getvalue() == 'hello you\\n'
sys.stdin = io.StringIO('4\\n')
assert ask() == 5
builtins.input = lambda prompt: '7'
assert ask() == 8
""",
        True,
    ),
    (
        ADD,
        """
from program import add as plus
import program
assert plus(1, 2) == program.add(1, 2) == 3
""",
        True,
    ),
    (
        """
class LRU:
    def __init__(self, n):
        self.n, self.d = n, {}
    def get(self, k):
        return self.d.get(k, -1)
    def put(self, k, v):
        self.d.pop(k, None)
        self.d[k] = v
        if len(self.d) > self.n:
            self.d.pop(next(iter(self.d)))
""",
        """
c = LRU(2)
for k in range(200):
    c.put(k, [k])
assert c.get(198) == [198] and c.get(0) == -1
""",
        True,
    ),
    (
        """
import threading
class Counter:
    def __init__(self):
        self.n, self.lock = 0, threading.Lock()
    def add(self):
        with self.lock:
            self.n += 1
""",
        """
import threading
c = Counter()
ts = [threading.Thread(target=c.add) for _ in range(8)]
[t.start() for t in ts]
[t.join() for t in ts]
assert c.n == 8
""",
        True,
    ),
    (
        """
def mean(xs):
    return sum(xs) / len(xs)
""",
        """
xs = list(range(100_000))
assert mean(xs) == 49999.5
assert mean([float(x) for x in xs]) == 49999.5
assert xs[0] == 0
""",
        True,
    ),
    # names of the program that are those of Python
    (
        """
def queue(items):
    return items[::-1]
class Stack:
    pass
""",
        "assert queue([1, 2]) == [2, 1] and isinstance(Stack(), Stack)",
        True,
    ),
    (
        """
def min(a, b):
    return -1
def smallest(a, b):
    return a if a < b else b
""",
        "assert smallest(3, 2) == min(2, 3)",
        True,
    ),
    (
        """
class Adder:
    def __init__(self, n):
        self.n = n
    def __call__(self, x, *more, key=0, **rest):
        return self.n + x + sum(more) + key + len(rest)
""",
        """
class Table:
    add = Adder(1)
    rows = [Adder(n)(1) for n in range(3)]
assert Table.rows == [1, 2, 3] and Table.add(1, 2, key=3, other=4) == 8
""",
        True,
    ),
    (
        """
class Account:
    def __init__(self, total=0):
        self.total = total
    def __iadd__(self, amount):
        self.total += amount
        return self
    def __lt__(self, other):
        return self.total < other.total
    def __hash__(self):
        return 7
    def __eq__(self, other):
        return self.total == other.total
""",
        """
a, b = Account(1), Account(2)
assert a < b and sorted([b, a])[0] is a and a != b and {a, b, Account(1)} == {a, b} and b in [a, b]
""",
        True,
    ),
    (
        """
def total(items):
    return sum(items)
def first(pairs):
    return {k: v for k, v in pairs}
""",
        """
assert total(x for x in range(4)) == 6 and total({1, 2}) == 3 and total(map(int, '12')) == 3
assert first(zip('ab', [1, 2])) == {'a': 1, 'b': 2} and total({1: 2}.keys()) == 1
""",
        True,
    ),
    (
        """
def f(x):
    return {'name': x, 'tags': ('a', {'b'}), 'when': None}
""",
        """
r = f('n')
assert r['tags'][1] == {'b'} and list(r) == ['name', 'tags', 'when'] and f(x='m')['name'] == 'm'
import json
assert json.dumps(f(1)['name']) == '1'
""",
        True,
    ),
    (
        """
def f(x):
    assert x > 0, 'positive'
    return x
""",
        """
try:
    f(0)
except AssertionError as e:
    assert str(e) == 'positive'
else:
    raise ValueError
""",
        True,
    ),
    (
        """
def f():
    return 1
raise ValueError
""",
        "assert f() == 1",
        False,
    ),
    (
        """
def f():
    raise SystemExit(0)
""",
        "f()",
        False,
    ),
    (
        """
import random
def roll():
    '''Roll a die.'''
    return random.randint(1, 10**9)
""",
        """
import random
random.seed(7)
first = roll()
random.seed(7)
assert first == roll() and roll.__doc__ == 'Roll a die.' and roll() != first
random.seed(7)
assert first == random.randint(1, 10**9)
""",
        True,
    ),
    (
        """
def f():
    return f()
""",
        """
try:
    f()
except RecursionError:
    pass
else:
    assert False
""",
        True,
    ),
    (
        """
class A:
    def __repr__(self): return repr(self)
def f(): return A()
""",
        """
try:
    repr(f())
except RecursionError:
    pass
else:
    assert False
""",
        True,
    ),
    (
        """
def f(x):
    if x == 0: raise KeyError('k')
    try:
        return g(x)
    finally:
        done.append(x)
done=[]
def g(x): return f(x-1)
""",
        """
try:
    f(3)
except KeyError as e:
    assert e.args==('k',) and str(e)=="'k'"
assert done==[1,2,3]
""",
        True,
    ),
    (
        """
import asyncio
class Q:
    async def get(self): return 1
    async def __aenter__(self): return self
    async def __aexit__(self,*a): return None
async def gen():
    for i in range(3): yield i
""",
        """
import asyncio
async def main():
    assert await Q().get()==1
asyncio.run(main())
""",
        True,
    ),
    (
        """
from abc import ABC, abstractmethod
class Shape(ABC):
    @abstractmethod
    def area(self): ...
class Sq(Shape):
    def __init__(self,a): self.a=a
    def area(self): return self.a**2
""",
        """
assert Sq(2).area()==4 and isinstance(Sq(1),Shape)
try:
    Shape()
    assert False
except TypeError as e:
    assert 'abstract' in str(e)
""",
        True,
    ),
    (
        """
class T:
    def __init__(self): self.root={}
    def insert(self,w):
        n=self.root
        for c in w: n=n.setdefault(c,{})
        n['$']=True
    def __contains__(self,w): return True
    def search(self,w):
        n=self.root
        for c in w:
            if c not in n: return False
            n=n[c]
        return '$' in n
""",
        """
t=T()
t.insert('ab')
assert t.search('ab') and not t.search('a') and t.root=={'a':{'b':{'$':True}}}
""",
        True,
    ),
    (
        """
class P:
    def __init__(s,x): s._x=x
    @property
    def x(s): return s._x
    @x.setter
    def x(s,v):
        if v<0: raise ValueError('neg')
        s._x=v
""",
        """
p=P(1)
p.x=5
assert p.x==5 and p._x==5
try:
    p.x=-1
    assert 0
except ValueError: pass
assert getattr(p,'y',7)==7
del p._x
assert not hasattr(p,'_x')
""",
        True,
    ),
    (
        """
def f(*a,**k): return a,k
""",
        """
assert f(1,2,x=3)==((1,2),{'x':3})
assert f(*[1],**{'self':2})==((1,),{'self':2})
""",
        True,
    ),
    (
        """
def dec(n):
    def d(f):
        def w(*a,**k): return n*f(*a,**k)
        return w
    return d
""",
        """
@dec(3)
def g(x,y=1): return x+y
assert g(1)==6 and g(1,y=2)==9
class K:
    @dec(2)
    def m(self,x): return x
    @staticmethod
    @dec(2)
    def s(x): return x
assert K.s(4)==8
assert K().m(4)==8
""",
        True,
    ),
    (
        """
import collections
Point=collections.namedtuple('Point','x y')
def f(): return [Point(1,2),Point(3,4)]
""",
        """
assert f()==[(1,2),(3,4)] and sorted(f(),key=lambda p:-p.x)[0].x==3
assert f()[0]<f()[1] and (1,2) in f() and set(f())=={(1,2),(3,4)}
""",
        True,
    ),
    (
        """
def f():
    yield from [1,2]
    return 3
""",
        """
g=f()
assert next(g)==1 and next(g)==2
try:
    next(g)
except StopIteration as e:
    assert e.value==3
""",
        True,
    ),
    (
        """
class It:
    def __init__(s,n): s.n=n
    def __iter__(s): return s
    def __next__(s):
        if s.n==0: raise StopIteration
        s.n-=1
        return s.n
""",
        """
assert list(It(3))==[2,1,0]
it=It(1)
assert next(it)==0
assert next(it,None) is None
try:
    it.__next__()
except StopIteration: pass
for x in It(2): pass
a,*b=It(3)
assert b==[1,0]
""",
        True,
    ),
    (
        """
class M:
    def __init__(s,r): s.r=r
    def __getitem__(s,k): return s.r[k[0]][k[1]]
    def __setitem__(s,k,v): s.r[k[0]][k[1]]=v
    def __mul__(s,o): return M([[sum(a*b for a,b in zip(r,c)) for c in zip(*o.r)] for r in s.r])
    def __eq__(s,o): return s.r==o.r
    def __neg__(s): return M([[-x for x in r] for r in s.r])
    def __call__(s): return s.r
    def __bool__(s): return any(map(any,s.r))
    def __len__(s): return len(s.r)
""",
        """
m=M([[1,2],[3,4]])
assert m[0,1]==2
m[0,1]=7
assert m.r==[[1,7],[3,4]] and (m*m).r[0][0]==22
assert (-m)()==[[-1,-7],[-3,-4]] and m*m==m*m and bool(M([[0]])) is False and len(m)==2
n=m
n*=m
assert n==m*m
""",
        True,
    ),
]
"""Program, statements, and whether the program passes."""


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
