"""Every metric named in the code is in the glossary, from which the documentation is generated."""

import re
from pathlib import Path

from hybridflow.observability import METRICS, RL_FIGURES, SFT_FIGURES, find_metric

SOURCE = Path(__file__).parents[2] / "src" / "hybridflow"
FAMILIES = sorted({name.partition("/")[0] for name in METRICS})
METRIC_NAME = re.compile(rf'"((?:{"|".join(FAMILIES)})/[^"\s{{}}]+)"')


def test_every_metric_in_the_code_is_in_the_glossary():
    named = {name for path in SOURCE.rglob("*.py") for name in METRIC_NAME.findall(path.read_text("utf-8"))}
    assert "actor/loss" in named
    prefixes = {name.rpartition("/")[0] for name in METRICS}
    assert sorted(name for name in named - prefixes if find_metric(name) is None) == []


def test_console_metrics_are_in_the_glossary():
    assert [name for name in (RL_FIGURES | SFT_FIGURES).values() if find_metric(name) is None] == []
