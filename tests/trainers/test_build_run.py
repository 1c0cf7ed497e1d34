"""What is measured before a run: the peak of the devices of each trained role."""

import pytest

from hybridflow.config import Config
from hybridflow.controller import ClassWithInitArgs, Dispatch, ResourcePool, Role, Worker, WorkerGroup, register
from hybridflow.trainers.speed import Learner, measured_speedometer


class MeasuredRank(Worker):
    """A rank on a device with a known peak."""

    def __init__(self, peaks):
        self.peaks = peaks

    @register(Dispatch.ONE_TO_ALL)
    def measure_peak(self, dtype):
        return self.peaks[dtype][self.rank]


def ranks_with_peaks(*peaks):
    """Return a group of ranks with these peaks in bfloat16, and others in float32."""
    classes = ClassWithInitArgs(MeasuredRank, {"bfloat16": peaks, "float32": [1.0] * len(peaks)})
    return WorkerGroup(ResourcePool([len(peaks)]), classes)


@pytest.mark.parametrize("generating", [Role.Rollout, Role.ActorRollout])
def test_the_peak_of_a_role_is_the_sum_over_its_unequal_ranks(generating):
    actor = Role.Actor if generating is Role.Rollout else Role.ActorRollout
    groups = {actor: ranks_with_peaks(3e12, 1e12, 5e12), Role.Critic: ranks_with_peaks(2e12, 4e12)}
    if generating is Role.Rollout:
        groups[generating] = ranks_with_peaks(7e12, 2e12)
    learners = {"actor": Learner(1, None), "critic": Learner(2, None)}
    speedometer = measured_speedometer(Config(model={"dtype": "bfloat16"}), learners, groups)
    peaks = {name: learner.peak_flops for name, learner in speedometer.learners.items()}
    assert peaks == {"actor": 9e12, "critic": 6e12}
    assert speedometer.generation_peak_flops == 9e12
