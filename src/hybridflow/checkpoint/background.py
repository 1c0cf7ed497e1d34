"""A save that goes on while training does: the state is copied at once, a thread writes the copy."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


class BackgroundSave:
    """`write` runs in a thread from now on; `finish` waits for it and raises what it raised."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._write, self._error = write, None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:  # told to whoever waits for the save
            self._error = error

    def finish(self) -> None:
        """Wait until everything is written."""
        self._thread.join()
        if self._error is not None:
            raise self._error


def copy_state(state: Any) -> Any:
    """The same state in memory that nobody else changes: tensors on the CPU, DTensors where they are."""
    if isinstance(state, Mapping):
        return {key: copy_state(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(copy_state(value) for value in state)
    return state.detach().clone() if isinstance(state, Tensor) else state
