"""Standard output and error whose failures end no program. Imports only the standard library."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, TextIO


class LenientOutput:
    """A text stream that drops what cannot be written, and escapes characters that its encoding lacks.

    `error` is the first failure: the reader of a pipe or the terminal is gone, the disk is full, the file is closed.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")  # None: it was closed at the start
        self.error: OSError | ValueError | None = None

    def write(self, text: str) -> int:
        """Write a text, as far as that is possible."""
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._try(self._stream.write, text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write texts, as far as that is possible."""
        self.write("".join(lines))

    def flush(self) -> None:
        """Flush the stream, as far as that is possible."""
        self._try(self._stream.flush)

    def discard(self) -> None:
        """Lead all further output to nowhere, also what is buffered, which Python would try to write at exit."""
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:  # the stream may have no file
            os.dup2(nowhere.fileno(), self._stream.fileno())

    def _try(self, function: Callable[..., object], *arguments: str) -> None:
        try:
            function(*arguments)
        except (OSError, ValueError) as error:  # ValueError: it is closed
            self.error = self.error or error
            if isinstance(error, BrokenPipeError):  # nothing will ever read it
                self.discard()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def open_standard_files() -> None:
    """Open the standard files that were closed at the start as empty ones.

    Otherwise the next opened file, such as a log, would get the number of standard output.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
