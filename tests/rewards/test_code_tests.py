"""Hostile programs: each scores zero quickly and leaves no process or file."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hybridflow.errors import RewardError
from hybridflow.rewards import RewardRunner, code_reward, code_runner, code_tests
from hybridflow.rewards.code_block import last_code_block
from hybridflow.rewards.code_runner import run_program

SUM = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
ADD = {"tests": ["assert add(1, 2) == 3", "assert add(3, 4) == 7"]}
PRINTS = {"inputs": [""], "outputs": ["done"]}

ALL = {"score": 1.0, "passed": 1.0, "compiled": 1.0}
HALF = {"score": 0.0, "passed": 0.5, "compiled": 1.0}
NOTHING = {"score": 0.0, "passed": 0.0, "compiled": 1.0}
NO_PROGRAM = {"score": 0.0, "passed": 0.0, "compiled": 0.0}


def score(program: str, truth: object, **settings):
    limits: dict[str, Any] = {"timeout_s": 100.0, "total_timeout_s": 1000.0, **settings}
    solution = f"Here it is:\n```python\n{program}\n```\n"
    return code_reward(data_source="code", solution_str=solution, ground_truth=truth, extra_info=None, **limits)


def score_when_compiled(program: str, truth: object, **settings):
    """Score until the program is compiled within its time limit, as it is at once unless the machine is busy."""
    while (result := score(program, truth, **settings)) == NO_PROGRAM:
        pass
    return result


def open_files() -> set[tuple[str, str]]:
    """Return the descriptors of this process with what they refer to."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return found


@pytest.fixture(autouse=True)
def leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    files, others = open_files(), children()
    yield
    assert list(tmp_path.glob("hybridflow-code-*")) == []
    assert open_files() <= files  # each by number and target: files of earlier tests may be closed meanwhile
    assert children() <= others


STANDARD_LIBRARY = """
import asyncio, concurrent.futures, shutil, sqlite3, tempfile, pathlib, zipfile, glob, os, mmap, signal, select, logging
import time, threading, multiprocessing, decimal, io, csv, json, pickle, gzip, queue, random, subprocess, fcntl
import sched, contextlib, socket, selectors, tarfile
pathlib.Path("a.txt").write_text("x")
shutil.copy2("a.txt", "b.txt")
shutil.copy("a.txt", "c.txt")
os.chmod("a.txt", 0o600)
os.makedirs("d/e")
shutil.copytree("d", "f")
shutil.rmtree("d")
os.replace("b.txt", "g.txt")
assert sorted(glob.glob("*.txt")) == ["a.txt", "c.txt", "g.txt"] and list(os.walk("f"))
with tempfile.TemporaryDirectory() as t, tempfile.NamedTemporaryFile() as n:
    n.write(b"1")
    n.flush()
    os.fsync(n.fileno())
db = sqlite3.connect("x.db")
db.execute("create table t (a)")
db.execute("insert into t values (1)")
db.commit()
assert db.execute("select a from t").fetchall() == [(1,)]
db.close()
assert sqlite3.connect(":memory:").execute("select 1").fetchone() == (1,)
async def main():
    r = await asyncio.gather(asyncio.to_thread(time.sleep, .01), asyncio.sleep(.01, 5))
    q = asyncio.Queue()
    await q.put(1)
    async with asyncio.timeout(5):
        return r[1] + await q.get()
assert asyncio.run(main()) == 6
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    assert list(pool.map(str, range(5))) == ["0", "1", "2", "3", "4"]
ran = []
signal.signal(signal.SIGALRM, lambda *a: ran.append(1))
signal.setitimer(signal.ITIMER_REAL, .01)
time.sleep(.05)
assert ran
signal.raise_signal(signal.SIGALRM)
assert len(ran) == 2
m = mmap.mmap(-1, 4096)
m[0] = 1
r, w = os.pipe()
os.write(w, b"1")
assert select.select([r], [], [], 1)[0] == [r]
a, b = socket.socketpair()
a.send(b"hi")
assert b.recv(2) == b"hi"
a.close()
with zipfile.ZipFile("z.zip", "w") as z: z.write("a.txt")
with tarfile.open("z.tar", "w") as z: z.add("a.txt")
fcntl.flock(open("a.txt"), fcntl.LOCK_EX)
logging.basicConfig(filename="log.txt")
logging.error("x")
assert os.cpu_count() and os.getpid() and os.getcwd() and os.uname() and os.times() and time.process_time()
random.seed()
os.urandom(3)
time.monotonic();
e = threading.Event()
t = threading.Timer(.01, e.set)
t.start()
assert e.wait(5)
multiprocessing.cpu_count()
import resource
resource.getrusage(resource.RUSAGE_SELF)
resource.getrlimit(resource.RLIMIT_AS)
import platform
platform.system()
import locale
import tracemalloc, faulthandler
import uuid
uuid.uuid4()
print("ok")
"""


