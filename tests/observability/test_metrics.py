import pytest

from hybridflow.errors import FieldError
from hybridflow.observability import (
    METRICS,
    find_metric,
    flatten,
    metrics_markdown,
    reduce_lists,
    reduce_metrics,
    spread,
)


def test_flatten_joins_names_by_slashes():
    assert flatten({"actor": {"lr": 1, "loss": {"mean": 2}}, "step": 3}) == {
        "actor/lr": 1,
        "actor/loss/mean": 2,
        "step": 3,
    }
    assert flatten({"loss": 2.0}, "actor") == {"actor/loss": 2.0}


def test_spread_is_mean_max_and_min():
    assert spread("response_length", [1, 2, 6]) == {
        "response_length/mean": 3.0,
        "response_length/max": 6.0,
        "response_length/min": 1.0,
    }


def test_spread_without_values_is_empty():
    assert spread("response_length", []) == {}


def test_mean_of_a_spread_keeps_small_numbers():
    assert spread("x", [1e16, 1.0, -1e16, 1.0])["x/mean"] == 0.5


def test_each_metric_has_its_own_reduction():
    ranks = [
        {"actor/loss": 0.25, "actor/lr": 1e-5, "timing_s/gen": 2.0, "critic/score/min": 3.0, "critic/score/mean": 1.0},
        {"actor/loss": 0.5, "actor/lr": 2e-5, "timing_s/gen": 1.0, "critic/score/min": 2.0, "critic/score/mean": 2.0},
    ]
    assert reduce_metrics(ranks) == {
        "actor/loss": 0.75,
        "actor/lr": 2e-5,
        "timing_s/gen": 2.0,
        "critic/score/min": 2.0,
        "critic/score/mean": 1.5,
    }


def test_reduction_can_be_passed():
    assert reduce_metrics([{"mine": 1.0}, {"mine": 5.0}], {"mine": "mean"}) == {"mine": 3.0}
    assert reduce_metrics([{"actor/loss": 1.0}, {"actor/loss": 5.0}], {"actor/loss": "max"}) == {"actor/loss": 5.0}


def test_metric_without_reduction_must_be_equal_on_all_ranks():
    assert reduce_metrics([{"mine": 2}, {"mine": 2}]) == {"mine": 2}
    with pytest.raises(FieldError, match=r"different values of 'mine' \(1, 2\) and it has no reduction"):
        reduce_metrics([{"mine": 1}, {"mine": 2}])


def test_metric_missing_on_a_rank_raises_with_rank_and_name():
    with pytest.raises(FieldError, match="rank 1 does not report actor/lr, which other ranks report"):
        reduce_metrics([{"actor/loss": 1.0, "actor/lr": 1.0}, {"actor/loss": 1.0}])


def test_reduction_over_no_ranks_is_empty():
    assert reduce_metrics([]) == {}


def test_reduce_lists_reduces_lists_and_keeps_numbers():
    assert reduce_lists({"actor/loss": [0.25, 0.5], "actor/lr": 1e-5, "actor/entropy": []}) == {
        "actor/loss": 0.75,
        "actor/lr": 1e-5,
    }


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("timing_s/update_actor", "timing_s/<stage>"),
        ("val/countdown/pass@8", "val/<data_source>/pass@<k>"),
        ("val/score/mean", "val/score/mean"),
    ],
)
def test_find_metric_matches_placeholders(name, pattern):
    assert find_metric(name) is METRICS[pattern]


def test_find_metric_of_an_unknown_name_is_none():
    assert find_metric("actor/losss") is None


def test_metrics_table_has_one_row_per_name():
    rows = [line for line in metrics_markdown().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == list(METRICS)
