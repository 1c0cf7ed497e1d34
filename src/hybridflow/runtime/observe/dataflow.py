"""The dataflow of a program from its trace, by producer and reader of each column, and drawings of it."""

from collections.abc import Iterable, Sequence

from hybridflow.runtime.observe.trace import CONTROLLER, TraceEvent

Edge = tuple[str, str, str]
"""(producer, reader, column)"""


def dataflow_edges(events: Iterable[TraceEvent]) -> list[Edge]:
    """Return every edge once, in the order of the trace."""
    edges: dict[Edge, None] = {}
    for event in events:
        reader = event.where if event.kind == "call" else CONTROLLER
        for producer, columns in event.sources if event.kind != "send" else ():
            for column in columns:
                if producer != reader:
                    edges[producer, reader, column] = None
    return list(edges)


def draw_text(edges: Sequence[Edge], notes: dict[str, str] | None = None) -> str:
    """Return a text with the columns that each reader reads from each producer; `notes` are shown after a name."""
    lines = []
    for reader in [*(name for name in names_of(edges) if name != CONTROLLER), CONTROLLER]:
        note = (notes or {}).get(reader, "")
        lines.append(f"{reader}{f'  ({note})' if note else ''}")
        for producer, columns in sources_of(reader, edges).items():
            lines.append(f"    <- {producer}: {', '.join(columns)}")
    return "\n".join(lines) + "\n"


def draw_mermaid(edges: Sequence[Edge], notes: dict[str, str] | None = None) -> str:
    """Return a Mermaid flowchart for Markdown."""
    names = names_of(edges)
    ids = {name: f"n{index}" for index, name in enumerate(names)}
    lines = ["flowchart TD"]
    for name in names:
        note = (notes or {}).get(name, "")
        lines.append(f'    {ids[name]}["{name}{f"<br/>{note}" if note else ""}"]')
    for reader in names:
        for producer, columns in sources_of(reader, edges).items():
            lines.append(f'    {ids[producer]} -->|"{", ".join(columns)}"| {ids[reader]}')
    return "\n".join(lines) + "\n"


def names_of(edges: Sequence[Edge]) -> list[str]:
    """Return all producers and readers in the order of the trace, the controller first."""
    return list(
        dict.fromkeys([CONTROLLER, *(reader for _, reader, _ in edges), *(producer for producer, _, _ in edges)])
    )


def sources_of(reader: str, edges: Sequence[Edge]) -> dict[str, list[str]]:
    """Return the columns that a reader reads, by producer."""
    sources: dict[str, list[str]] = {}
    for producer, to, column in edges:
        if to == reader:
            sources.setdefault(producer, []).append(column)
    return {producer: sorted(columns) for producer, columns in sources.items()}
