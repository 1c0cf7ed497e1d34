"""The exit status of every command: a table from error classes to codes."""

import errno
import sys
from collections.abc import Iterator
from enum import IntEnum

from hybridflow import errors


class ExitCode(IntEnum):
    """Exit status of `hybridflow`, for scripts and schedulers. 75 is EX_TEMPFAIL of sysexits.h."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    AGAIN = 75
    INTERRUPTED = 130


MEANINGS = {
    ExitCode.DONE: "done, or stopped and saved after one Ctrl-C or SIGTERM",
    ExitCode.FAILED: "the run failed: a loss, a reward, data, a model, a damaged checkpoint, a bug",
    ExitCode.USAGE: "usage, configuration, or a file that does not exist",
    ExitCode.AGAIN: "run the same command again: a worker or node was lost or late, or no space was left",
    ExitCode.INTERRUPTED: "interrupted without saving",
}

CODES: dict[type[BaseException], ExitCode] = {
    errors.ConfigError: ExitCode.USAGE,
    errors.LostWorkerError: ExitCode.AGAIN,
    errors.RunInUseError: ExitCode.AGAIN,
    KeyboardInterrupt: ExitCode.INTERRUPTED,
    Exception: ExitCode.FAILED,
}
"""Exit status by error class; the first base class that is here counts. Errors for lack of disk space are always AGAIN,
and those of a path that cannot exist are USAGE."""

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NO_PATH = (errno.ENAMETOOLONG, errno.ELOOP)


def exit_code(error: BaseException) -> ExitCode:
    """Return the exit status for an error that ends a command."""
    if any(_is_for_lack_of_space(cause) for cause in _causes(error)):
        return ExitCode.AGAIN
    if isinstance(error, OSError) and error.errno in _NO_PATH:
        return ExitCode.USAGE
    return code_of(type(error))


def code_of(kind: type[BaseException]) -> ExitCode:
    """Return the exit status for errors of a class."""
    return next(CODES[cls] for cls in kind.__mro__ if cls in CODES)


def exit_codes_text() -> str:
    """Return the codes with their meanings, a line each, for `hybridflow --help`."""
    return "\n".join(f"  {code:<3}  {meaning}" for code, meaning in MEANINGS.items())


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, its cause, the cause of that, and so on."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        yield cause
        seen.add(id(cause))
        cause = cause.__cause__


def _is_for_lack_of_space(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in _NO_SPACE:
        return True
    if type(error).__name__ == "SafetensorError":  # Rust gives the error number only in the text
        return any(f"(os error {number})" in str(error) for number in _NO_SPACE)
    ray = sys.modules.get("ray.exceptions")  # loaded already if the error is of Ray
    return ray is not None and isinstance(error, (ray.OutOfDiskError, ray.ObjectStoreFullError))
