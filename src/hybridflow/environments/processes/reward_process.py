"""Entry point of a reward process: reads samples from stdin, calls the user's reward function, writes results.

It is started as a file and imports nothing of hybridflow's packages, so that it starts in milliseconds. A function that
hangs, allocates too much memory or crashes affects this process only; supervisor.py, beside this file, ends what it has
started and removes its temporary directory. A frame is a mark, a length of 8 bytes and its contents: pickles of
(number, seed, arguments) as input, the first one of (0, settings), and JSON with the number as output, because the run
must not unpickle what a user's function produced.
"""

import asyncio
import contextlib
import copy
import hashlib
import importlib.util
import inspect
import json
import linecache
import numbers
import os
import pickle
import random
import resource
import signal
import struct
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, BinaryIO

HEAD = struct.Struct("<4sQ")
MARK = b"hfr\x00"
"""Begins every frame, so that bytes which a function has written to the connection are not taken for a reply."""

MAX_REPLY_BYTES = 2**28
WHAT = "reward function"


class NotLoaded(Exception):
    """A function that does not exist or cannot be called."""


def main() -> None:
    """Load the function that the settings name, and answer samples until stdin ends."""
    settings, replies, samples = begin()
    calls = module_of(os.path.join(os.path.dirname(__file__), "arguments.py"))
    name, own = settings["function"], settings["closure"]
    try:
        loader = module_of(settings["loader"])
        function = by_value(*own) if own else loader.load_user_function(name, WHAT, NotLoaded)
        calls.check_signature(function, name, settings["kwargs"], NotLoaded)
        is_async = returns_awaitable(function)
        forms = {"takes_batches": calls.takes_batches(function), "takes_names": calls.takes_names(function)}
        kind = {"is_async": is_async, **forms, "source": "" if own else source_of(function)}
    except BaseException as error:  # a user's object may fail in any of its methods
        problem = f"{WHAT} '{name}' cannot be loaded: {described(error, None)}"
        replies.send({"number": 0, "not_loaded": str(error) if isinstance(error, NotLoaded) else problem})
        return
    replies.send({"number": 0, **kind})

    def arguments_of(sample: dict[str, Any]) -> dict[str, Any]:
        return calls.arguments_of(function, sample, settings["kwargs"])

    if is_async:
        asyncio.run(serve(answer_of(function, settings, arguments_of), samples, replies))
        return
    while (sample := receive(samples)) is not None:
        number, seed, arguments = sample
        replies.send({**result_of(function, seed, arguments, arguments_of), "number": number})


