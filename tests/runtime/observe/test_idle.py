"""Idle shares of roles, by hand."""

from hybridflow.runtime.observe import TraceEvent, idle_shares

ROLES = {"actor_rollout": ("learn", 2), "critic": ("learn", 2), "rollout": ("generate", 1)}


def call(worker, start, end, kind="call"):
    return TraceEvent(kind, f"Worker.{worker}", worker, "", float(start), float(end))


def shares(events, running=(), start=0.0, end=10.0):
    return [idle_shares(events, running, ROLES, start, end)[f"perf/{role}_idle_share"] for role in ROLES]


def test_roles_of_a_pool_share_its_processes():
    events = [call("critic/0", 4, 6), call("actor_rollout/0", 0, 3), call("actor_rollout/1", 0, 5)]
    assert shares(events) == [1 - (3 + 2 + 5) / 20, 1 - (3 + 2 + 5) / 20, 1]


def test_a_call_counts_in_each_step_in_which_it_runs():
    assert shares([], running=[("rollout/0", 4.0)]) == [1, 1, 0.4]
    assert shares([call("rollout/0", 4, 15)], start=10.0, end=20.0) == [1, 1, 0.5]
    assert shares([call("rollout/0", 4, 9)], start=10.0, end=20.0) == [1, 1, 1]  # of the validation before the step


def test_calls_at_the_same_time_count_once():
    events = [call("rollout/0", 0, 4), call("rollout/0", 1, 3), call("rollout/0", 3, 5)]
    assert shares(events, running=[("rollout/0", 4.5)]) == [1, 1, 0]


def test_transfers_and_groups_without_a_role_do_not_count():
    events = [call("rollout/0", 0, 2), call("rollout/0", 3, 9, kind="send"), call("echo/0", 0, 9)]
    assert shares(events, running=[("echo/0", 0.0)]) == [1, 1, 0.8]
