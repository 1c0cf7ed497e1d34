import pytest

from hybridflow.observability import per_token_ms, timed, tokens_per_s


def clock(*times):
    return iter(times).__next__


def test_seconds_of_a_stage_have_its_name():
    metrics = {"actor/loss": 1.0}
    with timed("gen", metrics, clock(10.0, 12.5)):
        pass
    assert metrics == {"actor/loss": 1.0, "timing_s/gen": 2.5}


def test_seconds_of_a_repeated_stage_are_summed():
    metrics = {}
    for times in [(0.0, 1.0), (5.0, 5.5)]:
        with timed("reward", metrics, clock(*times)):
            pass
    assert metrics == {"timing_s/reward": 1.5}


def test_stage_that_raises_is_timed():
    metrics = {}
    with pytest.raises(ZeroDivisionError), timed("gen", metrics, clock(1.0, 4.0)):
        raise ZeroDivisionError
    assert metrics == {"timing_s/gen": 3.0}


def test_time_per_token_is_in_ms_and_only_for_timed_stages():
    assert per_token_ms({"timing_s/gen": 3.0, "timing_s/ref": 1.0}, {"gen": 1500, "values": 10, "ref": 0}) == {
        "timing_per_token_ms/gen": 2.0
    }


def test_tokens_per_second_only_for_timed_stages():
    assert tokens_per_s({"timing_s/gen": 3.0, "timing_s/reward": 0.0}, {"gen": 1500, "values": 10, "reward": 5}) == {
        "perf/gen_tokens_per_s": 500.0
    }
