"""Bytes on the connection of a reward process that are not a reply: a failure of the sample, and a new process."""

import json
import os
import re
import socket
import subprocess
import sys

import pytest

from fixtures.reward_samples import samples
from hybridflow.environments.processes.connection import HEAD, MARK, receive
from hybridflow.errors import RewardError

pytestmark = [pytest.mark.runs, pytest.mark.own_run("grpo: its reward process writes only replies")]

FUNCTIONS = """
import os, stat, time

def write_to_a_socket(contents):
    for number in range(3, 64):
        try:
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                os.write(number, contents)
                return
        except OSError:
            pass

def score(data_source, solution_str, ground_truth, extra_info):
    if solution_str.startswith("attack"):
        write_to_a_socket(bytes.fromhex(ground_truth))
    if solution_str == "attack and wait":
        time.sleep(1)
    return len(solution_str)
"""


def frame(message):
    contents = message if isinstance(message, bytes) else json.dumps(message).encode()
    return HEAD.pack(MARK, len(contents)) + contents


ATTACK = 2
"""Index of the attacking sample, whose question has the number 3: that of the settings has 0."""

ATTACKS = [
    ("text", b"hello\n", r"wrote b'hello\\n"),
    ("a huge length", HEAD.pack(MARK, 2**63), r"wrote b'hfr\\x00\\x00\\x00\\x00"),
    ("not JSON", frame(b"not JSON"), r"wrote b'not JSON', which is not a reply, to its connection to the run"),
    ("deep nesting", frame(b"[" * 100_000), r"wrote b'\[\[\["),
    ("a number of text", frame({"number": "2", "result": 1.0}), r"sent {'number': '2', 'result': 1\.0}, which"),
    ("an unknown number", frame({"number": 10**9, "result": 1.0}), r"sent a reply that is not expected,"),
    ("a reply to the next sample", frame({"number": 4, "result": 1.0}), r"sent a reply that is not expected"),
    ("its own reply, so that it has two", frame({"number": 3, "result": 9.0}), r"sent a reply that is not expected"),
    (
        "loaded again",
        frame({"number": 0, "is_async": True, "takes_batches": True}),
        r"sent a reply that is not expected",
    ),
    ("an unknown kind", frame({"number": 3, "kind": "x"}), r"which is not a reply: kind='x' is not one of raised,"),
    ("a result that is a table", frame({"number": 3, "result": {"a": 1}}), r"not a reply: {'a': 1} is not a value"),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("contents", "problem"), [a[1:] for a in ATTACKS], ids=[a[0] for a in ATTACKS])
def test_bytes_that_are_not_a_reply_fail_their_sample_alone(runner, contents, problem):
    scores = runner()
    outcomes = scores.run(samples(["a", "bb", "attack", "ccc", "dddd"], contents.hex()))
    assert [outcome.result for outcome in outcomes] == [1, 2, None, 3, 4]
    assert outcomes[ATTACK].kind == "died"
    assert re.search(problem, outcomes[ATTACK].problem), outcomes[ATTACK].problem
    assert [outcome.result for outcome in scores.run(samples(["a"], ""))] == [1]


def test_a_late_reply_to_an_earlier_call_is_not_taken_for_a_new_one(runner):
    scores, forged = runner(), frame({"number": 2, "result": 9.0})
    assert [outcome.result for outcome in scores.run(samples(["a", "attack and wait"], forged.hex()))] == [1, 9.0]
    assert [outcome.result for outcome in scores.run(samples(["a", "bb", "ccc"], ""))] == [1, 2, 3]


@pytest.mark.parametrize(
    "contents", [b"hello", frame({"number": 0, "result": 1.0}), frame({"number": 0, "is_async": 5})]
)
def test_bytes_that_are_not_a_reply_at_import_are_an_error(runner, file, contents):
    file.write_text(f"{FUNCTIONS}\nwrite_to_a_socket({contents!r})\n")
    with pytest.raises(RewardError, match=r"the import of reward function '.*mine\.py:score' (wrote|sent) "):
        runner().start()


def test_a_process_whose_rank_was_killed_exits_without_a_traceback():
    program = (
        "import os; from hybridflow.environments.processes.connection import Replies; "
        "read, write = os.pipe(); os.close(read); "
        "Replies(os.fdopen(write, 'wb')).send({'number': 0}); raise SystemExit(3)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_process_whose_rank_died_with_unread_replies_exits_quietly():
    rank, process = socket.socketpair()
    with rank, process, os.fdopen(os.dup(process.fileno()), "rb") as samples:
        process.send(b"a reply")
        rank.close()  # with unread bytes: reading at the other end raises ConnectionResetError
        assert receive(samples) is None
