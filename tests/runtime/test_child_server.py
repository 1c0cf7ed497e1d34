import os
import re
import signal

import pytest

from hybridflow.runtime.child_server import ChildError, ChildServer


class OwnError(BaseException):
    """As a panic of a library in Rust."""


def act(what, value=None):
    match what:
        case "state":
            return [*STATE, value]
        case "signal":
            return os.kill(os.getpid(), value)
        case "raise":
            raise value
        case "hang in C":
            return re.match("(a+)+b", "a" * 64)
        case "memory":
            return len(bytearray(value))
        case "die":
            os.abort()


STATE = [1]


@pytest.fixture
def server():
    server = ChildServer(act, 256 << 20)
    yield server
    server.close()
    assert server.has_ended


def test_a_child_has_the_state_of_the_fork_and_survives_errors(server, monkeypatch):
    monkeypatch.setitem(globals(), "STATE", [])
    assert server.call(10, "state", 2) == [1, 2]
    with pytest.raises(TypeError, match=r"^no text$"):
        server.call(10, "raise", TypeError("no text"))
    with pytest.raises(ChildError, match=r"^of Rust$"):
        server.call(10, "raise", OwnError("of Rust"))
    with pytest.raises(ChildError, match=r"^OwnError$"):
        server.call(10, "raise", OwnError())
    for number in (signal.SIGINT, signal.SIGTERM):  # of a terminal or a scheduler, for the whole group
        server.call(10, "signal", number)
    assert server.call(10, "state", None) == [1, None]


@pytest.mark.parametrize(
    ("limit_s", "call", "error"),
    [(0.3, ("hang in C",), TimeoutError), (60, ("memory", 1 << 33), MemoryError), (60, ("die",), MemoryError)],
)
def test_a_child_that_hangs_or_takes_all_memory_is_an_error(server, limit_s, call, error):
    with pytest.raises(error):
        server.call(limit_s, *call)
    assert server.has_ended is (call != ("memory", 1 << 33))  # Python found that there is no memory
