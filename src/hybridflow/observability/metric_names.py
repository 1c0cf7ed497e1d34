"""The glossary of metrics: unit, meaning, when to worry, and the reduction of the values over ranks, by name."""

import re
from fnmatch import fnmatchcase

from hybridflow.observability.glossary.episodes import EPISODES
from hybridflow.observability.glossary.learning import LEARNING
from hybridflow.observability.glossary.metric import Metric
from hybridflow.observability.glossary.offline import OFFLINE
from hybridflow.observability.glossary.sampling import SAMPLING
from hybridflow.observability.glossary.speed import SPEED

METRICS: dict[str, Metric] = {**LEARNING, **SAMPLING, **EPISODES, **SPEED, **OFFLINE}


def find_metric(name: str) -> Metric | None:
    """Return the entry of `name`, or the first with matching placeholders (`timing_s/<stage>`), or None."""
    if name in METRICS:
        return METRICS[name]
    return next((metric for pattern, metric in METRICS.items() if _matches(name, pattern)), None)


def metrics_markdown() -> str:
    """Return the glossary as a Markdown table."""
    rows = [
        f"| `{name}` | {metric.unit} | {metric.description} | {metric.worry} | {metric.reduction} |"
        for name, metric in METRICS.items()
    ]
    head = ["| name | unit | meaning | when to worry | over ranks |", "|---|---|---|---|---|"]
    return "\n".join([*head, *rows]) + "\n"


def _matches(name: str, pattern: str) -> bool:
    return "<" in pattern and fnmatchcase(name, re.sub("<[^>]+>", "*", pattern))
