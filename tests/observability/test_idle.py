"""Idle shares of roles, by hand."""

import pytest

from hybridflow.observability import IdleTime, TraceEvent


def call(worker, start, end, kind="call"):
    return TraceEvent(kind, f"Worker.{worker}", worker, "", float(start), float(end))


@pytest.fixture
def idle():
    return IdleTime({"actor_rollout": "learn", "critic": "learn", "rollout": "generate"})


def test_roles_of_a_pool_share_the_calls_of_its_processes(idle):
    idle.add([call("critic/0", 4, 6), call("actor_rollout/0", 0, 3), call("actor_rollout/1", 0, 2)])
    idle.add([call("actor_rollout/1", 2, 4)])
    share = 1 / (6 + 4)  # process 0 is idle from 3 to 4, process 1 never
    assert idle.take() == {"perf/actor_rollout_idle_share": share, "perf/critic_idle_share": share}


def test_a_call_beyond_the_step_counts_in_the_step_in_which_it_ends(idle):
    idle.add([call("rollout/0", 0, 2)])
    assert idle.take() == {"perf/rollout_idle_share": 0}
    idle.add([call("actor_rollout/0", 0, 9)])
    assert idle.take() == {"perf/actor_rollout_idle_share": 0, "perf/critic_idle_share": 0}
    idle.add([call("rollout/0", 5, 12)])
    assert idle.take() == {"perf/rollout_idle_share": 3 / 10}
    assert idle.take() == {}


def test_calls_at_the_same_time_count_once(idle):
    idle.add([call("rollout/0", 0, 4), call("rollout/0", 1, 3), call("rollout/0", 3, 5), call("rollout/0", 6, 8)])
    assert idle.take() == {"perf/rollout_idle_share": 1 / 8}


def test_transfers_and_other_groups_do_not_count(idle):
    idle.add([call("rollout/0", 0, 2), call("rollout/0", 3, 9, kind="send"), call("echo/0", 0, 9)])
    assert idle.take() == {"perf/rollout_idle_share": 0}