def children() -> set[str]:
    while True:
        try:
            tasks = list(Path("/proc/self/task").iterdir())
            return {pid for task in tasks for pid in (task / "children").read_text().split()}
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread has ended: its children belong to another one now


def test_a_program_reads_stdin_and_prints():
    assert score("print(sum(map(int, input().split())))", SUM) == ALL
    assert (
        score("a, b = map(int, input().split())\nif __name__ == '__main__':\n    print(a + b, ' \\n\\n')", SUM) == ALL
    )
    assert score("input()\nprint(3)", SUM) == HALF
    assert score("import sys\nprint(sum(map(int, sys.stdin.read().split())))\nsys.exit(0)", SUM) == ALL


def test_statements_run_after_the_program_in_its_namespace():
    assert score("def add(a, b):\n    return a + b\nif __name__ == '__main__':\n    input()", ADD) == ALL
    assert score("def add(a, b):\n    return 3", ADD) == HALF
    assert score("add = 1", ADD) == NOTHING
    program = (
        "import dataclasses, pickle\n@dataclasses.dataclass\nclass P:\n    x: int\ny = pickle.loads(pickle.dumps(P(3)))"
    )
    assert score(program, {"tests": ["assert y == P(3)"]}) == ALL


def test_partial_credit_scores_the_share_and_max_tests_limits_the_tests():
    assert score("input()\nprint(3)", SUM, partial_credit=True)["score"] == 0.5
    assert score("input()\nprint(3)", SUM, max_tests=1) == ALL


@pytest.mark.parametrize("program", ["def", "x = \x00", "\ud800", "(" * 10_000, "x = 1 +" * 2])
def test_a_program_that_does_not_compile_is_reported(program):
    assert score(program, ADD) == NO_PROGRAM


def test_a_program_that_raises_fails_despite_correct_output():
    assert score("print('done')\nraise ValueError", PRINTS) == NOTHING
    assert score("print('done')\nimport os\nos._exit(1)", PRINTS) == NOTHING
    assert score("print('don')", PRINTS) == NOTHING


@pytest.mark.parametrize(
    "program",
    [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "print('passed')\ndef add(a, b):\n    import os\n    os._exit(0)",
        "def add(a, b):\n    raise SystemExit(0)",
        "import builtins\nbuiltins.AssertionError = AssertionError = Exception\nadd = min",
        "import builtins\nbuiltins.exec = lambda *a: None\nbuiltins.compile = lambda *a, **k: ''\nadd = min",
        "import os\nos.read = lambda fd, n: b''\nos._exit = lambda code: None\nadd = min",
        "import sys\nsys.excepthook = lambda *a: None\nadd = min",
        "import atexit, os\natexit.register(os._exit, 0)\nadd = min",
        "import sys\nsys.settrace(lambda *a: None)\nadd = min",
        "import os\nfor fd in range(3, 64):\n    try:\n        os.write(fd, b'loaded\\ndone\\n' + b'0' * 32 + b'\\n')\n"
        "    except OSError:\n        pass\nos._exit(0)",
        "import os\nos.closerange(3, 64)\nadd = min",
    ],
)
def test_a_program_does_not_pass_by_exiting_or_replacing_functions(program):
    assert score(program, ADD)["score"] == 0.0


