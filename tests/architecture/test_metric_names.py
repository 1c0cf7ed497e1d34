"""Every metric named in the code is in the glossary, from which the documentation is generated."""

import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import get_args

import pytest

from hybridflow.config.sections.advice import AdviceConfig
from hybridflow.observability import METRICS, RL_FIGURES, SFT_FIGURES, find_metric
from hybridflow.observability.advice.find import FINDINGS
from hybridflow.observability.glossary.metric import Unit

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


def test_every_metric_has_a_unit_of_the_list_and_every_unit_is_used():
    assert {metric.unit for metric in METRICS.values()} == set(get_args(Unit))


def test_units_agree_with_the_names_of_metrics():
    endings = {"_tokens_per_s": "tokens/s", "perf/tokens_per_s": "tokens/s", "bytes": "bytes", "/lr": "1"}
    starts = {"timing_s/": "s", "timing_per_token_ms/": "ms/token", "memory_bytes/": "bytes", "mfu/": "1"}
    for name, metric in METRICS.items():
        expected = {unit for end, unit in endings.items() if name.endswith(end)}
        expected |= {unit for start, unit in starts.items() if name.startswith(start)}
        assert expected <= {metric.unit}, name


@pytest.mark.parametrize("finding", [each for each in FINDINGS if each.threshold], ids=lambda finding: finding.name)
def test_when_to_worry_repeats_the_thresholds_of_the_advice(finding):
    threshold = finding.threshold
    if isinstance(threshold, str):
        threshold = getattr(AdviceConfig(), threshold)
    for named in re.findall(r"`([^`/]+/[^`]+)`", finding.found_if):
        pattern = re.sub("<[^>]+>", "*", named)
        metrics = [metric for name, metric in METRICS.items() if name == named or fnmatchcase(name, pattern)]
        assert metrics, named
        for metric in metrics:
            numbers = {float(number) for number in re.findall(r"\d+(?:\.\d+)?", metric.worry)}
            assert numbers & {threshold, round(1 - threshold, 6)}, f"{named}: {metric.worry!r} lacks {threshold}"
