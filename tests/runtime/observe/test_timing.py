import pytest

from hybridflow.runtime.observe import per_token_ms, timed, tokens_per_s


def test_seconds_of_a_stage_are_summed_also_if_it_raises():
    metrics = {"actor/loss": 1.0}
    with timed("gen", metrics, iter([10.0, 12.5]).__next__):
        pass
    with pytest.raises(ZeroDivisionError), timed("gen", metrics, iter([1.0, 4.0]).__next__):
        raise ZeroDivisionError
    assert metrics == {"actor/loss": 1.0, "timing_s/gen": 5.5}


def test_rates_are_only_for_timed_stages():
    seconds = {"timing_s/gen": 3.0, "timing_s/ref": 1.0, "timing_s/reward": 0.0}
    assert per_token_ms(seconds, {"gen": 1500, "values": 10, "ref": 0}) == {"timing_per_token_ms/gen": 2.0}
    assert tokens_per_s(seconds, {"gen": 1500, "values": 10, "reward": 5}) == {"perf/gen_tokens_per_s": 500.0}
