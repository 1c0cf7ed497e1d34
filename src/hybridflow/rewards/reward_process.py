"""The program of a process that runs a user's reward function: samples in at stdin, results out, one after another.

It is started as a file and imports nothing of hybridflow's packages, so that it starts in milliseconds; what the
function does, hang, allocate, crash, stays in here. Frames are a length of 4 bytes and contents: pickles in, JSON out,
since nothing that comes from here may be executed.
"""

import contextlib
import copy
import ctypes
import importlib.util
import json
import numbers
import os
import pickle
import random
import resource
import signal
import struct
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO

LENGTH = struct.Struct("<I")
WHAT = "reward function"
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


class NotLoaded(Exception):
    """There is no such function, or it cannot be called."""


def main() -> None:
    settings = json.loads(sys.argv[1])
    with contextlib.suppress(OSError, AttributeError):  # a system without it: then the end of stdin ends this process
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run to answer
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the function prints is no reply
    if settings["memory_bytes"]:
        # of what it allocates; address space that is only reserved does not count
        resource.setrlimit(resource.RLIMIT_DATA, (settings["memory_bytes"], settings["memory_bytes"]))
    # in place of this file's directory: where the run was started, and where the user's file is
    sys.path[:1] = [os.getcwd(), os.path.dirname(settings["function"].rpartition(":")[0])]
    try:
        function = load(settings["function"], settings["loader"])
    except NotLoaded as error:
        send(replies, {"not_loaded": str(error)})
        return
    send(replies, {"ready": True})
    while (sample := receive(sys.stdin.buffer)) is not None:
        send(replies, result_of(function, *sample))


def load(name: str, loader_file: str) -> Any:
    """The function that 'path.py:function' or 'module:function' names, by hybridflow's own loader."""
    spec = importlib.util.spec_from_file_location("user_code", loader_file)
    assert spec is not None
    assert spec.loader is not None
    loader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loader)
    function = loader.load_user_function(name, WHAT, NotLoaded)
    loader.require_arguments(function, name, WHAT, ARGUMENTS, NotLoaded)
    return function


def result_of(function: Any, seed: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """What the function says of one sample, or how it failed; its random numbers are those of the seed."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    try:
        result = function(**copy.deepcopy(arguments))
    except MemoryError as error:
        return {"error": describe(error), "kind": "memory"}
    except (Exception, SystemExit) as error:
        return {"error": describe(error), "kind": "raised"}
    if isinstance(result, Mapping):
        return {"mapping": {str(name): as_plain(value) for name, value in result.items()}}
    return {"result": as_plain(result)}


def as_plain(value: Any) -> Any:
    """Numbers and texts as they are, else what is shown of it: {"shown": "<object ...>"}."""
    if isinstance(value, str) or value is None:
        return value
    if isinstance(value, numbers.Real) or type(value).__name__ == "bool_":
        with contextlib.suppress(OverflowError):
            return float(value)
    return {"shown": repr(value)[:400]}


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:2000]


def send(stream: BinaryIO, message: dict[str, Any]) -> None:
    contents = json.dumps(message).encode()
    stream.write(LENGTH.pack(len(contents)) + contents)
    stream.flush()


def receive(stream: BinaryIO) -> Any:
    """The next sample; None at the end."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    return pickle.loads(stream.read(length))


if __name__ == "__main__":
    main()
