"""Entry point of a restricted process that runs one program of a model against one test.

It is started as a file and imports nothing of hybridflow's packages, so that it starts in milliseconds. It sends a
message for each state: "ready" with the descriptor that the scorer needs, "restricted" and "compiled", or the reason
why the process cannot be restricted. If the test is statements, a secret follows after the program has run. Then the
scorer sends the code of the test, which sends the values that the scorer checks, and last the secret with a verdict.
The program can send anything in its place, but it sees neither the secret nor what is expected of the values.
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

_SOL_SOCKET, _SCM_RIGHTS = 1, 1
_read, _write, _exit = os.read, os.write, os._exit  # which the program may replace


def main() -> None:
    """Restrict this process, then run the program as the settings in the first argument say."""
    settings = marshal.loads(bytes.fromhex(sys.argv[1]))
    line = settings["line"]
    sys.dont_write_bytecode = not settings["write_bytecode"]
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    try:
        import code_limits  # beside this file

        if not settings["is_script"]:
            import code_judge  # noqa: F401

        del sys.path[0]
        sys.dont_write_bytecode = True
        code_limits.restrict(os.getcwd(), settings["cpu_s"], settings["memory_bytes"], settings["file_bytes"])
        listener = code_limits.count_calls(settings["counting_filter"], settings["seccomp"])
        _send_descriptor(line, b"ready", listener)
        os.close(listener)
        own_id = os.getpid().to_bytes(4, sys.byteorder)
        code_limits.filter_calls(settings["strict_filter"].replace(settings["own_id"], own_id))
        send(line, b"restricted")
    except Exception as problem:  # the program must not run then
        send(line, f"{type(problem).__name__}: {problem}".encode(errors="replace"))
        return
    code = _compiled()
    if code is None:
        return
    send(line, b"compiled")
    sys.argv[:] = [PROGRAM]
    builtins.exit = builtins.quit = sys.exit  # normally added by the module `site`
    if settings["is_script"]:
        os.close(line)
        sys.modules["__main__"] = ModuleType("__main__")  # which dataclasses and pickle look up
        exec(code, vars(sys.modules["__main__"]))
        return
    try:
        _serve_program(code, settings)
    finally:
        _exit(1)


def _compiled() -> CodeType | None:
    """Return the program's code; None if it does not compile."""
    with open(PROGRAM, "rb") as file:
        source = file.read()
    try:
        return compile(source, PROGRAM, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return None


def _serve_program(code: CodeType, settings: dict[str, Any]) -> None:
    """Run the program, then a test, unless one raises; the caller ends the process then."""
    from code_judge import Judge
    from code_names import MAIN, MODULE

    line, secret, load = settings["line"], settings["secret"], marshal.loads
    module = ModuleType(MODULE)
    judge = Judge(module, settings["imports"], lambda message: send(line, message))
    for name in [name for name in sys.modules if name.startswith("code_")]:
        del sys.modules[name]
    sys.modules[MAIN] = sys.modules[MODULE] = module  # which dataclasses, pickle and `import program` look up
    sys.orig_argv.clear()
    sys.setrecursionlimit(sys.getrecursionlimit() + 10)  # for the frames of this file
    exec(code, vars(module))
    send(line, secret)
    test = b""
    while chunk := _read(line, 2**16):
        test += chunk
    send(line, secret + judge.verdict(load(test)))


def send(line: int, message: bytes) -> None:
    """Send a message, preceded by its length."""
    rest = memoryview(len(message).to_bytes(4, "little") + message)
    while rest:
        rest = rest[_write(line, rest) :]


def _send_descriptor(line: int, message: bytes, descriptor: int) -> None:
    import _socket

    rights = (_SOL_SOCKET, _SCM_RIGHTS, descriptor.to_bytes(4, sys.byteorder))
    connection = _socket.socket(fileno=line)
    connection.sendmsg([len(message).to_bytes(4, "little") + message], [rights])
    connection.detach()


if __name__ == "__main__":
    main()