ATTEMPTS = {
    "a socket": "import socket\nsocket.socket()",
    "a pair of sockets that reaches others": "import socket\nsocket.socketpair(socket.AF_INET)",
    "signals by a file's owner": (
        "import fcntl, os, struct\nfor fd in range(64):\n    try:\n        os.fstat(fd)\n"
        "    except OSError:\n        continue\n    fcntl.ioctl(fd, 0x8901, struct.pack('i', os.getppid()))\n"
        "    fcntl.ioctl(fd, 0x5452, struct.pack('i', 1))"
    ),
    "a fork": "import os\nif os.fork() == 0:\n    os._exit(0)",
    "a program": "import os\nassert os.system('true') == 0",
    "a subprocess": "import subprocess\nsubprocess.run(['/bin/true'])",
    "replacing itself": "import os\nos.execv('/bin/echo', ['echo', 'done'])",
    "killing the parent": "import os\nos.kill(os.getppid(), 9)",
    "killing all": "import os\nos.kill(-1, 9)",
    "limits of the parent": "import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
    "limits of its own": "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (999, 999))",
    "a signal through a file": "import fcntl, os\nfcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())",
    "a session": "import os\nos.setsid()",
    "writing elsewhere": "open('{outside}/new', 'w')",
    "overwriting elsewhere": "open('{outside}/secret', 'a')",
    "emptying elsewhere": "import os\nos.truncate('{outside}/secret', 0)",
    "emptying what may be read": "import os\nos.open(os.__file__, os.O_RDONLY | os.O_TRUNC)",
    "removing elsewhere": "import os\nos.remove('{outside}/secret')",
    "renaming elsewhere": "import os\nos.rename('program.py', '{outside}/new')",
    "linking elsewhere": "import os\nos.link('{outside}/secret', 'copy')",
    "reading elsewhere": "open('{outside}/secret').read()",
    "reading through a link": "import os\nos.symlink('{outside}/secret', 'copy')\nopen('copy').read()",
    "listing elsewhere": "import os\nos.listdir('{outside}')",
    "reading the parent": "import os\nopen(f'/proc/{{os.getppid()}}/environ').read()",
    "reading itself": "open('/proc/self/maps').read()",
    "reading passwords": "open('/etc/passwd').read()",
    "much memory": "x = bytearray(10 * 2**30)",
    "a large file": "with open('large', 'wb') as file:\n    file.write(bytes(2**21))",
    "many files": "kept = [open('program.py') for _ in range(100)]",
    "endless output": "while True:\n    print('done' * 1000)",
    "a device": "import os\nos.mknod('device', 0o020666, os.makedev(1, 1))",
    "a mount": "import ctypes\nassert ctypes.CDLL(None).mount(b'x', b'/', b'tmpfs', 0, None) == 0",
    "a trace": "import ctypes, os\nassert ctypes.CDLL(None).ptrace(16, os.getppid(), None, None) == 0",
    "a namespace": "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0",
    "an unknown call": "import ctypes\nassert ctypes.CDLL(None).syscall(0x40000000 + 39) > 0",
    "io_uring": "import ctypes\nassert ctypes.CDLL(None).syscall(425, 8, bytes(120)) >= 0",
    "crashing": "import ctypes\nctypes.string_at(0)",
}


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_a_program_may_only_compute(attempt, tmp_path):
    (tmp_path / "secret").write_text("42")
    program = ATTEMPTS[attempt].format(outside=tmp_path) + "\nprint('done')"
    assert score_when_compiled(program, PRINTS, timeout_s=1.0) == NOTHING
    assert (tmp_path / "secret").read_text() == "42"
    assert (tmp_path / "secret").stat().st_mode & 0o777 != 0o777
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "program",
    [
        "while True:\n    pass",
        "import time\ntime.sleep(1000)",
        "import os\nos.close(0)\nos.close(1)\nwhile True:\n    pass",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()\nprint('done')",
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True:\n    pass",
    ],
)
@pytest.mark.timeout(120)
def test_an_endless_program_is_killed(program):
    assert score_when_compiled(program, PRINTS, timeout_s=0.3) == NOTHING


