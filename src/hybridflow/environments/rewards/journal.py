"""Journal of reward outcomes, written before they are used: a repeated step calls no reward function again.

RUN_DIR/rewards/step_000012_rank_0.jsonl has a row for each call: {"key", "number", "outcome"}.
"""

import hashlib
import json
import re
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.config.keys import PROMPT_FILE
from hybridflow.environments.rewards.outcome import Outcome
from hybridflow.errors import RewardError
from hybridflow.runtime.observe import JsonlWriter
from hybridflow.runtime.plain_files import require_plain_file

_NAME = re.compile(r"step_(\d+)_rank_(\d+)\.jsonl")


@dataclass(frozen=True)
class Call:
    """A call of the reward function."""

    key: str
    """Digest of the function's identity and all arguments."""
    number: int
    """Number of equal calls before this one in the step."""
    known: Outcome | None
    """Outcome in the journal; None if the function must be called."""
    writer: JsonlWriter
    """File of the step."""


class RewardJournal:
    """The outcomes of a run's steps in `directory`; each rank writes a separate file.

    Only outcomes that existed when the journal was created are used, those of this rank first: rows that other ranks
    write meanwhile are ignored. `identity` describes the function and its settings, where directories of files do not
    matter, since a replay names them otherwise; outcomes of another identity are not used. With `failures` failed
    outcomes are kept too: a run that continues after a failure must find it again.
    Raises RewardError if a file of the journal is not a regular file.
    """

    def __init__(self, directory: str | Path, rank: int, identity: Any, *, failures: bool) -> None:
        self.directory, self._rank, self.keeps_failures = Path(directory), rank, failures
        self._identity = _without_directories(identity)
        try:
            for path in self._files():
                require_plain_file(path)
        except OSError as error:
            raise RewardError(f"the journal of rewards cannot be used: {error}; remove it.") from error
        self._known: dict[str, deque[Outcome]] = {}
        self._counts: Counter[str] = Counter()
        self._writer: JsonlWriter | None = None
        self._lock = threading.Lock()  # calls of an abandoned step may still be answered, in another thread
        self.reopen()

    def reopen(self) -> None:
        """Use all outcomes that exist now from the next `open` on, as if the journal were created again."""
        self._sizes = {path: path.stat().st_size for path in self._files()}
        self._step = -1

    def open(self, step: int) -> None:
        """Load the known outcomes of a step and open its file for new ones. Raises RewardError if it cannot."""
        if step == self._step:
            return
        known: defaultdict[str, deque[Outcome]] = defaultdict(deque)
        own = self.directory / f"step_{step:06d}_rank_{self._rank}.jsonl"
        others = [path for path in self._sizes if path != own and _step_of(path) == step]
        for path in [own, *others]:
            # Rows are written in the order of the answers; equal calls are matched in the order of the calls.
            # Of several rows of a call the last counts: the earlier ones were withdrawn.
            rows = {(number, key): outcome for number, key, outcome in _read(path, self._sizes.get(path, 0))}
            for (_, key), outcome in sorted(rows.items(), key=lambda row: row[0]):
                known[key].append(outcome)
        try:
            with self._lock:
                self._writer = JsonlWriter(own)  # drops an incomplete last line of a killed process
        except OSError as error:
            raise RewardError(f"the journal of rewards cannot be written: {error}; remove the file.") from error
        self._known, self._step, self._counts = dict(known), step, Counter()

    def call(self, sample: Mapping[str, Any], prompt: Any) -> Call:
        """Return the call with its known outcome, if any; equal calls use the known outcomes in order."""
        assert self._writer is not None, "call open first"
        text = json.dumps(_canonical([self._identity, sample, prompt]))
        key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        self._counts[key] += 1
        outcomes = self._known.get(key)
        return Call(key, self._counts[key] - 1, outcomes.popleft() if outcomes else None, self._writer)

    def write(self, call: Call, outcome: Outcome, *, is_answer: bool) -> None:
        """Write an outcome if it is an answer or failures are kept. Raises DataError if writing fails."""
        if is_answer or self.keeps_failures:
            outcome_text = json.dumps(outcome.to_message())
            with self._lock:
                call.writer.write({"key": call.key, "number": call.number, "outcome": outcome_text})

    def forget_before(self, step: int) -> None:
        """Remove the files of earlier steps, which no checkpoint needs."""
        for path in self._files():
            if _step_of(path) < step:
                path.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        return sorted(path for path in self.directory.glob("step_*_rank_*.jsonl") if _NAME.fullmatch(path.name))


def _step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _read(path: Path, size: int) -> list[tuple[int, str, Outcome]]:
    """Return number, key and outcome of the rows in the first `size` bytes, without an incomplete last row."""
    rows: list[tuple[int, str, Outcome]] = []
    number = 0
    try:
        contents = path.read_bytes()[:size] if size else b""
        for number, line in enumerate(contents.split(b"\n")[:-1], start=1):  # noqa: B007  (for the error)
            row = json.loads(line)
            rows.append((int(row["number"]), str(row["key"]), Outcome.of_message(json.loads(row["outcome"]))))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RewardError(
            f"{path}, line {number}, is damaged ({error}); remove the file to compute its rewards again."
        ) from error
    return rows


def _without_directories(identity: Any) -> Any:
    """Return names of functions, classes and tasks, and the file of a judge's prompt, without their directories."""
    if isinstance(identity, Mapping):  # arguments of a function
        return {name: Path(value).name if name == PROMPT_FILE else value for name, value in identity.items()}
    if isinstance(identity, list):
        return [_without_directories(item) for item in identity]
    if not isinstance(identity, str):
        return identity
    if identity.startswith("harbor:"):
        tasks, mark, options = identity.removeprefix("harbor:").partition("?")
        return f"harbor:{Path(tasks).name}{mark}{re.sub('(?<=sandbox=)[^&]*/', '', options)}"
    source, colon, function = identity.rpartition(":")
    return f"{Path(source).name}{colon}{function}" if source.endswith(".py") else identity


def _canonical(value: Any) -> Any:
    """Convert a value so that equal values have equal JSON, independent of the order of dict entries."""
    if isinstance(value, Mapping):
        return {"": sorted(([repr(key), _canonical(item)] for key, item in value.items()), key=lambda entry: entry[0])}
    if hasattr(value, "tolist"):  # of numpy
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    return value if isinstance(value, str | int | float | None) else repr(value)
