"""Import of user functions in a process of the run: with a time limit, and still interruptible by Ctrl-C."""

from collections.abc import Callable
from typing import Any

from hybridflow.runtime import user_code
from hybridflow.runtime.deadline import DeadlineExceeded, call_within
from hybridflow.runtime.interrupts import Interrupts

IMPORT_LIMIT_S = 120.0
"""Seconds that the import of a user's file or module may take, in the main thread."""


def load_user_function(name: str, what: str, error: type[Exception], is_class: bool = False) -> Callable[..., Any]:
    """Return the function, or the class, named by 'path/to/file.py:function' or 'package.module:function'.

    Raises `error`, with `what` the function is for ("reward function"), if the file, module or function does not
    exist, if the import raises anything, or if it takes longer than IMPORT_LIMIT_S.
    """
    with Interrupts() as interrupts:
        try:
            return call_within(IMPORT_LIMIT_S, user_code.load_user_function, name, what, error, is_class)
        except (error, DeadlineExceeded) as problem:
            cause = problem.__cause__ or problem
            interrupts.raise_if_one(cause)
            if not isinstance(cause, DeadlineExceeded):
                raise
    limit = f"the import took longer than {IMPORT_LIMIT_S:g} s"
    raise error(f"{what} {name!r}: {limit}; move slow work from the import of the file into the function.")
