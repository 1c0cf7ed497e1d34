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


def drawn(num_faults, *overrides, steps=10, roles=ROLES):
    config = load_config(None, [*OVERRIDES, f"faults.random={num_faults}", *overrides])
    return draw_faults(config, roles, steps)


def test_equal_seeds_draw_equal_faults():
    assert drawn(20) == drawn(20)
    assert drawn(20) != drawn(20, "faults.seed=1")


def test_one_fault_is_drawn_for_each_phase_before_any_phase_repeats():
    assert Counter(fault.phase for fault in drawn(12)) == dict.fromkeys(PHASES, 1)
    assert set(Counter(fault.phase for fault in drawn(60)).values()) == {5}


def test_kinds_of_a_phase_and_workers_of_a_kind_are_drawn_equally_often():
    faults = drawn(12 * 30)
    kinds = Counter(fault.kind for fault in faults if fault.phase == "generate")
    assert kinds == dict.fromkeys(PHASES["generate"].kinds, 6)
    workers = Counter(fault.worker for fault in faults if (fault.phase, fault.kind) == ("generate", "kill"))
    assert workers == {"rollout/0": 2, "rollout/1": 2, "rollout/2": 2}


def test_steps_are_spread_over_the_run_in_order():
    assert [fault.step for fault in drawn(10, steps=10)] == list(range(1, 11))
    assert [fault.step for fault in drawn(6, steps=3)] == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("seed", range(5))
def test_every_drawn_fault_is_valid_in_a_plan(seed):
    faults = drawn(100, f"faults.seed={seed}")
    assert len(faults) == 100
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
