import inspect

import pytest

from hybridflow import errors
from hybridflow.fault_tolerance import ACTIONS, Action, Fault, action_for, fault_of


@pytest.mark.parametrize(
    ("error", "fault", "action"),
    [
        (errors.WorkerDiedError("died"), Fault.INFRASTRUCTURE, Action.RESTART),
        (errors.WorkerMemoryError("killed"), Fault.MEMORY, Action.SMALLER),
        (errors.WorkerTimeoutError("late"), Fault.INFRASTRUCTURE, Action.RESTART),
        (errors.LostWeightSyncError("lost"), Fault.INFRASTRUCTURE, Action.RESTART),
        (errors.LostClusterError("the GCS died"), Fault.CLUSTER, Action.STOP),
        (errors.WeightSyncError("changed in transit"), Fault.TRANSFER, Action.RESTART),
        (errors.OutOfMemoryError("no memory"), Fault.MEMORY, Action.SMALLER),
        (errors.ModelError("no such layer"), Fault.OTHER, Action.STOP),
        (errors.NonFiniteError("nan"), Fault.NUMERIC, Action.STOP),
        (errors.RewardError("raised"), Fault.USER_CODE, Action.STOP),
        (errors.DataError("bad row"), Fault.DATA, Action.STOP),
        (errors.CheckpointError("disk full"), Fault.STORAGE, Action.STOP),
        (errors.WorkerError("a bug"), Fault.OTHER, Action.STOP),
        (errors.ConfigError("does not fit"), Fault.OTHER, Action.STOP),
    ],
)
def test_the_class_and_the_action_follow_from_the_type_of_the_error(error, fault, action):
    assert (fault_of(error), action_for(error)) == (fault, action)


def test_an_error_of_the_configuration_never_restarts_a_run():
    assert set(ACTIONS) == set(Fault)
    classes = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, errors.ConfigError)]
    assert len(classes) > 3
    assert {action_for(cls("wrong")) for cls in classes} == {Action.STOP}
