import pytest

from hybridflow.config import load_config
from hybridflow.trainers.learning_signal import STEPS_IN_A_ROW, LearningSignalMonitor

GAE = "algorithm.advantage=gae"


def metrics(*scores, equal_groups=0.0, cut=0.0):
    return {
        "critic/score/mean": sum(scores) / len(scores),
        "critic/score/min": min(scores),
        "critic/score/max": max(scores),
        "critic/zero_variance_groups": equal_groups,
        "response_length/clip_ratio": cut,
    }


DIFFERENT, EQUAL = metrics(0.0, 1.0, equal_groups=0.5), metrics(0.0, 0.0, equal_groups=1.0)
CUT = metrics(0.0, 1.0, cut=1.0)


@pytest.fixture
def warnings_of(caplog):
    """Return the warnings logged by each step of a run, from step 1 on unless `first` says otherwise."""

    def run(steps, *overrides, first=1):
        monitor = LearningSignalMonitor(load_config(None, ["trainer.run_dir=runs/a", *overrides]))
        logged = {}
        for step, of_step in enumerate(steps, first):
            caplog.clear()
            monitor.check(step, of_step)
            if caplog.messages:
                (logged[step],) = caplog.messages
        return logged

    return run


def test_equal_rewards_in_every_group_are_reported_at_step_1(warnings_of):
    assert warnings_of([EQUAL, EQUAL]) == {
        1: "step 1: all responses to each prompt have the same reward (mean 0), so there is no learning signal; read "
        "runs/a/samples.jsonl, then check the reward function"
    }


def test_cut_responses_are_reported_with_the_limit(warnings_of):
    assert warnings_of([CUT], "data.max_response_length=24") == {
        1: "step 1: all responses are cut at data.max_response_length=24, so rewards are those of unfinished "
        "responses; read runs/a/samples.jsonl, then check the reward function and data.max_response_length=24"
    }


def test_both_findings_are_one_warning(warnings_of):
    assert warnings_of([metrics(0.0, equal_groups=1.0, cut=1.0)], "trainer.log_samples=0") == {
        1: "step 1: all responses to each prompt have the same reward (mean 0) and all responses are cut at "
        "data.max_response_length=512, so there is no learning signal; read runs/a/samples.jsonl (set "
        "trainer.log_samples above 0), then check the reward function and data.max_response_length=512"
    }


@pytest.mark.parametrize("finding", [EQUAL, CUT])
def test_a_finding_is_repeated_once_after_many_steps_in_a_row(warnings_of, finding):
    steps = [DIFFERENT, *[finding] * (STEPS_IN_A_ROW - 1), DIFFERENT, *[finding] * 2 * STEPS_IN_A_ROW]
    (logged,) = warnings_of(steps).items()
    last = 1 + STEPS_IN_A_ROW + STEPS_IN_A_ROW
    assert logged[0] == last
    assert logged[1].startswith(f"steps {last - STEPS_IN_A_ROW + 1} to {last}: all responses ")


def test_a_resumed_run_counts_anew(warnings_of):
    assert list(warnings_of([EQUAL] * STEPS_IN_A_ROW, first=7)) == [6 + STEPS_IN_A_ROW]


def test_an_estimator_without_groups_compares_all_rewards(warnings_of):
    one_response_each = metrics(0.0, 1.0, equal_groups=1.0)
    assert warnings_of([one_response_each], GAE, "rollout.group_size=1") == {}
    assert "all responses have the same reward (mean 0.5), so there" in warnings_of([metrics(0.5, 0.5)], GAE)[1]


def test_a_batch_of_one_response_has_nothing_to_compare(warnings_of):
    assert warnings_of([metrics(0.5)] * 20, GAE, "rollout.group_size=1", "data.train_batch_size=1") == {}


def test_remax_compares_rewards_with_those_of_greedy_responses(warnings_of):
    remax = ["algorithm.advantage=remax", "rollout.group_size=1"]
    below_greedy = EQUAL | {"critic/advantages/min": -1.0, "critic/advantages/max": 0.0}
    assert warnings_of([below_greedy], *remax) == {}
    same_as_greedy = EQUAL | {"critic/advantages/min": 0.0, "critic/advantages/max": 0.0}
    assert "all responses have the same reward (mean 0)" in warnings_of([same_as_greedy], *remax)[1]


def test_distillation_does_not_need_different_rewards(warnings_of):
    assert warnings_of([EQUAL], "algorithm.advantage=distillation", "teacher.model_path=m") == {}


def test_different_rewards_are_not_reported(warnings_of):
    assert warnings_of([DIFFERENT] * 20) == {}
