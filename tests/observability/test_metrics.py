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


def test_spread_of_nothing_is_nothing():
    assert spread("response_length", []) == {}


def test_the_mean_of_a_spread_does_not_lose_small_numbers():
    assert spread("x", [1e16, 1.0, -1e16, 1.0])["x/mean"] == 0.5


def test_every_name_is_reduced_by_its_rule():
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


def test_a_rule_can_be_given():
    assert reduce_metrics([{"mine": 1.0}, {"mine": 5.0}], {"mine": "mean"}) == {"mine": 3.0}
    assert reduce_metrics([{"actor/loss": 1.0}, {"actor/loss": 5.0}], {"actor/loss": "max"}) == {"actor/loss": 5.0}


def test_a_name_without_a_rule_must_be_equal_everywhere():
    assert reduce_metrics([{"mine": 2}, {"mine": 2}]) == {"mine": 2}
    with pytest.raises(FieldError, match=r"different values of 'mine' \(1, 2\) and no rule joins them"):
        reduce_metrics([{"mine": 1}, {"mine": 2}])


def test_a_rank_that_lacks_a_metric_is_an_error_that_names_both():
    with pytest.raises(FieldError, match="rank 1 reports no actor/lr, other ranks do"):
        reduce_metrics([{"actor/loss": 1.0, "actor/lr": 1.0}, {"actor/loss": 1.0}])


def test_no_ranks_have_no_metrics():
    assert reduce_metrics([]) == {}


def test_lists_of_a_concatenated_batch_are_reduced_and_numbers_stay():
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
def test_a_name_finds_its_entry_through_placeholders(name, pattern):
    assert find_metric(name) is METRICS[pattern]


def test_a_name_that_nobody_documents_has_no_entry():
    assert find_metric("actor/losss") is None


def test_the_table_has_one_row_for_each_name():
    rows = [line for line in metrics_markdown().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == list(METRICS)
