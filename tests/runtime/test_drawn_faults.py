"""Drawn faults: equal for equal seeds, valid, and spread over phases, kinds, workers and steps."""

from collections import Counter

import pytest

from hybridflow.config import load_config
from hybridflow.config.faults import PHASES, kinds_at, planned_faults, training_roles, workers_of
from hybridflow.runtime.drawn_faults import draw_faults

OVERRIDES = [
    *("controller.backend=ray", "algorithm.advantage=gae"),
    *("placement.pools={learn=[2],generate=[3]}", "placement.roles.rollout=generate"),
]
ROLES = ("actor_rollout", "rollout", "reward", "critic")


def drawn(num_faults, *overrides, steps=10):
    return draw_faults(load_config(None, [*OVERRIDES, f"faults.random={num_faults}", *overrides]), ROLES, steps)


def test_phases_kinds_workers_and_steps_are_drawn_equally_often():
    assert Counter(fault.phase for fault in drawn(12)) == dict.fromkeys(PHASES, 1)
    assert set(Counter(fault.phase for fault in drawn(60)).values()) == {5}
    faults = drawn(12 * 30)
    kinds = Counter(fault.kind for fault in faults if fault.phase == "generate")
    assert kinds == dict.fromkeys(PHASES["generate"].kinds, 6)
    workers = Counter(fault.worker for fault in faults if (fault.phase, fault.kind) == ("generate", "kill"))
    assert workers == {"rollout/0": 2, "rollout/1": 2, "rollout/2": 2}
    assert [fault.step for fault in drawn(10, steps=10)] == list(range(1, 11))
    assert [fault.step for fault in drawn(6, steps=3)] == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("seed", range(3))
def test_drawn_faults_are_valid_in_a_plan_and_equal_for_a_seed(seed):
    faults = drawn(100, f"faults.seed={seed}")
    assert len(faults) == 100
    assert faults == drawn(100, f"faults.seed={seed}") != drawn(100, f"faults.seed={seed + 1}")
    assert ("driver", "stop") not in {(fault.worker, fault.kind) for fault in faults}
    config = load_config(None, OVERRIDES)
    config = config.model_copy(update={"faults": config.faults.model_copy(update={"plan": tuple(map(str, faults))})})
    assert planned_faults(config, ROLES, last_step=10) == faults


def test_the_local_backend_draws_faults_of_the_driver():
    config = load_config(None, ["faults.random=12"])
    roles = training_roles(config)
    assert list(workers_of(config, roles)) == ["driver"]
    faults = draw_faults(config, roles, 5)
    assert {fault.phase for fault in faults} == {"step", "publish", "log"}
    assert all(fault.kind in kinds_at(config, "driver", fault.phase) for fault in faults)
