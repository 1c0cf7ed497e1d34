"""The figures of a session: JSON lines, each written at once, so that a killed call keeps what it has."""

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from support.errors import BenchmarkError

LOWER_IS_BETTER = ("s", "ms", "GiB")
"""Units of which less is better."""


@dataclass(frozen=True)
class Figure:
    """One measured number: `what` of `model`, and what it is compared with.

    `limit` is a bound, a goal or an estimate, `peer` the figure of another program; `against` says which.
    """

    what: str
    value: float
    unit: str
    model: str = ""
    limit: float | None = None
    peer: float | None = None
    against: str = ""

    @property
    def name(self) -> str:
        """The name of its row: `decode_step_256_rows_at_520_0.5B`."""
        words = f"{self.what} {self.model}".lower() if not self.model else f"{self.what.lower()} {self.model}"
        return "_".join("".join(c if c.isalnum() or c in "._" else " " for c in words.replace(",", "")).split())

    @property
    def ratio(self) -> float | None:
        """How many times better than the peer, or than the limit if there is no peer."""
        other = self.limit if self.peer is None else self.peer
        if not other or not self.value:
            return None
        return other / self.value if self.unit in LOWER_IS_BETTER else self.value / other


class Record:
    """The file of a session. Lines have the keys of `Figure`, or a `state`: how a process ended, or a `note`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._append("")

    def write(self, part: str, case: str, **values: Any) -> None:
        """Show a line on stderr, and append it to the file in one write."""
        print(f"{part} of {case}: {json.dumps(values)}", file=sys.stderr, flush=True)
        self._append(json.dumps({"part": part, "case": case, **values}) + "\n")

    def _append(self, text: str) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(text)
        except OSError as error:
            raise BenchmarkError(f"{self.path} cannot be written: {error}; give another folder as --out.") from None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines that a record wrote; a line may have been cut off."""
    found = []
    for text in path.read_text(errors="replace").splitlines():
        with suppress(json.JSONDecodeError):
            line = json.loads(text)
            if isinstance(line, dict) and {"part", "case"} <= line.keys():
                found.append(line)
    return found


@dataclass(frozen=True)
class Teller:
    """What a measuring process writes with: its figures, at once."""

    record: Record
    part: str
    case: str

    def figure(self, what: str, value: float, unit: str, **compared: Any) -> None:
        """Write one figure; the named values are those of `Figure`."""
        self.record.write(self.part, self.case, **asdict(Figure(what, value, unit, **compared)))

    def note(self, text: str, **values: Any) -> None:
        """Write something that is not a number with a unit: versions, a failed variant, a row of a table."""
        self.record.write(self.part, self.case, note=text, **values)


def figures_of(lines: Sequence[dict[str, Any]]) -> list[Figure]:
    """Return the figures of lines; of two with one name the later."""
    fields = Figure.__dataclass_fields__
    found = [Figure(**{key: line[key] for key in fields}) for line in lines if "what" in line]
    return list({figure.name: figure for figure in found}.values())


def done_cases(lines: Sequence[dict[str, Any]]) -> set[tuple[str, str]]:
    """Return the part and the case of each process that ended well."""
    return {(line["part"], line["case"]) for line in lines if line.get("state") == "done"}
