"""The starts of a run, each with the keys under which it learned its steps."""

from pathlib import Path
from typing import Any

from hybridflow.config.render import toml_value
from hybridflow.config.run_paths import absolute_paths
from hybridflow.errors import DataError
from hybridflow.runtime.observe.run_files import known_starts


class RunStarts:
    """The starts in run.json, in order. Raises DataError if it is missing or damaged."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._starts = run_dir, known_starts(run_dir)

    def __getitem__(self, place: int) -> dict[str, Any]:
        return self._starts[place]

    def place_of(self, step: int) -> int:
        """Return which start learned a step, the last one if several did. Raises DataError if none is recorded."""
        places = [place for place, start in enumerate(self._starts) if start.get("after_step", 0) < step]
        if not places:
            raise DataError(f"'{self._run_dir / 'run.json'}' has no start that learned step {step}; restore the file.")
        return places[-1]

    def overrides_of(self, place: int) -> list[str]:
        """Return the keys of a start that differ from config.toml, which has those of the newest, as "key=value"."""
        changed = self.changes(place, len(self._starts) - 1)
        return [*changed, *absolute_paths(self._run_dir / "config.toml", changed, place)] if changed else []

    def changes(self, place: int, other: int) -> list[str]:
        """Return the keys of a start that another start has otherwise, as "key=value"."""
        then, now = (self._starts[each].get("config", {}) for each in (place, other))
        return [f"{key}={toml_value(value)}" for key, value in then.items() if key in now and now[key] != value]
