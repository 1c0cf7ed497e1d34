"""The reward for code: what tests are, what passes them, and what stops them. Hostile programs: tests/attacks."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hybridflow.environments.code import code_runner, code_tests
from hybridflow.environments.code.code_runner import run_program
from hybridflow.environments.rewards import code_reward
from hybridflow.errors import RewardError

pytestmark = [pytest.mark.runs, pytest.mark.own_run("grpo: programs of a model run in processes of their own")]

SUM = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
ADD = {"tests": ["assert add(1, 2) == 3", "assert add(3, 4) == 7"]}
PRINTS = {"inputs": [""], "outputs": ["done"]}

ALL = {"score": 1.0, "passed": 1.0, "compiled": 1.0, "unprotected": 0.0}
HALF = ALL | {"score": 0.0, "passed": 0.5}
NOTHING = ALL | {"score": 0.0, "passed": 0.0}
NO_PROGRAM = NOTHING | {"compiled": 0.0}

STANDARD_LIBRARY = """
import asyncio, bisect, concurrent.futures, csv, decimal, fcntl, fractions, glob, gzip, hashlib, heapq, itertools, json
import logging, mmap, multiprocessing, os, pathlib, pickle, platform, queue, random, re, resource, select, shutil
import locale, signal, socket, sqlite3, struct, tarfile, tempfile, threading, time, uuid, zipfile, zlib, zoneinfo
pathlib.Path("a.txt").write_text("x")
shutil.copy2("a.txt", "b.txt")
os.chmod("a.txt", 0o600)
os.makedirs("d/e")
shutil.copytree("d", "f")
shutil.rmtree("d")
os.replace("b.txt", "g.txt")
assert sorted(glob.glob("*.txt")) == ["a.txt", "g.txt"] and list(os.walk("f"))
with tempfile.TemporaryDirectory() as t, tempfile.NamedTemporaryFile() as n:
    n.write(b"1")
    n.flush()
    os.fsync(n.fileno())
db = sqlite3.connect("x.db")
db.execute("create table t (a)")
db.execute("insert into t values (1)")
db.commit()
assert db.execute("select a from t").fetchall() == [(1,)]
async def main():
    r = await asyncio.gather(asyncio.to_thread(time.sleep, .01), asyncio.sleep(.01, 5))
    async with asyncio.timeout(50):
        return r[1]
