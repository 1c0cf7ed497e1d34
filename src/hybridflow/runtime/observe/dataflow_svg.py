"""Pictures of a dataflow, as SVG: methods from top to bottom as they are called, the controller at the left."""

import textwrap
from collections.abc import Sequence
from html import escape

from hybridflow.runtime.observe.dataflow import Edge, names_of, sources_of
from hybridflow.runtime.observe.trace import CONTROLLER

_CHAR, _LINE, _GAP = 6.7, 14, 12
_LABEL_CHARS = 34
_STYLE = (
    "text{font:11px monospace;fill:#222}.name{font-weight:bold}.note{fill:#555}rect{fill:#e8f0f8;stroke:#1f4e79}"
    ".page{fill:#fff;stroke:none}path{fill:none;stroke:#1f4e79}.out{stroke:#b35900}"
)
_HEAD = "<marker id='head' viewBox='0 0 8 8' refX='8' refY='4' markerWidth='7' markerHeight='7' orient='auto'>"


def draw_svg(edges: Sequence[Edge], notes: dict[str, str] | None = None) -> str:
    """Return a picture of the columns that go from method to method; `notes` are shown under a name."""
    notes = notes or {}
    methods = [name for name in names_of(edges) if name != CONTROLLER]
    lanes = {name: lane for lane, name in enumerate(_with_readers(methods, edges))}
    width = max(len(text) for name in [*methods, CONTROLLER] for text in (name, notes.get(name, ""))) * _CHAR + 24
    label = _LABEL_CHARS * _CHAR + 20
    bar = len(CONTROLLER) * _CHAR + 20
    left, right, y = bar + label, bar + label + width, 20.0
    shapes: list[str] = []
    ends: dict[str, list[float]] = {name: [] for name in lanes}
    to_controller = sources_of(CONTROLLER, edges)
    for name in methods:
        top, sources = y, sources_of(name, edges)
        sent, read = sources.pop(CONTROLLER, []), to_controller.get(name, [])
        y_left, y_right = top, top
        for columns, start, end, kind in ((sent, bar, left, ""), (read, left, bar, "out")):
            if columns:
                y_left = _arrow(shapes, columns, bar + 10, y_left, start, end, kind)
        for producer, columns in sources.items():
            lane = right + label + _GAP * lanes[producer]
            y_right = _arrow(shapes, columns, right + 10, y_right, lane, right, "")
            ends[producer].append(y_right)
        if name in lanes:
            y_right += _GAP
            shapes.append(f"<path d='M{right:.0f} {y_right:.0f}H{right + label + _GAP * lanes[name]:.0f}'/>")
            ends[name].append(y_right)
        y = max(y_left, y_right, top + 2 * _LINE) + 8
        shapes.append(f"<rect x='{left:.0f}' y='{top:.0f}' width='{width:.0f}' height='{y - top:.0f}' rx='3'/>")
        middle = (top + y) / 2 + 4 - (_LINE / 2 if name in notes else 0)
        shapes.append(_text(left + 12, middle, name, "name"))
        shapes.append(_text(left + 12, middle + _LINE, notes.get(name, ""), "note"))
        y += 2 * _GAP
    for name, lane in lanes.items():
        x = right + label + _GAP * lane
        shapes.append(f"<path d='M{x:.0f} {min(ends[name]):.0f}V{max(ends[name]):.0f}'/>")
    shapes.append(f"<rect x='8' y='8' width='{bar - 8:.0f}' height='{y - 20:.0f}' rx='3'/>")
    shapes.append(_text(14, 26, CONTROLLER, "name"))
    size = f"{right + label + _GAP * len(lanes):.0f} {y:.0f}"
    begin = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {size}'><style>{_STYLE}</style>"
    head = f"<defs>{_HEAD}<path d='M0 0L8 4L0 8Z' style='fill:#1f4e79'/></marker></defs>"
    return "\n".join([f"{begin}{head}", "<rect class='page' width='100%' height='100%'/>", *shapes, "</svg>\n"])


def _with_readers(methods: Sequence[str], edges: Sequence[Edge]) -> list[str]:
    """Return the methods whose columns another method reads."""
    return [name for name in methods if any(producer == name and to != CONTROLLER for producer, to, _ in edges)]


def _arrow(shapes: list[str], columns: list[str], x: float, y: float, start: float, end: float, kind: str) -> float:
    """Add an arrow under its columns, and return its height."""
    for line in textwrap.wrap(", ".join(columns), _LABEL_CHARS, break_long_words=False):
        y += _LINE
        shapes.append(_text(x, y, line))
    y += 5
    shapes.append(f"<path class='{kind}' marker-end='url(#head)' d='M{start:.0f} {y:.0f}H{end:.0f}'/>")
    return y


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f"<text class='{kind}' x='{x:.0f}' y='{y:.0f}'>{escape(text)}</text>" if text else ""
