"""Entry point of a restricted process that runs one program of a model against one test.

It is started as a file and imports nothing of hybridflow's packages, so that it starts in milliseconds. It sends one
line for each state: "ready" with the descriptor that the scorer needs, or the reason why the process cannot be
restricted; "restricted", or the reason; "compiled"; and, if the test is statements, a secret after the program has run.
Then it answers requests, which are steps of the test: it sends the value of an expression, or runs statements and sends
the secret and their verdict. The program can send anything in its place, but it sees neither the secret nor, for an
expression, what is expected.
"""

from __future__ import annotations

import builtins
import marshal
import os
import sys
from types import CodeType, ModuleType

TYPE_CHECKING = False  # importing `typing` would take longer than all else here
if TYPE_CHECKING:
    from typing import Any

PROGRAM = "program.py"
"""Name of the program's file in the working directory of the process."""

TEST, IMPORT, EXPRESSION, ELEMENTS = b"t", b"m", b"e", b"i"
"""Kinds of a request: run a test; run an import; send a value; send it, or its elements if it is not plain data."""

_SOL_SOCKET, _SCM_RIGHTS = 1, 1
_read, _write, _exit = os.read, os.write, os._exit  # which the program may replace


def main() -> None:
    """Restrict this process, then run the program as the settings in the first argument say."""
    settings = marshal.loads(bytes.fromhex(sys.argv[1]))
    line = settings["line"]
    try:
        listener = _restrict(settings)
        send(line, "ready", listener)
        os.close(listener)
        _filter_calls(settings)
        say(line, "restricted")
    except _Problem as problem:
        say(line, str(problem))
        return
    code = compiled()
    if code is None:
        return
    say(line, "compiled")
    sys.argv[:] = [PROGRAM]
    builtins.exit = builtins.quit = sys.exit  # normally added by the module `site`
    if settings["is_script"]:
        os.close(line)
        sys.modules["__main__"] = ModuleType("__main__")  # which dataclasses and pickle look up
        exec(code, vars(sys.modules["__main__"]))
        return
    try:
        serve_program(code, settings)
    finally:
        _exit(1)


class _Problem(Exception):
    """A reason why the process cannot be restricted; the program must not run then."""


def _restrict(settings: dict[str, Any]) -> int:
    sys.dont_write_bytecode = not settings["write_bytecode"]
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    try:
        import code_limits  # beside this file

        if not settings["is_script"]:
            import code_judge  # noqa: F401

        del sys.path[0]
        sys.dont_write_bytecode = True
        code_limits.restrict(os.getcwd(), settings["cpu_s"], settings["memory_bytes"], settings["file_bytes"])
        return code_limits.count_calls(settings["counting_filter"], settings["seccomp"])
    except Exception as problem:
        raise _Problem(f"{type(problem).__name__}: {problem}") from None


def _filter_calls(settings: dict[str, Any]) -> None:
    try:
        import code_limits

        own_id = os.getpid().to_bytes(4, sys.byteorder)
        code_limits.filter_calls(settings["strict_filter"].replace(settings["own_id"], own_id))
    except Exception as problem:
        raise _Problem(f"{type(problem).__name__}: {problem}") from None


def compiled() -> CodeType | None:
    """Return the program's code; None if it does not compile."""
    with open(PROGRAM, "rb") as file:
        source = file.read()
    try:
        return compile(source, PROGRAM, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return None


def serve_program(code: CodeType, settings: dict[str, Any]) -> None:
    """Run the program, then the steps of a test, until one raises; the caller ends the process then."""
    from code_judge import Judge
    from code_names import MAIN, MODULE
    from code_values import encode

    line, secret, load = settings["line"], settings["secret"], marshal.loads
    module = ModuleType(MODULE)
    judge = Judge(module, settings["imports"])
    for name in [name for name in sys.modules if name.startswith("code_")]:
        del sys.modules[name]
    sys.modules[MAIN] = sys.modules[MODULE] = module  # which dataclasses, pickle and `import program` look up
    sys.orig_argv.clear()
    sys.setrecursionlimit(sys.getrecursionlimit() + 10)  # for the frames of this file
    exec(code, vars(module))
    write(line, secret)
    while True:
        kind, source = receive(line, 1), receive(line, int.from_bytes(receive(line, 4), "little"))
        if kind == TEST:
            message = secret + judge.verdict(load(source))
        else:
            step = compile(source, "test.py", "exec" if kind == IMPORT else "eval", dont_inherit=True)
            value = judge.value(step)
            message = encode(value)
            if kind == ELEMENTS and message.startswith(b"O"):
                message = encode(tuple(value))
        write(line, len(message).to_bytes(4, "little") + message)


def say(line: int, text: str) -> None:
    """Write the text as one line to the file descriptor `line`."""
    os.write(line, text.replace("\n", " ").encode(errors="replace") + b"\n")


def send(line: int, text: str, *descriptors: int) -> None:
    """Write the text as one line, with descriptors for the receiver."""
    import _socket

    rights = b"".join(each.to_bytes(4, sys.byteorder) for each in descriptors)
    connection = _socket.socket(fileno=line)
    connection.sendmsg([text.encode() + b"\n"], [(_SOL_SOCKET, _SCM_RIGHTS, rights)])
    connection.detach()


def receive(line: int, length: int) -> bytes:
    """Return the next bytes; end this process if the scorer has closed the line."""
    contents = b""
    while len(contents) < length:
        chunk = _read(line, length - len(contents))
        if not chunk:
            _exit(1)
        contents += chunk
    return contents


def write(line: int, contents: bytes) -> None:
    """Write all bytes."""
    rest = memoryview(contents)
    while rest:
        rest = rest[_write(line, rest) :]


if __name__ == "__main__":
    main()
