"""Entry point of a process of user code. It is started as a file, with the name of its program as argument.

User code that hangs, allocates too much memory or crashes affects this process only; the supervisor ends what it has
started and removes its temporary directory. PROGRAM_program.py has `load(settings)`, which returns what the run shall
know of the code, and what answers questions until there are no more.
"""

import os
import resource
import signal
import sys
from importlib import import_module
from typing import Any, BinaryIO

sys.path.append(os.getcwd())  # where hybridflow is, if it is not installed

from hybridflow.environments.processes.connection import Replies, receive
from hybridflow.environments.processes.supervisor import supervise
from hybridflow.environments.processes.tree_removal import remove_tree
from hybridflow.runtime.lenient_output import LenientOutput, open_standard_files


def main() -> None:
    """Load the code that the settings name, and answer questions until stdin ends."""
    settings, replies, questions = begin()
    from hybridflow.environments.processes.user_errors import described  # within the limits of this process
    from hybridflow.errors import ConfigError

    program = import_module(f"hybridflow.environments.processes.{sys.argv[1]}_program")
    try:
        loaded, answer = program.load(settings)
    except BaseException as error:  # a user's file may raise anything
        problem = f"{settings['what']} cannot be loaded: {described(error, None)}"
        replies.send({"number": 0, "not_loaded": str(error) if isinstance(error, ConfigError) else problem})
        return
    replies.send({"number": 0, "loaded": loaded})
    answer(questions, replies)


def begin() -> tuple[dict[str, Any], Replies, BinaryIO]:
    """Begin a process of user code: supervised, within its memory, and with its connection to the run for itself.

    Return the settings, and the connection as replies and as a stream of frames. Standard output then goes to standard
    error, and standard input is empty. Modules are looked for as if the files of the user's code were run: in their
    directories instead of that of this program. The working directory of the run comes last, so that a file there does
    not shadow a library.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run handles Ctrl-C
    temporary = os.environ["TMPDIR"]
    supervise(lambda: remove_tree(temporary))
    open_standard_files()
    replies, questions = Replies(os.fdopen(os.dup(1), "wb")), os.fdopen(os.dup(0), "rb")
    sys.stdout, sys.stderr = map(LenientOutput, (sys.stdout, sys.stderr))  # a `print` must not fail
    os.dup2(2, 1)  # the user's code must not write replies or read questions
    with open(os.devnull, "rb") as empty:
        os.dup2(empty.fileno(), 0)
    first = receive(questions)
    if first is None:  # the run has ended
        os._exit(0)
    settings = first[1]
    files = [source for source in (name.rpartition(":")[0] for name in settings["sources"]) if source.endswith(".py")]
    sys.path[:1] = dict.fromkeys(os.path.dirname(os.path.abspath(file)) for file in files)
    if limit := settings["memory_bytes"]:
        # limits allocated memory; address space that is only reserved does not count
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return settings, replies, questions


if __name__ == "__main__":
    main()
