import pytest

from hybridflow.observability import per_token_ms, timed, tokens_per_s


def clock(*times):
    return iter(times).__next__


def test_the_seconds_of_a_stage_are_collected_under_its_name():
    metrics = {"actor/loss": 1.0}
    with timed("gen", metrics, clock(10.0, 12.5)):
        pass
    assert metrics == {"actor/loss": 1.0, "timing_s/gen": 2.5}


def test_a_stage_entered_twice_adds_up():
    metrics = {}
    for times in [(0.0, 1.0), (5.0, 5.5)]:
        with timed("reward", metrics, clock(*times)):
            pass
    assert metrics == {"timing_s/reward": 1.5}


def test_a_stage_that_raises_is_timed_too():
    metrics = {}
    with pytest.raises(ZeroDivisionError), timed("gen", metrics, clock(1.0, 4.0)):
        raise ZeroDivisionError
    assert metrics == {"timing_s/gen": 3.0}


def test_time_per_token_is_in_milliseconds_and_only_of_stages_that_were_timed():
    assert per_token_ms({"timing_s/gen": 3.0, "timing_s/ref": 1.0}, {"gen": 1500, "values": 10, "ref": 0}) == {
        "timing_per_token_ms/gen": 2.0
    }


def test_tokens_per_second_of_the_stages_that_were_timed():
    assert tokens_per_s({"timing_s/gen": 3.0, "timing_s/reward": 0.0}, {"gen": 1500, "values": 10, "reward": 5}) == {
        "perf/gen_tokens_per_s": 500.0
    }
