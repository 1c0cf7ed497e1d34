"""Workers that are lost while a run starts are started again, a bounded number of times."""

import random

import pytest

from hybridflow.config import load_config
from hybridflow.errors import ConfigError, WorkerDiedError
from hybridflow.trainers.starting import start_with_tries


def config_of(backend="ray", max_restarts=2):
    changes = [f"controller.backend={backend}", f"recovery.max_restarts={max_restarts}", "recovery.backoff_s=0"]
    return load_config(None, [*changes, "trainer.seed=5"])


class Start:
    """A start that fails with the given errors first."""

    def __init__(self, *errors):
        self.errors, self.drawn = list(errors), []

    def __call__(self):
        self.drawn.append(random.random())
        if self.errors:
            raise self.errors.pop(0)
        return "trainer"


def test_a_start_that_loses_workers_is_repeated_from_the_same_random_state(caplog):
    random.seed(5)
    start, facts = Start(WorkerDiedError("actor/0 died\nits log"), WorkerDiedError("critic/0 died")), {}
    assert start_with_tries(config_of(), start, facts) == "trainer"
    assert len(start.drawn) == 3
    assert start.drawn[1] == start.drawn[2]
    assert facts == {"failed_starts": ["actor/0 died", "critic/0 died"]}
    assert "starting the workers again, try 2 of 2" in caplog.text


@pytest.mark.parametrize(("backend", "max_restarts", "starts"), [("ray", 2, 3), ("ray", 0, 1), ("local", 2, 1)])
def test_tries_are_bounded(backend, max_restarts, starts):
    start = Start(*[WorkerDiedError("died")] * 9)
    with pytest.raises(WorkerDiedError):
        start_with_tries(config_of(backend, max_restarts), start, {})
    assert len(start.drawn) == starts


def test_other_errors_are_raised_at_once():
    start = Start(ConfigError("wrong"))
    with pytest.raises(ConfigError):
        start_with_tries(config_of(), start, {})
    assert len(start.drawn) == 1
