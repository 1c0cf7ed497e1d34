"""Plots of metrics as PNG files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridflow.errors import DataError


def plot_curves(
    rows: Sequence[Mapping[str, Any]], keys: Sequence[str], path: str | Path, title: str = "", smoothing: int = 10
) -> None:
    """Plot each key over `step` to a PNG: raw values in light color, the mean of the last `smoothing` points in bold.

    A curve of few points is smoothed less, one of fewer than 10 points not at all. Rows without a value of a key are
    skipped for it. Raises DataError if no row has a value of any key.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves = {key: [(row["step"], float(row[key])) for row in rows if row.get(key) is not None] for key in keys}
    if not any(curves.values()):
        raise DataError(f"nothing to plot: {', '.join(keys)} not found in the {len(rows)} row(s).")
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, (key, points) in enumerate(curves.items()):
        if points:
            steps, values = zip(*points, strict=True)
            color = f"C{index}"
            window = max(1, min(smoothing, len(points) // 5))  # fewer than 10 points are not smoothed
            axes.plot(steps, smoothed(values, window), color=color, label=key, marker="o" if len(points) < 10 else None)
            axes.plot(steps, values, color=color, alpha=0.25)
    axes.set_xlabel("step")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=120)


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of each value and up to `window - 1` values before it."""
    return [sum(part) / len(part) for end in range(1, len(values) + 1) if (part := values[max(0, end - window) : end])]
