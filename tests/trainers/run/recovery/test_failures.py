import inspect

import pytest

from hybridflow import errors
from hybridflow.trainers.run.recovery.failures import ACTIONS, Action, Fault, Tries, action_for, fault_of


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


@pytest.mark.parametrize(
    ("most", "backoff_s", "drawn", "pauses"),
    [
        (4, 2.0, 0.5, [0.0, 2.0, 4.0, 8.0]),
        (4, 2.0, 0.0, [0.0, 1.5]),
        (4, 2.0, 1.0, [0.0, 2.5]),
        (10**6, 400.0, 0.5, [0.0, 400.0, *[600.0] * 2000]),
        (9, 3600.0, 0.5, [0.0, 3600.0, 3600.0]),
    ],
)
def test_pauses_double_up_to_ten_minutes_and_vary_by_a_quarter(most, backoff_s, drawn, pauses):
    tries = Tries(most, backoff_s, draw=lambda: drawn)
    assert [tries.next_pause_s(step=7) for _ in pauses] == pauses
    assert tries.is_exhausted() == (len(pauses) == most)


def test_a_step_beyond_the_failure_gives_all_tries_back():
    tries = Tries(1, 0.0)
    tries.next_pause_s(step=3)
    tries.note_step(2)  # repeated
    tries.note_step(3)
    assert tries.is_exhausted()
    tries.note_step(4)
    assert not tries.is_exhausted()


def test_without_tries_the_first_failure_stops_the_run():
    assert Tries(0, 1.0).is_exhausted()
