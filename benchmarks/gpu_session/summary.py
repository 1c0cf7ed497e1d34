"""What a session found, as the tables of docs/benchmarks.md."""

from collections.abc import Sequence
from typing import Any

from support.report import Row, figure

from gpu_session.models import MODELS
from gpu_session.record import Figure, figures_of

NOT_RUN = "not run"


def rows_of(lines: Sequence[dict[str, Any]]) -> list[Row]:
    """Return the figures as the rows of a benchmark."""
    return [Row(f.name, f.unit, f.value, f.peer, f.limit, f.ratio) for f in figures_of(lines)]


def tables_of(lines: Sequence[dict[str, Any]], planned: Sequence[tuple[str, str]]) -> str:
    """Return the Markdown of all figures, of how each process ended, and of whole steps as other frameworks do."""
    figures = figures_of(lines)
    models = [name for name in MODELS if any(f.model == name for f in figures)]
    text = []
    by_what: dict[tuple[str, str], dict[str, Figure]] = {}
    for found in figures:
        by_what.setdefault((found.what, found.against), {})[found.model] = found
    header = ["what", "compared with", *models, "the machine"]
    text += [_line(header), "|---" * len(header) + "|"]
    for (what, against), of_model in by_what.items():
        blank = "" if "" in of_model else NOT_RUN
        cells = [_cell(of_model[name]) if name in of_model else blank for name in models]
        text.append(_line([what, against, *cells, _cell(of_model[""]) if "" in of_model else ""]))
    states = {(line["part"], line["case"]): line for line in lines if "state" in line}
    text += ["", _line(["process", "how it ended", "seconds"]), "|---|---|---|"]
    for part, case in planned:
        line = states.get((part, case), {"state": NOT_RUN})
        text.append(_line([f"{part} of {case}", line["state"], figure(line.get("seconds"))]))
    for line in lines:
        if row := line.get("row"):
            text += ["", _line(row), "|---" * len(row) + "|", _line([str(value) for value in row.values()])]
    return "\n".join(text)


def _line(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(found: Figure) -> str:
    """Return a value with its unit, and what it is compared with: `3.1 ms; 1.2, 39%`."""
    unit = "" if found.unit == "1" else f" {found.unit}"
    text = f"{figure(found.value)}{unit}"
    for other in (found.limit, found.peer):
        text += f"; {figure(other)}" if other is not None else ""
    return text + (f", {100 * found.ratio:.0f}%" if found.ratio is not None else "")
