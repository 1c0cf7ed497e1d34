"""When the ranks of a run are measured, and the shares that they get by it."""

from itertools import pairwise
from types import SimpleNamespace

import pytest

from hybridflow.config import load_config
from hybridflow.controller import Mesh, Role
from hybridflow.trainers.run.rank_speeds import FIRST_STEPS, RankSpeeds, measured_shares, part_metrics

KEYS = ("model.path=", "controller.parts=measured", "trainer.deterministic=false")
CONFIG = load_config(None, list(KEYS))
PROBE_S = 0.3


class Group:
    """A group whose ranks have the given speeds; a measurement takes PROBE_S on `clock`."""

    name, methods = "learner", ("measure_speed",)

    def __init__(self, speeds, axes=None):
        self.speeds, self.now, self.num_measured, self.recorded = speeds, 0.0, 0, []
        self.mesh = lambda: Mesh(axes or {"data": len(speeds)})
        self.shares = SimpleNamespace(
            of_ranks=None, record=lambda what, shares: self.recorded.append(shares.values), least=dict
        )

    def measure_speed(self, dtype):
        self.now += PROBE_S
        self.num_measured += 1
        return self.speeds


def measured_after(group, steps_s):
    speeds, steps = RankSpeeds(CONFIG, [[group]], lambda: group.now), []  # pyright: ignore[reportArgumentType]
    for step, seconds in enumerate(steps_s, start=1):
        group.now += seconds
        before = group.num_measured
        speeds.note_step(seconds)
        steps += [step] * (group.num_measured > before)
    return steps


def test_ranks_are_measured_at_first_and_then_for_one_percent_of_the_time():
    group = Group([1.0, 1.0])
    steps = measured_after(group, [2.0] * 200)
    assert steps[:FIRST_STEPS] == [1, 2, 3, 4]
    assert all(later - earlier in (15, 16) for earlier, later in pairwise(steps[4:]))
    assert group.num_measured * PROBE_S < 0.015 * group.now


def test_ranks_are_measured_more_often_while_steps_are_slow():
    steps = measured_after(Group([1.0, 1.0]), [2.0] * 30 + [4.0] * 8)
    assert [step for step in steps if step > 30] == [31, 33, 35, 37]


@pytest.mark.parametrize(
    ("speeds", "axes", "shares"),
    [
        ([3e9, 1e9], None, [0.75, 0.25]),
        ([3e9, 1e9, 3e9, 3e9], {"data": 2, "tensor": 2}, [0.25, 0.75]),  # the slowest rank of a replica
        ([3e9, 0.0], None, [0.5, 0.5]),  # a rank without memory for the measurement
    ],
)
def test_a_slow_rank_gets_a_smaller_share_and_the_change_is_recorded(speeds, axes, shares):
    group = Group(speeds, axes)
    measured_after(group, [2.0] * 4)
    assert group.shares.of_ranks.values == pytest.approx(shares)
    assert group.recorded == [group.shares.of_ranks.values] * (0.0 not in speeds)


@pytest.mark.parametrize(
    ("changes", "role", "num_ranks", "has_shares"),
    [
        ((), Role.ActorRollout, 2, True),
        ((), Role.Critic, 2, True),
        ((), Role.ActorRollout, 1, False),
        ((), Role.Rollout, 2, False),  # has no sharded model
        (("controller.parts=equal",), Role.ActorRollout, 2, False),
    ],
)
def test_groups_with_a_sharded_model_and_several_replicas_have_shares(changes, role, num_ranks, has_shares):
    group = Group([1.0] * num_ranks)
    speeds = measured_shares(load_config(None, [*KEYS, *changes]), {role: group})  # pyright: ignore
    assert (speeds is not None, group.shares.of_ranks is not None) == (has_shares, has_shares)


def test_groups_of_a_pool_share_the_shares_of_their_ranks():
    first, second = Group([1.0, 1.0]), Group([1.0, 1.0])
    measured_shares(CONFIG, {Role.ActorRollout: first, Role.Critic: second})  # pyright: ignore[reportArgumentType]
    assert first.shares.of_ranks is second.shares.of_ranks


def test_the_metric_of_a_stage_is_the_smallest_part_of_its_methods():
    one = SimpleNamespace(shares=SimpleNamespace(least=lambda: {"compute_log_probs": 0.5, "generate_sequences": 1.0}))
    other = SimpleNamespace(shares=SimpleNamespace(least=lambda: {"generate_sequences": 0.8}))
    metrics = part_metrics({Role.ActorRollout: one, Role.Rollout: other})  # pyright: ignore[reportArgumentType]
    assert metrics == {"parts/old_log_probs": 0.5, "parts/gen": 0.8}
