"""Entry point of a restricted process that runs one program of a model against one test.

It is started as a file and imports nothing of hybridflow's packages, so that it starts in milliseconds. It sends one
line for each state: "ready" after the restrictions are in place, or the reason why they cannot be; "compiled"; and if
the test is statements, "loaded" after the program has run, to receive the statements, and "done" after they have run,
to receive a number that it repeats.
"""

import builtins
import json
import os
import sys
from types import ModuleType
from typing import Any

PROGRAM = "program.py"
"""Name of the program's file in the working directory of the process."""


def main() -> None:
    """Restrict this process, then run the program as the settings in the first argument say."""
    settings = json.loads(sys.argv[1])
    line = settings["line"]
    try:
        _restrict(settings)
    except Exception as problem:  # on any error: the program must not run unrestricted
        say(line, f"{type(problem).__name__}: {problem}")
        return
    say(line, "ready")
    with open(PROGRAM, "rb") as file:
        source = file.read()
    try:
        code = compile(source, PROGRAM, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return
    say(line, "compiled")
    sys.argv[:] = [PROGRAM]
    builtins.exit = builtins.quit = sys.exit  # normally added by the module `site`
    if settings["is_script"]:
        exec(code, namespace_of("__main__"))
    else:
        run_statements(code, line)


def _restrict(settings: dict[str, Any]) -> None:
    sys.dont_write_bytecode = not settings["write_bytecode"]
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from code_limits import restrict  # pyright: ignore[reportMissingImports]  # beside this file

    del sys.path[0]
    sys.dont_write_bytecode = True
    own_id = os.getpid().to_bytes(4, sys.byteorder)
    filter_program = bytes.fromhex(settings["filter"]).replace(bytes.fromhex(settings["own_id"]), own_id)
    restrict(os.getcwd(), settings["cpu_s"], settings["memory_bytes"], settings["file_bytes"], filter_program)


def run_statements(code: Any, line: int) -> None:
    """Run the program, then receive the statements and run them in its namespace; then repeat the number.

    The functions used here are bound before the program runs, since it may replace any function of a module.
    """
    read, write, leave, run, make = os.read, os.write, os._exit, exec, compile
    namespace = namespace_of("program")
    run(code, namespace)
    write(line, b"loaded\n")
    length = int.from_bytes(read(line, 4), "little")
    statements = b""
    while len(statements) < length:
        statements += read(line, length - len(statements))
    run(make(statements, "test.py", "exec", dont_inherit=True), namespace)
    write(line, b"done\n")
    write(line, read(line, 32) + b"\n")
    leave(0)


def namespace_of(module: str) -> dict[str, Any]:
    """Create a module of this name, which dataclasses and pickle look up, and return its namespace."""
    sys.modules[module] = ModuleType(module)
    return sys.modules[module].__dict__


def say(line: int, text: str) -> None:
    """Write the text as one line to the file descriptor `line`."""
    os.write(line, text.replace("\n", " ").encode(errors="replace") + b"\n")


if __name__ == "__main__":
    main()