HANGS_ONCE = "def f(x):\n    while x == 2:\n        pass\n    return x"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["statements", "input", "processor time"])
def test_a_program_that_hangs_is_not_run_on_further_tests(kind, monkeypatch):
    runs = []
    monkeypatch.setattr(code_tests, "run_program", lambda *a, **k: runs.append(run_program(*a, **k)) or runs[-1])
    numbers, program = (1, 1, 2, 1, 1, 1, 1, 1), HANGS_ONCE
    truth = {"tests": [f"assert f({n}) == {n}" for n in numbers]}
    if kind == "input":
        truth = {"inputs": [str(n) for n in numbers], "outputs": [str(n) for n in numbers]}
        program += "\nprint(f(int(input())))"
    if kind == "processor time":
        program = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\n" + program
    result = score(program, truth, timeout_s=8.0, partial_credit=True)
    assert result == {"score": 0.25, "passed": 0.25, "compiled": 1.0}
    assert [run.is_late for run in runs] == [False, False, True]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tests_after_the_total_time_count_as_not_passed():
    program = "import time\ndef f(x):\n    time.sleep(x)\n    return x"
    truth = {"tests": ["assert f(0) == 0", "assert f(10) == 10", "assert f(0) == 0", "assert f(0) == 0"]}
    result = score(program, truth, timeout_s=200.0, total_timeout_s=9.0, partial_credit=True)
    assert result == {"score": 0.25, "passed": 0.25, "compiled": 1.0}
    assert score(program, truth)["passed"] == 1.0


def test_a_failed_test_that_was_fast_does_not_stop_the_further_tests():
    truth = {"tests": ["assert f(1) == 1", "assert f(2) == 1", "assert f(3) == 1"]}
    assert score("def f(x):\n    return x % 2", truth, partial_credit=True)["passed"] == 2 / 3


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_program_that_hangs_in_every_test_scores_within_the_reward_timeout():
    solution = "```python\ndef f(x):\n    while True:\n        pass\n```"
    truth = {"tests": [f"assert f({n}) == {n}" for n in range(15)]}
    runner = RewardRunner("hybridflow.rewards:code_reward", num_processes=1, timeout_s=60.0, memory_bytes=0)
    sample = {"data_source": "code", "solution_str": solution, "ground_truth": truth, "extra_info": {}}
    (outcome,) = runner.run([(0, sample)])
    runner.close()
    assert (outcome.kind, outcome.result) == (None, NOTHING)


@pytest.mark.timeout(120)
def test_endless_statements_are_killed():
    program = "def add(a, b):\n    while True:\n        pass"
    assert score_when_compiled(program, {"tests": ["add(1, 2)"]}, timeout_s=0.3) == NOTHING


def test_threads_are_allowed_and_limited():
    program = "import threading\nt = threading.Thread(target=print, args=('done',))\nt.start()\nt.join()"
    assert score(program, PRINTS) == ALL
    bomb = "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(60,)).start()"
    assert score_when_compiled(bomb, PRINTS, timeout_s=0.5, memory_bytes=2**28) == NOTHING


def test_a_program_may_write_in_its_directory_which_is_removed():
    program = """
import os, tempfile
with tempfile.TemporaryFile() as file:
    file.write(b"x")
os.mkdir("locked", 0)
os.symlink("/", "root")
directory = os.open(".", os.O_RDONLY)
for _ in range(50):
    os.mkdir("deeper" * 40, dir_fd=directory)
    inner = os.open("deeper" * 40, os.O_RDONLY, dir_fd=directory)
    os.close(directory)
    directory = inner
print("done")
"""
    assert score(program, PRINTS) == ALL


def test_names_in_the_directory_of_a_program_do_not_prevent_its_removal():
    program = "import os\nfor i in range(9):\n    os.makedirs(f'{i}-moved/x/y')\nprint('done')"
    assert score(program, PRINTS) == ALL


def test_the_standard_library_works_within_the_restrictions():
    assert score(STANDARD_LIBRARY, {"inputs": [""], "outputs": ["ok"]}) == ALL


