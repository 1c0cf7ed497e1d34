"""Workers that are lost while a run starts are started again, a bounded number of times."""

import random

import pytest

from hybridflow.config import load_config
from hybridflow.errors import ConfigError, WorkerDiedError
from hybridflow.trainers.build.build_run import start_with_tries


def start(*errors, backend="ray", max_restarts=2):
    """Return the result or error of a start that fails with these errors first, its random numbers, and the facts."""
    changes = [f"controller.backend={backend}", f"recovery.max_restarts={max_restarts}", "recovery.backoff_s=0"]
    left, drawn, facts = list(errors), [], {}

    def once():
        drawn.append(random.random())
        if left:
            raise left.pop(0)
        return "trainer"

    try:
        return start_with_tries(load_config(None, [*changes, "trainer.seed=5"]), once, facts), drawn, facts
    except Exception as error:
        return error, drawn, facts


def test_a_start_that_loses_workers_is_repeated_from_the_same_random_state(caplog):
    random.seed(5)
    result, drawn, facts = start(WorkerDiedError("actor/0 died\nits log"), WorkerDiedError("critic/0 died"))
    assert (result, len(drawn)) == ("trainer", 3)
    assert drawn[1] == drawn[2]
    assert facts == {"failed_starts": ["actor/0 died", "critic/0 died"]}
    assert "starting the workers again, try 2 of 2" in caplog.text


@pytest.mark.parametrize(
    ("error", "backend", "max_restarts", "starts"),
    [
        (WorkerDiedError("died"), "ray", 2, 3),
        (WorkerDiedError("died"), "ray", 0, 1),
        (WorkerDiedError("died"), "local", 2, 1),
        (ConfigError("wrong"), "ray", 2, 1),
    ],
)
def test_tries_are_bounded_and_only_for_lost_workers(error, backend, max_restarts, starts):
    result, drawn, _ = start(*[error] * 9, backend=backend, max_restarts=max_restarts)
    assert result is error
    assert len(drawn) == starts
