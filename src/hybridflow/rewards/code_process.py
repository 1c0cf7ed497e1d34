"""Entry point of a restricted process that runs one program of a model against one test.

It is started as a file and imports nothing of hybridflow's packages, so that it starts in milliseconds. It sends one
line for each state: "ready" with the descriptors that the scorer needs, or the reason why the process cannot be
restricted; "restricted", or the reason; "compiled"; and, if the test is statements, "passed". These are run by this
process, the judge; the program runs in a fork of it, which has no access to the line.
"""

from __future__ import annotations

import builtins
import marshal
import os
import sys
from types import CodeType, ModuleType

TYPE_CHECKING = False  # importing `typing` would take longer than all else here
if TYPE_CHECKING:
    from typing import Any, NoReturn

PROGRAM = "program.py"
"""Name of the program's file in the working directory of the process."""

_SOL_SOCKET, _SCM_RIGHTS = 1, 1


def main() -> None:
    """Restrict this process, then run the program as the settings in the first argument say."""
    settings = marshal.loads(bytes.fromhex(sys.argv[1]))
    line = settings["line"]
    try:
        listener = _restrict(settings)
        run = run_script if settings["is_script"] else judge
        run(settings, line, listener)
    except _Problem as problem:
        say(line, str(problem))


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


def run_script(settings: dict[str, Any], line: int, listener: int) -> None:
    """Run the program as a script; the exit status of this process is its result."""
    send(line, "ready", listener)
    os.close(listener)
    _filter_calls(settings)
    say(line, "restricted")
    code = compiled()
    if code is None:
        return
    say(line, "compiled")
    os.close(line)
    prepare()
    sys.modules["__main__"] = ModuleType("__main__")  # which dataclasses and pickle look up
    exec(code, vars(sys.modules["__main__"]))


def judge(settings: dict[str, Any], line: int, listener: int) -> None:
    """Run the program in a fork of this process, then receive the statements and run them in this one."""
    import _signal  # pyright: ignore[reportMissingImports]  # `signal` takes long
    import _socket

    ours, theirs = (end.detach() for end in _socket.socketpair())
    own_id = os.getpid()
    try:
        process = os.fork()
    except OSError as problem:
        raise _Problem(f"a second process for the program: {problem}") from None
    if process == 0:
        for descriptor in (line, listener, ours):
            os.close(descriptor)
        try:
            _serve(settings, theirs, own_id)
        finally:
            os._exit(1)
    os.close(theirs)
    first = receive_line(ours)
    if first != "restricted":
        raise _Problem(first)
    handle = os.pidfd_open(process)
    send(line, "ready", listener, handle)
    os.close(listener)
    os.close(handle)
    _signal.signal(_signal.SIGCHLD, _signal.SIG_IGN)
    _filter_calls(settings)
    say(line, "restricted")
    if receive_line(ours) == "compiled":
        say(line, "compiled")
        statements = receive_sized(line)
        from code_judge import run_statements

        verdict = "failed"
        try:
            if receive_line(ours) == "loaded":
                run_statements(statements, ours, lambda: _end(line, "failed"))
                verdict = "passed"
        except BaseException:  # also an exit
            verdict = "failed"
        _end(line, verdict)
    _end(line, "failed")


def _end(line: int, verdict: str) -> NoReturn:
    """Send the verdict and wait to be killed: the scorer kills the program first, while its parent can collect it."""
    say(line, verdict)
    while True:
        os.read(line, 1)


def _serve(settings: dict[str, Any], connection: int, judge_id: int) -> None:
    from code_judge import serve_program
    from code_limits import end_with_parent

    try:
        end_with_parent()
        if os.getppid() != judge_id:  # it ended before
            return
        _filter_calls(settings)
    except Exception as problem:
        say(connection, str(problem))
        return
    say(connection, "restricted")
    code = compiled()
    if code is not None:
        say(connection, "compiled")
        prepare()
        serve_program(code, connection, lambda: say(connection, "loaded"))


def compiled() -> CodeType | None:
    """Return the program's code; None if it does not compile."""
    with open(PROGRAM, "rb") as file:
        source = file.read()
    try:
        return compile(source, PROGRAM, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return None


def prepare() -> None:
    """Prepare the interpreter for the program."""
    sys.argv[:] = [PROGRAM]
    builtins.exit = builtins.quit = sys.exit  # normally added by the module `site`


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


def receive_sized(connection: int) -> bytes:
    """Return the bytes that follow their length."""
    length = int.from_bytes(os.read(connection, 4), "little")
    contents = b""
    while len(contents) < length:
        contents += os.read(connection, length - len(contents))
    return contents


def receive_line(connection: int) -> str:
    """Return the next line, byte by byte, because other messages follow it; "" at the end."""
    text = b""
    while not text.endswith(b"\n"):
        byte = os.read(connection, 1)
        if not byte or len(text) > 4096:
            return ""
        text += byte
    return text[:-1].decode(errors="replace")


if __name__ == "__main__":
    main()
