"""The schedule of checkpoints. The wall clock decides only when to save; a save changes no number of the run."""

import time
from collections.abc import Callable

from hybridflow.config import TrainerConfig


class SaveSchedule:
    """Saves every `save_every` steps; with `save_every_s` also after that many seconds and with each validation."""

    def __init__(self, settings: TrainerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_steps, self._every_s, self._clock = settings.save_every, settings.save_every_s, clock
        self._last_save = clock()

    def is_due(self, step: int, *, has_validated: bool) -> bool:
        """Return whether to save after `step`."""
        if self._every_steps and step % self._every_steps == 0:
            return True
        return self._every_s > 0 and (has_validated or self._clock() - self._last_save >= self._every_s)

    def restart(self) -> None:
        """Count the seconds from now, the end of a save."""
        self._last_save = self._clock()
