"""What a run does about a failure; tests/integration/test_recovery.py has whole runs."""

from types import SimpleNamespace

import pytest

from hybridflow.config import Config
from hybridflow.errors import OutOfMemoryError, WorkerDiedError, WorkerMemoryError
from hybridflow.trainers.run.recovery.failures import Action
from hybridflow.trainers.run.recovery.recovery import Recovery


@pytest.mark.parametrize(
    ("error", "can_halve", "action"),
    [
        (WorkerMemoryError("killed"), True, Action.SMALLER),
        (WorkerMemoryError("killed"), False, Action.RESTART),
        (OutOfMemoryError("no memory"), False, Action.SMALLER),
        (WorkerDiedError("died"), True, Action.RESTART),
    ],
)
def test_a_worker_killed_for_memory_restarts_if_no_plan_is_smaller(error, can_halve, action):
    budgets = SimpleNamespace(can_halve=lambda: can_halve)
    recovery = Recovery(SimpleNamespace(config=Config()), None, budgets, None)
    assert recovery._action_for(error) is action
