"""The frame of every benchmark: errors as one line, Ctrl-C as an exit status."""

import sys
from collections.abc import Callable

from support.errors import BenchmarkError

INTERRUPTED = 130
"""Exit status after SIGINT, as shells report it."""


def run(main: Callable[[], int | None]) -> None:
    """Call `main` and exit with its status; a BenchmarkError is one line on stderr, SIGINT is status 130."""
    try:
        sys.exit(main())
    except BenchmarkError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