assert asyncio.run(main()) == 5
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    assert list(pool.map(str, range(5))) == ["0", "1", "2", "3", "4"]
ran = []
signal.signal(signal.SIGALRM, lambda *a: ran.append(1))
signal.setitimer(signal.ITIMER_REAL, .01)
while not ran: time.sleep(.01)
signal.raise_signal(signal.SIGALRM)
assert len(ran) == 2
mmap.mmap(-1, 4096)[0] = 1
r, w = os.pipe()
os.write(w, b"1")
assert select.select([r], [], [], 1)[0] == [r]
a, b = socket.socketpair()
a.send(b"hi")
assert b.recv(2) == b"hi"
with zipfile.ZipFile("z.zip", "w") as z: z.write("a.txt")
with tarfile.open("z.tar", "w") as z: z.add("a.txt")
fcntl.flock(open("a.txt"), fcntl.LOCK_EX)
logging.basicConfig(filename="log.txt")
assert os.cpu_count() and os.getpid() and os.getcwd() and os.uname() and os.times() and time.process_time()
random.seed()
os.urandom(3)
e = threading.Event()
threading.Timer(.01, e.set).start()
assert e.wait(50)
resource.getrusage(resource.RUSAGE_SELF)
resource.getrlimit(resource.RLIMIT_AS)
platform.system()
uuid.uuid4()
assert "SECRET" not in os.environ
print("ok")
"""

SPOIL_FILTER = """
import marshal
settings = marshal.loads(bytes.fromhex(sys.argv[1]))
settings['{}'] = bytes(8)
sys.argv[1] = marshal.dumps(settings).hex()
"""


def score(program: str, truth: object, **settings):
    limits: dict[str, Any] = {"timeout_s": 100.0, "total_timeout_s": 1000.0, **settings}
    solution = f"Here it is:\n```python\n{program}\n```\n"
    return code_reward(data_source="code", solution_str=solution, ground_truth=truth, extra_info=None, **limits)


@pytest.mark.parametrize(
    ("program", "truth", "wanted"),
    [
        ("print(sum(map(int, input().split())))", SUM, ALL),
        ("a, b = map(int, input().split())\nif __name__ == '__main__':\n    print(a + b, ' \\n\\n')", SUM, ALL),
        ("input()\nprint(3)", SUM, HALF),
        ("import sys\nprint(sum(map(int, sys.stdin.read().split())))\nsys.exit(0)", SUM, ALL),
        ("def add(a, b):\n    return a + b\nif __name__ == '__main__':\n    input()", ADD, ALL),
        ("def add(a, b):\n    return 3", ADD, HALF),
        ("add = 1", ADD, NOTHING),
        ("print('don')", PRINTS, NOTHING),
        ("import numpy\nprint('done')", PRINTS, NOTHING),
        ("import threading\nt = threading.Thread(target=print, args=('done',))\nt.start()\nt.join()", PRINTS, ALL),
        (
            "import dataclasses, pickle\n@dataclasses.dataclass\nclass P:\n    x: int\n"
            "y = pickle.loads(pickle.dumps(P(3)))",
            {"tests": ["assert y == P(3)"]},
            ALL | {"unprotected": 1.0},
        ),
        *((program, ADD, NO_PROGRAM) for program in ("def", "x = \x00", "\ud800", "(" * 10_000, "x = 1 +" * 2)),
    ],
)
def test_a_program_scores_if_it_compiles_and_passes_all_tests(program, truth, wanted):
    assert score(program, truth) == wanted


def test_the_standard_library_works_within_the_restrictions(monkeypatch):
    monkeypatch.setenv("SECRET", "42")
    assert score(STANDARD_LIBRARY, {"inputs": [""], "outputs": ["ok"]}) == ALL


def test_partial_credit_scores_the_share_and_max_tests_limits_the_tests():
    assert score("input()\nprint(3)", SUM, partial_credit=True)["score"] == 0.5
    assert score("input()\nprint(3)", SUM, max_tests=1) == ALL
    truth = {"tests": ["assert f(1) == 1", "assert f(2) == 1", "assert f(3) == 1"]}
    assert score("def f(x):\n    return x % 2", truth, partial_credit=True)["passed"] == 2 / 3  # goes on


def test_the_share_of_unprotected_tests_is_that_of_the_tests_that_run():
    truth = {"tests": ["assert add(1, 2) == 3", "total = add(1, 2)\nassert total == 3"]}
    program = "def add(a, b):\n    return a + b"
    assert score(program, truth) == ALL | {"unprotected": 0.5}
    assert score("no program", truth)["unprotected"] == 0.5
    assert score(program, truth, max_tests=1) == ALL


def test_ground_truth_may_be_json_or_hold_arrays():
    assert score("print(sum(map(int, input().split())))", json.dumps(SUM)) == ALL
    arrays = {name: np.array(texts, dtype=object) for name, texts in SUM.items()}
    assert score("print(sum(map(int, input().split())))", {**arrays, "tests": None}) == ALL


@pytest.mark.parametrize("kind", ["statements", pytest.param("input", marks=pytest.mark.exhaustive)])
def test_a_program_that_hangs_is_not_run_on_further_tests(kind, monkeypatch):
    runs = []
    monkeypatch.setattr(code_tests, "run_program", lambda *a, **k: runs.append(run_program(*a, **k)) or runs[-1])
    numbers, program = (1, 1, 2, 1, 1, 1, 1, 1), "def f(x):\n    while x == 2:\n        pass\n    return x"
    truth = {"tests": [f"assert f({n}) == {n}" for n in numbers]}
    if kind == "input":
        truth = {"inputs": [str(n) for n in numbers], "outputs": [str(n) for n in numbers]}
        program += "\nprint(f(int(input())))"
    result = score(program, truth, timeout_s=2.0, partial_credit=True)
    assert result == {"score": 0.25, "passed": 0.25, "compiled": 1.0, "unprotected": 0.0}
    assert [run.is_late for run in runs] == [False, False, True]


def test_tests_after_the_total_time_count_as_not_passed(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(code_tests, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def run(*arguments, **settings):
        now[0] += 4.0
        return SimpleNamespace(compiled=True, finished=True, is_late=False, is_idle=False)

    monkeypatch.setattr(code_tests, "run_program", run)
    truth = {"tests": ["assert f(0) == 0"] * 4}
    assert score("f = int", truth, total_timeout_s=8.0, partial_credit=True)["passed"] == 0.5
    assert score("f = int", truth)["passed"] == 1.0


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (SPOIL_FILTER.format("strict_filter"), "the kernel rejects seccomp filters"),
        (SPOIL_FILTER.format("counting_filter"), "the kernel rejects seccomp notifications"),
        ("import code_limits\ncode_limits._libc.capset = lambda *a: 0", "drops all capabilities"),
        ("import code_limits\ncode_limits._CREATE_RULESET = 9999", "Landlock"),
        ("import sys\nsys.modules['ctypes'] = None", "ModuleNotFoundError"),
        ("import os\nos._exit(1)", "did not start"),
    ],
)
def test_no_program_runs_without_restrictions(tmp_path, monkeypatch, spoil, message):
    folder = Path(code_runner.__file__).parent
    script = tmp_path / "spoiled.py"
    script.write_text(f"""
import os, sys
sys.path.insert(0, {str(folder)!r})
{spoil}
import code_process
code_process.__file__ = {str(folder / "code_process.py")!r}
code_process.main()
""")
    monkeypatch.setattr(code_runner, "_SCRIPT", script)
    with pytest.raises(RewardError, match=f"(?s)so no program was run.*{message}.*Linux 5.13"):
        score(f"open({str(tmp_path / 'new')!r}, 'w')", ADD)
    assert not (tmp_path / "new").exists()


def test_importing_the_reward_table_does_not_import_what_takes_long():
    program = (
        "import sys, hybridflow.environments.rewards; sys.exit(bool({'math_verify', 'httpx2'} & sys.modules.keys()))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
