"""A background save: the state is copied at once, and a thread writes the copy while training continues."""

import threading
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from torch import Tensor

Result = TypeVar("Result")


class BackgroundSave(Generic[Result]):
    """A thread that runs `write`, started at construction; `finish` waits for it and raises its error."""

    def __init__(self, write: Callable[[], Result]) -> None:
        self._write = write
        self._results: list[Result] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._results.append(self._write())
        except BaseException as error:  # raised by `finish`
            self._error = error

    def finish(self) -> Result:
        """Wait until the state is written and return the result. Raise the error of the write, if it failed."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._results[0]


def copy_state(state: Any) -> Any:
    """Copy a state, so that later updates do not change it; each tensor stays on its device."""
    if isinstance(state, Mapping):
        return {key: copy_state(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(copy_state(value) for value in state)
    return state.detach().clone() if isinstance(state, Tensor) else state
