"""The files of a run, read for people: pages, tables and advice. Nothing is written, and a running run may go on."""

import fcntl
import json
import os
from collections.abc import Callable, Container, Mapping
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from hybridflow.errors import CheckpointError, DataConfigError, DataError
from hybridflow.runtime.observe.jsonl import read_jsonl
from hybridflow.runtime.observe.trace import TRACE_FILE, TraceEvent, trace_event
from hybridflow.runtime.observe.transfers import transfer_report
from hybridflow.runtime.plain_files import require_no_links, require_plain_file


def printable(text: object) -> str:
    """Return a text in one line, with control characters, changes of direction and broken UTF-8 as escapes."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in str(text))


METRICS, SAMPLES, ROLLOUTS = "metrics.jsonl", "samples.jsonl", "rollouts.jsonl"
RECOVERIES = "recoveries.jsonl"

ROLLOUT_TEXTS = ("prompt_id", "data_source", "finish_reason", "failed")
"""Keys of a row of rollouts.jsonl or samples.jsonl whose values are texts."""


TOO_LARGE = "it does not fit into memory"


def read_starts(directory: Path) -> list[dict[str, Any]]:
    """Return the starts in `run.json` of a run directory, oldest first; raises CheckpointError if it is damaged."""
    file = directory / "run.json"
    try:
        require_plain_file(file)
        starts = json.loads(file.read_text(encoding="utf-8"))["starts"] if file.exists() else []
        if not isinstance(starts, list):
            raise TypeError(f"starts is a {type(starts).__name__}, not a list")
        return starts
    except (OSError, MemoryError) as error:
        raise DataError(f"'{file}' cannot be read: {str(error) or TOO_LARGE}.") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"'{file}' is damaged ({error}); move it out of the directory to continue.") from error


def is_running(directory: Path) -> bool:
    """Return whether a process holds the lock of a run's directory."""
    try:
        lock = os.open(directory / ".lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # no lock was ever taken
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(lock)
    return False


def known_starts(directory: Path) -> list[dict[str, Any]]:
    """Return what `read_starts` does. Raises DataError unless there is a start, and each is an object."""
    starts = read_starts(directory)
    if not starts or not all(isinstance(start, dict) for start in starts):
        raise DataError(f"'{directory / 'run.json'}' has no start of a run; restore the file.")
    return starts


class RunFiles:
    """The files of the run in a directory, each read when it is first asked for.

    Raises DataConfigError if the directory is not that of a run; reading raises DataError or CheckpointError, with the
    file and the line, if a file is damaged. A file that this run has not written is empty.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not (self.path / "run.json").is_file():
            raise DataConfigError(f"'{self.path}' is not the directory of a run: it has no run.json.")
        try:
            require_no_links(self.path)
        except OSError as error:
            raise DataConfigError(f"'{self.path}' cannot be read: {error}; replace it by what it leads to.") from error

    @property
    def name(self) -> str:
        """The name of the directory, with what is not text in it as escapes."""
        return printable(self.path.resolve().name)

    @cached_property
    def starts(self) -> list[dict[str, Any]]:
        """The starts of the run: time, step, configuration, versions and hardware of each."""
        return known_starts(self.path)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The values of the newest start's configuration by key, such as "rollout.group_size"."""
        config = self.starts[-1].get("config")
        if not isinstance(config, dict):
            raise DataError(f"'{self.path / 'run.json'}' has no configuration; restore the file.")
        return config

    @property
    def shown_config(self) -> dict[str, Any]:
        """The configuration with values as recipes have them: "none" in place of None, which TOML lacks."""
        return {key: "none" if value is None else value for key, value in self.config.items()}

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl: numbers, and None for those that are missing."""
        return self._rows(METRICS, _are_numbers, "numbers")

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """The rows of samples.jsonl: the responses that were kept, with their tokens."""
        return self._rows(SAMPLES, _is_sample, "prompt and response as texts, and tokens as lists of one length or 1")

    @cached_property
    def rollouts(self) -> list[dict[str, Any]]:
        """The rows of rollouts.jsonl: for each step, a list for each number of all its responses."""
        return self._rows(ROLLOUTS, _are_lists, "lists of equal length: score and length of numbers, and texts")

    @cached_property
    def recoveries(self) -> list[dict[str, Any]]:
        """The rows of recoveries.jsonl."""
        return self._rows(RECOVERIES)

    @cached_property
    def events(self) -> dict[int, list[TraceEvent]]:
        """The events of the trace by step; step 0 is the start."""
        events: dict[int, list[TraceEvent]] = {}
        for i, row in enumerate(self._rows(TRACE_FILE), start=1):
            try:
                event = trace_event(row)
            except DataError as error:
                raise DataError(f"{self.path / TRACE_FILE}, line {i}: {error}") from error
            events.setdefault(row["step"], []).append(event)
        return events

    def _rows(
        self, name: str, is_valid: Callable[[Mapping[str, Any]], bool] | None = None, expected: str = ""
    ) -> list[dict[str, Any]]:
        file = self.path / name
        try:
            require_plain_file(file)
            rows = read_jsonl(file) if file.exists() else []
        except (OSError, MemoryError) as error:
            raise DataError(f"'{file}' cannot be read: {str(error) or TOO_LARGE}.") from error
        for i, row in enumerate(rows, start=1):
            step = row.get("step")
            if name != RECOVERIES and not isinstance(step, int):
                raise DataError(f"{file}, line {i}: the row has no integer step; remove the line or the file.")
            if is_valid and not is_valid(row):
                raise DataError(f"{file}, line {i}: expected {expected}; remove the line or the file.")
        return rows


def _are_numbers(row: Mapping[str, Any]) -> bool:
    return all(value is None or isinstance(value, int | float) for value in row.values())


def _are_lists(row: Mapping[str, Any]) -> bool:
    lists = [value for name, value in row.items() if name != "step"]
    if not {"score", "length"} <= row.keys() or not all(isinstance(value, list) for value in lists):
        return False
    if len(set(map(len, lists))) != 1:
        return False
    kinds = {**dict.fromkeys(ROLLOUT_TEXTS, str), "turn_rewards": list}  # of an episode, one reward for each turn
    return all(
        isinstance(value, kinds.get(name, int | float | None)) for name in row if name != "step" for value in row[name]
    )


def _is_sample(row: Mapping[str, Any]) -> bool:
    """Return whether a row has texts and numbers where they belong; a run of an older version has fewer."""
    texts = ("prompt", "response", "rendered_prompt", *ROLLOUT_TEXTS)
    numbers = ("row", "score", "length", "staleness")
    tokens = row.get("tokens", {"ids": [], "texts": []})
    return (
        all(isinstance(row.get(name, ""), str) for name in texts)
        and all(isinstance(row.get(name), int | float | None) for name in numbers)
        and isinstance(tokens, dict)
        and all(isinstance(values, list) for values in tokens.values())
        and {"ids", "texts"} <= tokens.keys()
        and all(isinstance(text, str) for text in tokens["texts"])
        and all(len(values) in (1, len(tokens["ids"])) for values in tokens.values())
    )


ALL_STEPS = range(2**62)


def performance_report(run_dir: str | Path, steps: Container[Any] = ALL_STEPS) -> dict[str, Any]:
    """Return the `transfer_report` of these steps of a run, and the first and the last of them as `steps`.

    Times are in seconds, sizes in bytes. Step 0 is the start. Raises DataError if the run has no trace of these steps,
    or a damaged one.
    """
    events = {step: of_step for step, of_step in RunFiles(run_dir).events.items() if step in steps}
    if not events:
        file = Path(run_dir) / TRACE_FILE
        raise DataConfigError(f"'{file}' has no event of these steps; metrics.jsonl of the run shows its steps.")
    return {"steps": [min(events), max(events)], **transfer_report(chain.from_iterable(events.values()))}
