"""Values of processes, pools and profiles that another value makes wrong."""

import pytest

RAY = "controller.backend=ray"
LOOSE = "trainer.deterministic=false"
POOLS = "controller.backend=ray placement.pools={a=[1],b=[1,2]} placement.roles.rollout=b"
CONTRADICTIONS = [
    ("controller.address=x", "controller.address is set, but controller.backend='local' has one process"),
    ("placement.pools={a=[1]}", "placement.pools is set, but controller.backend='local' has one process"),
    (f"{RAY} {LOOSE} placement.min_processes={{other=1}}", "other=1 is of no defined pool; defined pools: main"),
    (
        f"{RAY} {LOOSE} placement.min_processes={{main=3}} controller.num_workers=2",
        "placement.min_processes.main=3 is more than the 2 processes of the pool",
    ),
    (f"{LOOSE} placement.min_processes={{main=1}}", "placement.min_processes.main=1 needs controller.backend = 'ray'"),
    (
        f"{RAY} {LOOSE} placement.min_processes={{main=1}} recovery.max_restarts=0",
        "placement.min_processes.main=1 needs recovery.max_restarts of 1 or more",
    ),
    (
        f"{RAY} placement.pools={{main=[1],small=[1]}} placement.roles.critic=small",
        "placement.pools.small has no role of this run; place one of actor_rollout, rollout, reward on it in",
    ),
    (f"{RAY} controller.num_workers=2 controller.gpus_per_worker=0.5", "of one pool on a GPU, but controller.num_w"),
    (f"{POOLS} controller.gpus_per_worker=0.5", "several ranks of one pool on a GPU, but placement.pools.b="),
    (f"{RAY} placement.pools={{a=[2]}} placement.roles.rollout=a", "placement.roles.rollout='a' is the actor's pool,"),
]


@pytest.mark.parametrize(("overrides", "problem"), CONTRADICTIONS)
def test_a_contradiction_of_a_run_shows_both_values_and_the_fix(only_problem, overrides, problem):
    assert problem in only_problem(overrides)