def begin() -> tuple[dict[str, Any], "Replies", BinaryIO]:
    """Begin a process of user code: supervised, within its memory, and with its connection to the run for itself.

    Return the settings, and the connection as replies and as a stream of frames. Standard output then goes to standard
    error, and standard input is empty. Modules are looked for as if the files of the user's code were run: in their
    directories instead of that of this program. The working directory of the run comes last, so that a file there does
    not shadow a library.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run handles Ctrl-C
    folder, temporary = os.path.dirname(__file__), os.environ["TMPDIR"]
    remove_tree = module_of(os.path.join(folder, "tree_removal.py")).remove_tree
    module_of(os.path.join(folder, "supervisor.py")).supervise(lambda: remove_tree(temporary))
    output = module_of(os.path.join(folder, "../../runtime/lenient_output.py"))
    output.open_standard_files()
    replies, questions = Replies(os.fdopen(os.dup(1), "wb")), os.fdopen(os.dup(0), "rb")
    sys.stdout, sys.stderr = map(output.LenientOutput, (sys.stdout, sys.stderr))  # a `print` must not fail
    os.dup2(2, 1)  # the user's code must not write replies or read questions
    with open(os.devnull, "rb") as empty:
        os.dup2(empty.fileno(), 0)
    first = receive(questions)
    if first is None:  # the run has ended
        os._exit(0)
    settings = first[1]
    files = [source for source in (name.rpartition(":")[0] for name in settings["sources"]) if source.endswith(".py")]
    sys.path[:1] = dict.fromkeys(os.path.dirname(os.path.abspath(file)) for file in files)
    with contextlib.suppress(OSError):  # it was removed
        sys.path.append(os.getcwd())
    if limit := settings["memory_bytes"]:
        # limits allocated memory; address space that is only reserved does not count
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return settings, replies, questions


def by_value(contents: bytes, paths: Sequence[str]) -> Any:
    """Return a function or class of a Python program, which looks for modules in `paths`."""
    sys.path += [path for path in paths if path not in sys.path]
    return pickle.loads(contents)


class Replies:
    """The connection on which this process replies. A child that the function has forked exits instead of replying."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._owner = stream, os.getpid()

    def send(self, message: dict[str, Any]) -> None:
        """Write the message as a frame of JSON; in place of one that is too large, write a failure."""
        if os.getpid() != self._owner:
            os._exit(0)
        contents = json.dumps(message).encode()
        if len(contents) > MAX_REPLY_BYTES:
            problem = f"ValueError: the result has {len(contents)} bytes as JSON, more than {MAX_REPLY_BYTES}"
            contents = json.dumps({"error": problem, "kind": "raised", "number": message.get("number")}).encode()
        try:
            self._stream.write(HEAD.pack(MARK, len(contents)) + contents)
            self._stream.flush()
        except BrokenPipeError:  # the rank was killed, and this process exits with it
            os._exit(0)


