import pytest

from hybridflow.errors import FieldError
from hybridflow.runtime.observe import (
    METRICS,
    find_metric,
    flatten,
    metrics_markdown,
    reduce_lists,
    spread,
)


def test_flatten_joins_names_by_slashes():
    nested = {"actor": {"lr": 1, "loss": {"mean": 2}}, "step": 3}
    assert flatten(nested) == {"actor/lr": 1, "actor/loss/mean": 2, "step": 3}
    assert flatten({"loss": 2.0}, "actor") == {"actor/loss": 2.0}


def test_spread_is_mean_max_and_min():
    assert spread("length", [1, 2, 6]) == {"length/mean": 3.0, "length/max": 6.0, "length/min": 1.0}
    assert spread("length", []) == {}
    assert spread("x", [1e16, 1.0, -1e16, 1.0])["x/mean"] == 0.5  # small numbers are kept


def test_each_metric_has_its_own_reduction_over_the_ranks():
    lists = {
        "actor/loss": [0.25, 0.5],
        "actor/lr": [1e-5, 2e-5],
        "timing_s/gen": [2.0, 1.0],
        "actor/entropy": [],
        "critic/score/min": [3.0, 2.0],
        "critic/score/mean": [1.0, 2.0],
        "mine": [2, 2],
        "critic/lr": 1e-5,
    }
    assert reduce_lists(lists) == {
        "actor/loss": 0.75,
        "actor/lr": 2e-5,
        "timing_s/gen": 2.0,
        "critic/score/min": 2.0,
        "critic/score/mean": 1.5,
        "mine": 2,
        "critic/lr": 1e-5,
    }
    with pytest.raises(FieldError, match=r"different values of 'mine' \(1, 2\) and it has no reduction"):
        reduce_lists({"mine": [1, 2]})


def test_metrics_are_found_by_their_placeholders():
    for name, pattern in {
        "timing_s/update_actor": "timing_s/<stage>",
        "val/countdown/pass@8": "val/<data_source>/pass@<k>",
        "val/score/mean": "val/score/mean",
    }.items():
        assert find_metric(name) is METRICS[pattern]
    assert find_metric("actor/losss") is None
    rows = [line for line in metrics_markdown().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == list(METRICS)
