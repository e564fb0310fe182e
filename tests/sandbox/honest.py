# ruff: noqa: E501 (the tests are one line each)
"""Honest programs with honest tests, in the forms of the public sets: all pass the plain check, none may get a 0."""

from __future__ import annotations

FUNCTIONS = """
import math, collections, itertools, random, os
from functools import reduce
def add(a, b): return a + b
def is_prime(n): return n > 1 and all(n % d for d in range(2, int(n ** 0.5) + 1))
def area(r): return math.pi * r * r
def split_words(text): return text.split()
def unique(xs): return set(xs)
def pairs(d): return sorted(d.items())
def count(text): return collections.Counter(text)
def group(words):
    out = collections.defaultdict(list)
    for word in words: out[len(word)].append(word)
    return out
def squares(n):
    for i in range(n): yield i * i
def naturals():
    n = 0
    while True:
        yield n
        n += 1
def divide(a, b):
    if b == 0: raise ZeroDivisionError('no')
    return a / b
def nothing(): pass
def stats(xs): return {'mean': sum(xs) / len(xs), 'max': max(xs)}
def point(): return collections.namedtuple('Point', 'x y')(1, 2)
def adder(n): return lambda x: x + n
def compose(f, g): return lambda x: f(g(x))
def apply_all(f, xs): return [f(x) for x in xs]
def sort_in_place(xs): xs.sort()
def rotate(grid): grid[:] = [list(row) for row in zip(*grid[::-1])]
def zero_first(grid): grid[0][0] = 0
def push(xs, x): xs.append(x); return xs
def clone(xs): return list(xs)
def roll(): return random.randint(1, 6)
def shuffled(xs): return random.sample(xs, len(xs))
def encode(s): return s[::-1]
def decode(s): return s[::-1]
def write(path): open(path, 'w').write('hi')
def greet(): print('hello')
class Bad(ValueError):
    def __init__(self, code): super().__init__(f'bad {code}'); self.code = code
class Worse(Bad): pass
def fail(): raise Worse(7)
calls = 0
def tick():
    global calls
    calls += 1
LIMIT = 7
"""
FUNCTION_TESTS = [
    "assert add(1, 2) == 3",
    "assert add([1], [2]) == [1, 2] and add('a', 'b') == 'ab'",
    "assert is_prime(7) and not is_prime(8)",
    "assert [n for n in range(20) if is_prime(n)] == [2, 3, 5, 7, 11, 13, 17, 19]",
    "assert abs(area(3) - 28.2743) < 1e-3",
    "import math\nassert math.isclose(area(1), math.pi)",
    "assert round(area(2), 2) == 12.57",
    "assert split_words('a b') == ['a', 'b'] and split_words('a b')[0].startswith('a')",
    "assert unique([1, 1, 2]) == {1, 2} and len(unique('aab')) == 2 and 1 in unique([1])",
    "assert sorted(unique([3, 1])) == [1, 3] and unique([1]).issubset({1, 2})",
    "assert pairs({'b': 1, 'a': 2}) == [('a', 2), ('b', 1)]",
    "assert count('aab') == {'a': 2, 'b': 1} and count('aab').most_common(1) == [('a', 2)]",
    "assert group(['a', 'bb', 'c']) == {1: ['a', 'c'], 2: ['bb']}",
    "assert list(squares(4)) == [0, 1, 4, 9] and sum(squares(3)) == 5",
    "g = naturals()\nassert [next(g), next(g), next(g)] == [0, 1, 2]",
    "import itertools\nassert list(itertools.islice(naturals(), 3)) == [0, 1, 2]",
    "for a, b in zip(naturals(), [0, 1, 2]):\n    assert a == b",
    "try:\n    divide(1, 0)\n    assert False\nexcept ZeroDivisionError as e:\n    assert str(e) == 'no'",
    "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        with self.assertRaises(ZeroDivisionError): divide(1, 0)\n        self.assertAlmostEqual(divide(1, 3), 0.3333333)",
    "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertRaises(Bad, fail)\n        self.assertRaisesRegex(ValueError, 'bad 7', fail)",
    "try:\n    fail()\nexcept Bad as e:\n    assert e.code == 7 and type(e).__name__ == 'Worse' and e.args == ('bad 7',)",
    "assert nothing() is None",
    "assert stats([1, 2, 3]) == {'mean': 2, 'max': 3} and stats([4])['max'] == 4",
    "p = point()\nassert p == (1, 2) and p.x == 1 and p._asdict() == {'x': 1, 'y': 2}",
    "assert adder(2)(3) == 5",
    "assert compose(lambda x: x + 1, lambda x: x * 2)(3) == 7",
    "assert apply_all(lambda x: x * 2, [1, 2]) == [2, 4]",
    "assert apply_all(str, [1, 2]) == ['1', '2'] and apply_all(len, ['a']) == [1]",
    "xs = [3, 1, 2]\nsort_in_place(xs)\nassert xs == [1, 2, 3]",
    "grid = [[1, 2], [3, 4]]\nrotate(grid)\nassert grid == [[3, 1], [4, 2]]",
    "row = [1, 2]\ngrid = [row, [3, 4]]\nzero_first(grid)\nassert row == [0, 2]",
    "xs = [1]\nys = push(xs, 2)\nassert ys is xs and xs == [1, 2]",
    "xs = [1]\nys = push(xs, 2)\nys.append(3)\nassert xs == [1, 2, 3]",
    "xs = [1]\nys = clone(xs)\nys.append(3)\nassert xs == [1] and ys == [1, 3]",
    "xs = [3, 1]\nfound = clone(xs)\nfound.sort()\nassert found == [1, 3]",
    "assert 1 <= roll() <= 6",
    "import random\nrandom.seed(1)\na = roll()\nrandom.seed(1)\nassert a == roll()",
    "assert sorted(shuffled([3, 1, 2])) == [1, 2, 3]",
    "assert decode(encode('abc')) == 'abc'",
    "write('x.txt')\nwith open('x.txt') as f:\n    assert f.read() == 'hi'",
    "import os, tempfile\npath = os.path.join(tempfile.mkdtemp(), 'x')\nwrite(path)\nassert os.path.exists(path)",
    "import io, contextlib\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n    greet()\nassert out.getvalue() == 'hello\\n'",
    "from unittest.mock import patch\nwith patch('random.randint', return_value=3):\n    assert roll() == 3",
    "tick()\nassert calls == 1",
    "before = LIMIT\ntick()\nassert LIMIT == 7 == before",
    "from solution import add, is_prime as prime\nassert add(1, 2) == 3 and prime(3)",
    "import solution\nassert solution.add(1, 2) == 3 and solution.LIMIT == 7",
    "from .main import *\nassert add(1, 2) == 3",
    "import time\nstart = time.time()\nadd(1, 2)\nassert time.time() - start < 5",
    "def check(candidate):\n    for i in range(5):\n        assert candidate(i, 1) == i + 1\ncheck(add)",
    "def test_it():\n    assert add(1, 2) == 3",
    "class TestIt:\n    def setup_method(self): self.x = 1\n    def test_a(self): assert add(self.x, 1) == 2",
    "import random\nfor _ in range(20):\n    a, b = random.random(), random.randint(1, 9)\n    assert add(a, b) == a + b",
    "import copy\nxs = [3, 1]\nys = copy.deepcopy(xs)\nsort_in_place(ys)\nassert xs == [3, 1] and ys == [1, 3]",
    "assert isinstance(add(1, 2), int) and type(area(1)) == float and callable(add)",
    "assert isinstance(squares(3), object) and hasattr(squares(2), '__iter__')",
    "if add(1, 2) != 3:\n    raise AssertionError('no')",
    "from collections import Counter\nassert Counter(split_words('a a')) == Counter({'a': 2})",
    "assert max(squares(4)) == 9 and any(x == 4 for x in squares(4)) and tuple(squares(2)) == (0, 1)",
    "assert (lambda r: r == 3)(add(1, 2)) and {1, 2}.issubset(unique([1, 2, 3]))",
    "assert len(unique([1, 2]).symmetric_difference({1, 2})) == 0",
    "assert sum(a == b for a, b in zip(split_words('a b'), ['a', 'b'])) == 2",
    "import math\nassert math.dist(add([1], [2]), (1, 2)) == 0",
    "inputs, results = [[1, 2], [3, 4]], [3, 7]\nfor i, (inp, exp) in enumerate(zip(inputs, results)):\n    assert add(*inp) == exp, f'{i}'",
    "def same(a, b, tol=1e-6): return abs(a - b) <= tol\nassert same(area(1), 3.14159265)",
    "assert {k: is_prime(k) for k in (2, 4)} == {2: True, 4: False}",
    "out = []\nfor x in squares(3):\n    out.append(x)\nassert out == [0, 1, 4]",
    "assert ' '.join(split_words('a  b')) == 'a b' and split_words('') == []",
    "import operator, functools\nassert functools.reduce(operator.add, squares(4)) == 14",
    "r = stats([1, 3])\nassert all(k in r for k in ('mean', 'max')) and list(r) == ['mean', 'max']",
]
CLASSES = """
from dataclasses import dataclass, field
from enum import Enum
from typing import List, NamedTuple
class Stack:
    def __init__(self, items=None): self.items = items if items is not None else []
    def push(self, x): self.items.append(x); return self
    def pop(self):
        if not self.items: raise IndexError('pop from empty stack')
        return self.items.pop()
    def peek(self): return self.items[-1]
    @property
    def size(self): return len(self.items)
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __getitem__(self, i): return self.items[i]
    def __contains__(self, x): return x in self.items
    def __eq__(self, o): return isinstance(o, Stack) and o.items == self.items
    def __repr__(self): return f'Stack({self.items})'
    def __enter__(self): return self
    def __exit__(self, *a): self.items.clear()
    def __bool__(self): return bool(self.items)
@dataclass(order=True)
class Item:
    name: str
    price: float = 1.0
    tags: List[str] = field(default_factory=list)
class Vector:
    def __init__(self, x, y): self.x, self.y = x, y
    def __add__(self, o): return Vector(self.x + o.x, self.y + o.y)
    def __mul__(self, k): return Vector(self.x * k, self.y * k)
    def __rmul__(self, k): return self * k
    def __matmul__(self, o): return self.x * o.x + self.y * o.y
    def __neg__(self): return Vector(-self.x, -self.y)
    def __abs__(self): return (self.x ** 2 + self.y ** 2) ** 0.5
    def __eq__(self, o): return (self.x, self.y) == (o.x, o.y)
    def __hash__(self): return hash((self.x, self.y))
    def __lt__(self, o): return abs(self) < abs(o)
    def __str__(self): return f'({self.x}, {self.y})'
class Color(Enum):
    RED = 1
    GREEN = 2
class Pair(NamedTuple):
    a: int
    b: int
    def total(self): return self.a + self.b
class Countdown:
    def __init__(self, n): self.n = n
    def __iter__(self): return self
    def __next__(self):
        if self.n <= 0: raise StopIteration
        self.n -= 1
        return self.n
class Cart:
    total_made = 0
    def __init__(self): self.items = {}; self.log = []; Cart.total_made += 1
    def add(self, item, n=1):
        self.items[item.name] = self.items.get(item.name, 0) + n
        self.log.append(('add', item.name))
    def total(self, prices): return sum(prices[k] * n for k, n in self.items.items())
    @staticmethod
    def tax(x): return x * 0.1
    @classmethod
    def empty(cls): return cls()
class Node:
    def __init__(self, val): self.val, self.children = val, []
    def add(self, node): self.children.append(node); return node
    def sum(self): return self.val + sum(c.sum() for c in self.children)
class Matrix(list):
    def rows(self): return len(self)
class Money(int):
    def __str__(self): return f'${int(self)}'
class Account:
    def __init__(self, balance=0): self.balance = balance
    def withdraw(self, n):
        if n > self.balance: raise ValueError('insufficient funds')
        self.balance -= n
        return self.balance
    def transfer(self, other, n): self.withdraw(n); other.balance += n
class Base:
    def name(self): return 'base'
class Child(Base):
    def name(self): return 'child of ' + super().name()
def make_item(name): return Item(name, 2.0)
def matrix(): return Matrix([[1], [2]])
def money(n): return Money(n)
"""
CLASS_TESTS = [
    "s = Stack()\ns.push(1)\ns.push(2)\nassert s.pop() == 2 and s.size == 1 and s.peek() == 1",
    "s = Stack([1, 2])\nassert len(s) == 2 and list(s) == [1, 2] and s[0] == 1 and 2 in s",
    "s = Stack()\nassert s.push(1) is s",
    "s = Stack().push(1).push(2)\nassert s.items == [1, 2]",
    "assert Stack([1]) == Stack([1]) and Stack([1]) != Stack([2])",
    "assert repr(Stack([1])) == 'Stack([1])' and str(Stack([2])) == 'Stack([2])' and f'{Stack([3])}' == 'Stack([3])'",
    "xs = [1]\ns = Stack(xs)\ns.push(2)\nassert xs == [1, 2]",
    "s = Stack([1])\ns.items.append(2)\nassert s.size == 2",
    "s = Stack([1])\nheld = s.items\ns.push(2)\nassert held == [1, 2]",
    "with Stack([1]) as s:\n    assert s.size == 1\nassert s.size == 0",
    "s = Stack()\nassert not s\ns.push(1)\nassert s",
    "import unittest\nclass T(unittest.TestCase):\n    def setUp(self): self.s = Stack()\n    def test_pop(self):\n        with self.assertRaises(IndexError) as caught: self.s.pop()\n        self.assertEqual(str(caught.exception), 'pop from empty stack')\n    def test_push(self):\n        self.s.push(3)\n        self.assertEqual(self.s.items, [3])\n        self.assertIn(3, self.s)\n        self.assertTrue(self.s)",
    "i = Item('a', 2.0)\nassert i.name == 'a' and i.price == 2.0 and i.tags == []",
    "assert Item('a') == Item('a') and Item('a') < Item('b')",
    "assert repr(Item('a')) == \"Item(name='a', price=1.0, tags=[])\"",
    "i = Item('a')\ni.price = 3\ni.tags.append('x')\nassert i.price == 3 and i.tags == ['x']",
    "from dataclasses import asdict\nassert asdict(Item('a')) == {'name': 'a', 'price': 1.0, 'tags': []}",
    "assert sorted([Item('b'), Item('a')])[0].name == 'a'",
    "assert make_item('q').price == 2.0 and make_item('q').name.upper() == 'Q'",
    "v = Vector(1, 2) + Vector(3, 4)\nassert (v.x, v.y) == (4, 6)",
    "v = Vector(1, 2) * 3\nassert v.x == 3 and (2 * Vector(1, 1)).y == 2",
    "assert Vector(1, 2) @ Vector(3, 4) == 11 and (-Vector(1, 2)).x == -1",
    "assert abs(Vector(3, 4)) == 5 and Vector(1, 2) == Vector(1, 2)",
    "assert str(Vector(1, 2)) == '(1, 2)' and len({Vector(1, 2), Vector(1, 2)}) == 1",
    "assert min([Vector(3, 4), Vector(1, 1)]).x == 1",
    "assert Color.RED.value == 1 and Color.RED.name == 'RED'",
    "assert Color(2) is Color.GREEN and Color['RED'] == Color.RED",
    "assert [c.name for c in Color] == ['RED', 'GREEN'] and str(Color.RED) == 'Color.RED'",
    "p = Pair(1, 2)\nassert p == (1, 2) and p.total() == 3 and p.a == 1",
    "assert list(Countdown(3)) == [2, 1, 0]",
    "c = Countdown(2)\nassert next(c) == 1 and next(c) == 0\ntry:\n    next(c)\n    assert False\nexcept StopIteration:\n    pass",
    "c = Cart()\nc.add(Item('a'))\nc.add(Item('a'), 2)\nassert c.items == {'a': 3} and c.total({'a': 2}) == 6",
    "c = Cart()\nc.add(Item('a'))\nassert c.log == [('add', 'a')] and c.log[0][0] == 'add'",
    "n = Cart.total_made\nCart()\nassert Cart.total_made == n + 1",
    "assert Cart.tax(10) == 1.0 and Cart.empty().items == {}",
    "c = Cart()\nc.items['x'] = 2\nassert c.total({'x': 3}) == 6",
    "n = Node(1)\nn.add(Node(2)).add(Node(3))\nassert n.sum() == 6",
    "n = Node(1)\nn.children.append(Node(5))\nassert n.sum() == 6",
    "n = Node(1)\nn.add(Node(2))\nassert [c.val for c in n.children] == [2] and len(n.children) == 1",
    "m = matrix()\nassert m == [[1], [2]] and m.rows() == 2 and isinstance(m, list)",
    "assert money(5) == 5 and str(money(5)) == '$5' and money(5) + 1 == 6",
    "a, b = Account(10), Account()\na.transfer(b, 4)\nassert (a.balance, b.balance) == (6, 4)",
    "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        account = Account(5)\n        with self.assertRaises(ValueError): account.withdraw(9)\n        self.assertEqual(account.balance, 5)\n        self.assertEqual(account.withdraw(2), 3)",
    "assert Child().name() == 'child of base' and isinstance(Child(), Base) and issubclass(Child, Base)",
    "class Other(Base):\n    pass\nassert Other().name() == 'base'",
    "assert type(Child()).__name__ == 'Child' and Child().__class__ is Child and Child.__name__ == 'Child'",
    "assert hasattr(Account(), 'balance') and not hasattr(Account(), 'missing') and getattr(Account(3), 'balance') == 3",
    "a = Account(1)\nassert a.__dict__ == {'balance': 1} and vars(a) == {'balance': 1}",
    "import copy\ns = Stack([1])\nt = copy.deepcopy(s)\nt.push(2)\nassert s.size == 1 and t.size == 2",
    "from solution import Stack as S\ns = S()\ns.push(4)\nassert s.pop() == 4",
    "import solution\ns = solution.Stack()\ns.push(4)\nassert s.pop() == 4",
]
LINKED = """
from typing import List, Optional
class ListNode:
    def __init__(self, val=0, next=None): self.val, self.next = val, next
class TreeNode:
    def __init__(self, val=0, left=None, right=None): self.val, self.left, self.right = val, left, right
class Solution:
    def twoSum(self, nums, target):
        seen = {}
        for i, n in enumerate(nums):
            if target - n in seen: return [seen[target - n], i]
            seen[n] = i
    def reverseList(self, head):
        last = None
        while head: head.next, last, head = last, head, head.next
        return last
    def hasCycle(self, head):
        slow = fast = head
        while fast and fast.next:
            slow, fast = slow.next, fast.next.next
            if slow is fast: return True
        return False
    def maxDepth(self, root): return 1 + max(self.maxDepth(root.left), self.maxDepth(root.right)) if root else 0
    def invertTree(self, root):
        if root: root.left, root.right = self.invertTree(root.right), self.invertTree(root.left)
        return root
    def inorder(self, root): return self.inorder(root.left) + [root.val] + self.inorder(root.right) if root else []
    def moveZeroes(self, nums):
        kept = [n for n in nums if n]
        nums[:] = kept + [0] * (len(nums) - len(kept))
    def setZeroes(self, m):
        rows = [i for i, r in enumerate(m) if 0 in r]; cols = [j for j in range(len(m[0])) if any(r[j] == 0 for r in m)]
        for i in range(len(m)):
            for j in range(len(m[0])):
                if i in rows or j in cols: m[i][j] = 0
    def groupAnagrams(self, words):
        out = {}
        for w in words: out.setdefault(''.join(sorted(w)), []).append(w)
        return list(out.values())
    def removeDuplicates(self, nums):
        nums[:] = sorted(set(nums)); return len(nums)
class LRUCache:
    def __init__(self, capacity): self.capacity, self.d = capacity, {}
    def get(self, k):
        if k not in self.d: return -1
        self.d[k] = self.d.pop(k); return self.d[k]
    def put(self, k, v):
        self.d.pop(k, None); self.d[k] = v
        if len(self.d) > self.capacity: del self.d[next(iter(self.d))]
class Trie:
    def __init__(self): self.words = set()
    def insert(self, w): self.words.add(w)
    def search(self, w): return w in self.words
    def startsWith(self, p): return any(w.startswith(p) for w in self.words)
class MinStack:
    def __init__(self): self.s = []
    def push(self, x): self.s.append(x)
    def pop(self): self.s.pop()
    def top(self): return self.s[-1]
    def getMin(self): return min(self.s)
def build(xs):
    head = None
    for x in reversed(xs): head = ListNode(x, head)
    return head
def to_list(node):
    out = []
    while node: out.append(node.val); node = node.next
    return out
"""
_WALK = "def walk(node):\n    out = []\n    while node:\n        out.append(node.val)\n        node = node.next\n    return out\n"
_MAKE = (
    "def make(xs):\n    head = None\n    for x in reversed(xs):\n        head = ListNode(x, head)\n    return head\n"
)
LINKED_TESTS = [
    "assert Solution().twoSum([2, 7, 11], 9) == [0, 1]",
    "s = Solution()\nassert s.twoSum([3, 3], 6) == [0, 1] and s.twoSum(nums=[1], target=5) is None",
    _WALK + "assert walk(Solution().reverseList(ListNode(1, ListNode(2, ListNode(3))))) == [3, 2, 1]",
    _WALK + _MAKE + "assert walk(Solution().reverseList(make([1, 2, 3]))) == [3, 2, 1]",
    _MAKE
    + "head = Solution().reverseList(make([1, 2]))\nassert head.val == 2 and head.next.val == 1 and head.next.next is None",
    "assert to_list(Solution().reverseList(build([1, 2]))) == [2, 1]",
    "head = ListNode(1)\nhead.next = ListNode(2)\nhead.next.next = head\nassert Solution().hasCycle(head) == True and not Solution().hasCycle(ListNode(1))",
    "root = TreeNode(1, TreeNode(2), TreeNode(3, TreeNode(4)))\nassert Solution().maxDepth(root) == 3",
    "root = Solution().invertTree(TreeNode(1, TreeNode(2), TreeNode(3)))\nassert (root.val, root.left.val, root.right.val) == (1, 3, 2)",
    "assert Solution().inorder(TreeNode(2, TreeNode(1), TreeNode(3))) == [1, 2, 3]",
    "root = TreeNode(1)\nassert Solution().invertTree(root) is root",
    "nums = [0, 1, 0, 3]\nSolution().moveZeroes(nums)\nassert nums == [1, 3, 0, 0]",
    "m = [[1, 0], [1, 1]]\nSolution().setZeroes(m)\nassert m == [[0, 0], [1, 0]]",
    "got = Solution().groupAnagrams(['ab', 'ba', 'c'])\nassert sorted(map(sorted, got)) == [['ab', 'ba'], ['c']]",
    "got = Solution().groupAnagrams(['ab', 'ba', 'c'])\nfor g in got:\n    g.sort()\ngot.sort()\nassert got == [['ab', 'ba'], ['c']]",
    "nums = [2, 1, 1]\nk = Solution().removeDuplicates(nums)\nassert k == 2 and nums[:k] == [1, 2]",
    "c = LRUCache(2)\nc.put(1, 1)\nc.put(2, 2)\nassert c.get(1) == 1\nc.put(3, 3)\nassert c.get(2) == -1",
    "t = Trie()\nt.insert('apple')\nassert t.search('apple') and not t.search('app') and t.startsWith('app')",
    "s = MinStack()\ns.push(2)\ns.push(1)\nassert s.getMin() == 1\ns.pop()\nassert s.top() == 2 and s.getMin() == 2",
    "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(Solution().twoSum([2, 7], 9), [0, 1])\n        self.assertListEqual(Solution().inorder(None), [])\n        self.assertIsNone(Solution().reverseList(None))",
    "class ListNode:\n    def __init__(self, val=0, next=None): self.val, self.next = val, next\nh = Solution().reverseList(ListNode(1, ListNode(2)))\nassert h.val == 2",
    "actions = ['put', 'get']\nc, out = LRUCache(1), []\nfor name, args in zip(actions, [(1, 5), (1,)]):\n    out.append(getattr(c, name)(*args))\nassert out == [None, 5]",
]
NUMERIC = """
import numpy as np, csv, json, os, re
def normalise(xs): xs = np.array(xs, dtype=float); return (xs - xs.mean()) / xs.std()
def total(xs): return np.sum(xs)
def small(x): return np.float32(x)
def noise(n): return np.random.rand(n)
def seeded(n): np.random.seed(0); return np.random.randint(0, 9, n)
def double(a): a *= 2; return a
def shape(a): return a.shape
def task_func(path):
    with open(path) as f: return [row for row in csv.DictReader(f)]
def words(text): return re.findall(r'\\w+', text)
def both(xs): return np.mean(xs), {'n': len(xs), 'a': np.array(xs)}
"""
NUMERIC_TESTS = [
    "import numpy as np\nassert np.allclose(normalise([1, 2, 3]), [-1.2247449, 0, 1.2247449])",
    "assert abs(normalise([1, 2, 3]).sum()) < 1e-9 and len(normalise([1, 2])) == 2",
    "assert total([1, 2, 3]) == 6",
    "assert small(0.3) == 0.3",
    "assert (noise(3) < 1).all() and noise(2).shape == (2,)",
    "import numpy as np\nnp.random.seed(0)\na = noise(2)\nnp.random.seed(0)\nassert (a == noise(2)).all()",
    "assert list(seeded(3)) == list(seeded(3))",
    "import numpy as np\na = np.array([1, 2])\ndouble(a)\nassert a.tolist() == [2, 4]",
    "import numpy as np\nassert double(np.array([1])).tolist() == [2] and shape(np.zeros((2, 3))) == (2, 3)",
    "import unittest, tempfile, os\nclass TestCases(unittest.TestCase):\n    def setUp(self):\n        self.path = os.path.join(tempfile.mkdtemp(), 'x.csv')\n        with open(self.path, 'w') as f: f.write('a,b\\n1,2\\n')\n    def test_case_1(self):\n        self.assertEqual(task_func(self.path), [{'a': '1', 'b': '2'}])\n    def test_missing(self):\n        with self.assertRaises(FileNotFoundError): task_func('nowhere')",
    "import unittest\nfrom unittest.mock import patch, mock_open\nclass TestCases(unittest.TestCase):\n    @patch('builtins.open', new_callable=mock_open, read_data='a\\n1\\n')\n    def test_case_1(self, _):\n        self.assertEqual(task_func('x'), [{'a': '1'}])",
    "assert words('a b, c') == ['a', 'b', 'c']",
    "import numpy as np\nmean, rest = both([1, 2, 3])\nassert mean == 2 and rest['n'] == 3\nnp.testing.assert_array_equal(rest['a'], [1, 2, 3])",
    "import unittest\nimport numpy as np\nclass TestCases(unittest.TestCase):\n    def test_types(self):\n        self.assertIsInstance(normalise([1, 2]), np.ndarray)\n        self.assertEqual(normalise([1, 2]).tolist(), [-1.0, 1.0])",
]
CORPUS = [
    *((FUNCTIONS, test) for test in FUNCTION_TESTS),
    *((CLASSES, test) for test in CLASS_TESTS),
    *((LINKED, test) for test in LINKED_TESTS),
    *((NUMERIC, test) for test in NUMERIC_TESTS),
]