def module_of(file: str) -> Any:
    """Return the module of a file of hybridflow, outside the package and `sys.modules`."""
    spec = importlib.util.spec_from_file_location(os.path.basename(file).removesuffix(".py"), file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def returns_awaitable(function: Any) -> bool:
    """Return whether the function, the called object or the wrapped function is `async`."""
    call = vars(type(function)).get("__call__")
    return any(map(inspect.iscoroutinefunction, (function, call, inspect.unwrap(function))))


def source_of(function: Any) -> str:
    """Return a digest of the file that defines a function; empty if there is none."""
    with contextlib.suppress(OSError), open(file_of(function), "rb") as file:
        return hashlib.blake2b(file.read(), digest_size=16).hexdigest()
    return ""


def file_of(function: Any) -> str:
    """Return the file that defines a function, a partial function or a callable object; empty if there is none."""
    function = inspect.unwrap(getattr(function, "func", function))
    for definition in (function, type(function)):
        with contextlib.suppress(TypeError, OSError):
            return inspect.getfile(definition)
    return ""


async def serve(answer: Callable[..., Awaitable[dict[str, Any]]], incoming: BinaryIO, replies: Replies) -> None:
    """Answer questions as they arrive, concurrently, until there are no more; the sender decides how many at a time."""
    loop, questions = asyncio.get_running_loop(), asyncio.Queue[Any]()

    def read() -> None:
        while (question := receive(incoming)) is not None:
            loop.call_soon_threadsafe(questions.put_nowait, question)
        loop.call_soon_threadsafe(questions.put_nowait, None)

    async def reply(number: int, *question: Any) -> None:
        replies.send({**await answer(*question), "number": number})

    threading.Thread(target=read, daemon=True).start()
    tasks: set[asyncio.Task[None]] = set()
    while (question := await questions.get()) is not None:
        task = asyncio.create_task(reply(*question))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def answer_of(
    function: Any, settings: Mapping[str, Any], arguments_of: Callable[[dict[str, Any]], dict[str, Any]]
) -> Callable[..., Awaitable[dict[str, Any]]]:
    """Return what calls an `async` function on a sample or a batch, within its time; see `result_of`."""

    async def answer(seed: int, arguments: dict[str, Any]) -> dict[str, Any]:
        timeout_s = settings["timeout_s"] and settings["timeout_s"] * num_samples_of(arguments)
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                result = function(**arguments_of(arguments))
                return as_message(await result if inspect.isawaitable(result) else result)
        except BaseException as error:  # a user's function may raise anything
            if limit.expired():
                return {"error": f"took longer than reward.timeout_s={settings['timeout_s']}", "kind": "timeout"}
            return failure(error, function)

    return answer


def num_samples_of(arguments: Mapping[str, Any]) -> int:
    """Return the number of samples in the arguments: 1, or the length of a batch's lists."""
    return len(arguments["solution_strs"]) if "solution_strs" in arguments else 1


def result_of(
    function: Any, seed: int, arguments: dict[str, Any], arguments_of: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """Call the function on a sample or a batch with the seeded random state; return its result or failure."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    try:
        return as_message(function(**arguments_of(copy.deepcopy(arguments))))
    except BaseException as error:  # a user's function may raise anything
        return failure(error, function)


def failure(error: BaseException, function: Any) -> dict[str, Any]:
    """Return the message for an exception that the function raised: its type, text and line, and the kind."""
    kind = "memory" if isinstance(error, MemoryError) else "raised"
    return {"error": described(error, function), "kind": kind}


def described(error: BaseException, function: Any) -> str:
    """Return the type and text of an exception, and the innermost line of the function's file that raised it.

    Errors of hybridflow's built-in functions have no line: their texts say what to fix.
    """
    try:
        return _described(error, function)
    except BaseException as problem:  # a user's class may fail in any of its methods
        return f"an exception that cannot be shown (showing it raised {type(problem).__name__})"


def _described(error: BaseException, function: Any) -> str:
    text, file = f"{type(error).__name__}: {text_of(error)}"[:2000], file_of(function)
    frames = traceback.walk_tb(error.__traceback__)
    lines = [(line, frame.f_code.co_name) for frame, line in frames if frame.f_code.co_filename == file]
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if not lines or os.path.dirname(os.path.dirname(file)) == ours:
        return text
    line, name = lines[-1]
    source = linecache.getline(file, line).strip()[:200]
    return f"{text} at {file}:{line}, in {name}" + (f": `{source}`" if source else "")


def text_of(error: BaseException) -> str:
    """Return the text of an exception, also of one whose own conversion to text fails."""
    try:
        return str(error)
    except BaseException as problem:
        return f"(its text is missing: __str__ raised {type(problem).__name__})"


def as_message(result: Any, *, inside: bool = False) -> dict[str, Any]:
    """Convert a function's result to JSON-compatible form: a number, a text, a mapping of them, or a list."""
    if isinstance(result, Mapping):
        return {"mapping": {str(name): as_plain(value) for name, value in result.items()}}
    is_array = type(result).__name__ in ("ndarray", "Tensor") and getattr(result, "ndim", 0) == 1
    if not inside and (isinstance(result, list | tuple) or is_array):
        return {"list": [as_message(item, inside=True) for item in result]}
    return {"result": as_plain(result)}


def as_plain(value: Any) -> Any:
    """Return numbers and texts unchanged, other values as their representation: {"shown": "<object ...>"}."""
    if isinstance(value, str | bool) or value is None:
        return value
    if isinstance(value, numbers.Integral) and abs(int(value)) < 10**300:
        return int(value)
    is_tensor = type(value).__name__ == "Tensor" and getattr(value, "ndim", 1) == 0
    if isinstance(value, numbers.Real) or type(value).__name__ in ("bool_", "bool") or is_tensor:
        with contextlib.suppress(OverflowError):
            return float(value)
    return {"shown": repr(value)[:400]}


def receive(stream: BinaryIO) -> Any:
    """Return the next sample; None at the end of the stream, also in the middle of a sample."""
    try:
        head = stream.read(HEAD.size)
        length = HEAD.unpack(head)[1] if len(head) == HEAD.size else -1
        contents = stream.read(max(0, length))
    except ConnectionResetError:  # the rank was killed before it read a reply
        return None
    return pickle.loads(contents) if len(contents) == length else None


if __name__ == "__main__":
    main()
