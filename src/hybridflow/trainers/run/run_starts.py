"""The starts of a run, each with the keys under which it learned its steps."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.config.render import toml_value
from hybridflow.config.run_paths import absolute_paths
from hybridflow.runtime.observe.run_files import known_starts


@dataclass(frozen=True)
class RunStart:
    """A start of a run that learned the steps up to `last_step`, with what differs from config.toml as "key=value"."""

    last_step: int
    overrides: tuple[str, ...]


def starts_of_steps(run_dir: Path, first_step: int, step: int) -> list[RunStart]:
    """Return the starts that learned the steps after `first_step` up to `step`, in order.

    config.toml has the keys of the newest start. A step that was learned several times belongs to the last
    start that learned it. Raises DataError if run.json is missing or damaged.
    """
    starts = known_starts(run_dir)
    of_steps = [
        max(place for place, start in enumerate(starts) if start.get("after_step", 0) < each)
        for each in range(first_step + 1, step + 1)
    ]
    last_steps = dict(zip(of_steps, range(first_step + 1, step + 1), strict=True))
    return [RunStart(last, _overrides(run_dir, starts, place)) for place, last in sorted(last_steps.items())]


def _overrides(run_dir: Path, starts: list[dict[str, Any]], place: int) -> tuple[str, ...]:
    now, then = starts[-1].get("config", {}), starts[place].get("config", {})
    changed = [f"{key}={toml_value(value)}" for key, value in then.items() if key in now and now[key] != value]
    return (*changed, *absolute_paths(run_dir / "config.toml", changed, place)) if changed else ()
