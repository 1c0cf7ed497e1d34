import pytest

from hybridflow.controller import ClassWithInitArgs, Dispatch, ResourcePool, Worker, WorkerGroup, register
from hybridflow.trainers.timed_group import TimedGroup


class Echo(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def generate_sequences(self, word):
        return word

    @register(Dispatch.ONE_TO_ALL)
    def update_actor(self):
        raise ValueError("no")


@pytest.fixture
def group():
    return WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Echo))


def test_a_call_passes_through_and_is_timed_under_the_name_of_its_stage(group):
    metrics = {}
    timed = TimedGroup(group, metrics)
    assert timed.generate_sequences("a") == ["a"]
    first = metrics["timing_s/gen"]
    assert first > 0
    timed.generate_sequences(word="b")
    assert metrics["timing_s/gen"] > first
    assert list(metrics) == ["timing_s/gen"]


def test_a_call_that_fails_is_timed_too(group):
    metrics = {}
    with pytest.raises(Exception, match="ValueError: no"):
        TimedGroup(group, metrics).update_actor()
    assert list(metrics) == ["timing_s/update_actor"]


def test_a_method_that_does_not_exist_is_the_groups_own_error(group):
    with pytest.raises(AttributeError, match="has no method 'compute_values'"):
        TimedGroup(group, {}).compute_values()