def test_environment_is_empty_and_only_the_standard_library_imports(monkeypatch):
    monkeypatch.setenv("SECRET", "42")
    assert score("import os\nassert 'SECRET' not in os.environ\nprint('done')", PRINTS) == ALL
    assert score("import numpy\nprint('done')", PRINTS) == NOTHING
    modules = "json, heapq, decimal, fractions, itertools, sqlite3, zoneinfo, random, bisect, hashlib, zlib, struct, re"
    assert score(f"import {modules}\nprint('done')", PRINTS) == ALL


def test_code_reward_works_in_any_thread():
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(score("def add(a, b):\n    return a + b", ADD)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [ALL, ALL, ALL]


def test_ground_truth_may_be_json_or_hold_arrays():
    assert score("print(sum(map(int, input().split())))", json.dumps(SUM)) == ALL
    arrays = {name: np.array(texts, dtype=object) for name, texts in SUM.items()}
    assert score("print(sum(map(int, input().split())))", {**arrays, "tests": None}) == ALL


@pytest.mark.parametrize(
    "truth",
    [
        None,
        "no JSON",
        "[]",
        {},
        {"tests": []},
        {"tests": "assert True"},
        {"tests": [1]},
        {"inputs": ["1"], "outputs": []},
        {"inputs": ["1"]},
        {**SUM, **ADD},
    ],
)
def test_ground_truth_without_tests_is_an_error(truth):
    with pytest.raises(RewardError, match="the ground truth must look like"):
        score("print(1)", truth)


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("```python\na\n```", "a"),
        ("```\na\n```", "a"),
        ("```py\na\n\nb\n```\n```Python3\nc\n```", "c"),
        ("  ```python\n  a\n  ```", "a"),
        ("```python\na\n```\n```json\n{}\n```", "a"),
        ("```python\na\n```\n```python\nb", "a"),
        ("```python\n```", ""),
        ("print(1)", None),
        ("```rust\na\n```", None),
        ("``` `" * 1000, None),
    ],
)
def test_the_last_complete_block_of_python_is_the_program(text, block):
    assert last_code_block(text) == block


def test_a_response_without_a_program_scores_zero():
    assert code_reward("code", "print(3)", SUM) == NO_PROGRAM
    assert code_reward("code", f"```python\n{'#' * 300_000}\n```", SUM) == NO_PROGRAM


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            "import marshal\ns = marshal.loads(bytes.fromhex(sys.argv[1])) | {'strict_filter': bytes(8)}\n"
            "sys.argv[1] = marshal.dumps(s).hex()",
            "the kernel rejects seccomp filters",
        ),
        (
            "import marshal\ns = marshal.loads(bytes.fromhex(sys.argv[1])) | {'counting_filter': bytes(8)}\n"
            "sys.argv[1] = marshal.dumps(s).hex()",
            "the kernel rejects seccomp notifications",
        ),
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


def test_no_program_runs_on_an_unsupported_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="riscv64"))
    with pytest.raises(RewardError, match=r"(?s)so no program was run.*not 'riscv64'.*Linux 5.13"):
        score(f"open({str(tmp_path / 'new')!r}, 'w')", ADD)
    assert not (tmp_path / "new").exists()


def test_importing_the_reward_table_does_not_import_math_verify():
    program = "import sys, hybridflow.rewards; sys.exit('math_verify' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ({"timeout_s": 0}, "timeout_s=0 must be more than 0 seconds"),
        ({"timeout_s": float("nan")}, "timeout_s=nan must be more than 0 seconds"),
        ({"total_timeout_s": 0}, "total_timeout_s=0 must be more than 0 seconds"),
        ({"memory_bytes": 2**20}, "memory_bytes=1048576 must be a whole number, 33554432 or more"),
        ({"memory_bytes": 1.5e9}, "memory_bytes=1500000000.0 must be a whole number"),
        ({"max_output_bytes": 0}, "max_output_bytes=0 must be a whole number, 1 or more"),
        ({"max_tests": -1}, "max_tests=-1 must be a whole number, 0 or more"),
    ],
)
def test_limits_out_of_range_are_an_error(limit, message):
    with pytest.raises(RewardError, match=message):
        score("print(3)", PRINTS, **limit)
