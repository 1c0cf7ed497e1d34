"""When the ranks of a run are measured, the shares that they get by it, and which ones are named as slow."""

import logging
from itertools import pairwise
from types import SimpleNamespace

import pytest

from hybridflow.config import Config, load_config
from hybridflow.controller import (
    ClassWithInitArgs,
    Dispatch,
    LocalBackend,
    Mesh,
    ResourcePool,
    Role,
    Worker,
    WorkerGroup,
    register,
    spawn_colocated,
)
from hybridflow.trainers.run.rank_speeds import (
    FIRST_STEPS,
    RankSpeeds,
    SlowRanks,
    SlowRankWatch,
    find_slow_ranks,
    groups_to_measure,
    measured_shares,
    part_metrics,
    watch_slow_ranks,
)

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

    def measure_speed(self, dtype, periods):
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


ORDINARY_S = (9.0, 2.0, 2.0, 1.0, 2.0)  # the first step compiles


def after_steps(*seconds, factor=3.0):
    """Return a judge that has seen these steps, none of which was slow, and the number of the next step."""
    ranks = SlowRanks(factor)
    assert [ranks.note_step(step, duration) for step, duration in enumerate(seconds, start=1)] == [None] * len(seconds)
    return ranks, len(seconds) + 1


@pytest.mark.parametrize(
    ("before", "seconds", "times"),
    [
        *((ORDINARY_S, *each) for each in ((5.9, None), (6.0, 3.0), (9.0, 4.5))),
        (ORDINARY_S[:4], 100.0, None),  # no step is judged before five
        ([1.0] * 20 + [2.0] * 11, 6.0, 3.0),  # 9 steps of 1 s are left of the last twenty
    ],
)
def test_a_step_that_takes_the_factor_times_the_median_is_probed(before, seconds, times):
    ranks, step = after_steps(*before)
    assert ranks.note_step(step, seconds) == times


def test_steps_that_a_slow_rank_makes_long_do_not_change_the_median():
    ranks, step = after_steps(*ORDINARY_S)
    for later in range(step, step + 40):
        if ranks.note_step(later, 8.0):
            ranks.note_probe([("actor", 1)])
    assert ranks.note_step(step + 40, 8.0) == 4.0


def test_a_long_step_without_a_slow_rank_counts_as_ordinary():
    ranks, step = after_steps(2.0, 2.0, 2.0, 2.0, 2.0)
    for probe in range(5):
        assert ranks.note_step(step + 10 * probe, 8.0) == 8.0 / 2.0
        assert ranks.note_probe([]) == []
    assert ranks.note_step(step + 50, 25.0) == 25.0 / 5.0  # the median of five times 2 and five times 8


def test_a_slow_rank_is_named_once_while_it_stays_slow():
    ranks, step = after_steps(*ORDINARY_S)
    ranks.note_step(step, 8.0)
    assert ranks.note_probe([("actor", 1)]) == [("actor", 1)]
    ranks.note_step(step + 10, 8.0)
    assert ranks.note_probe([("actor", 1), ("critic", 0)]) == [("critic", 0)]


@pytest.mark.parametrize("between", [2.0, 8.0])
def test_a_rank_that_was_fast_again_is_named_again(between):
    ranks, step = after_steps(*ORDINARY_S)
    ranks.note_step(step, 8.0)
    ranks.note_probe([("actor", 1)])
    if ranks.note_step(step + 10, between):  # not for a step of ordinary duration
        ranks.note_probe([])
    ranks.note_step(step + 20, 8.0)
    assert ranks.note_probe([("actor", 1)]) == [("actor", 1)]


def test_a_repeated_step_is_not_probed_again():
    ranks, step = after_steps(*ORDINARY_S)
    assert ranks.note_step(step, 8.0)
    ranks.note_probe([])
    assert ranks.note_step(step - 1, 8.0) is None


def speeds_of(**groups):
    return {(name, rank): speed for name, speeds in groups.items() for rank, speed in enumerate(speeds)}


@pytest.mark.parametrize(
    ("speeds", "slow"),
    [
        ([10.0, 3.0], {1: 0.3}),  # of two ranks, the other one is the peer
        ([10.0, 3.4], {}),
        ([12.0, 2.0, 8.0], {1: 0.2}),  # median of 12 and 8
        ([1.0, 10.0, 2.0, 10.0], {0: 0.1, 2: 0.2}),  # two of four: the medians of their peers are 10
        ([2.0, 2.0, 2.0], {}),
        ([10.0, 0.0], {}),  # not measured
        ([10.0, 0.0, 2.0], {2: 0.2}),
        ([5.0], {}),
    ],
)
def test_ranks_far_below_the_median_of_their_peers_are_slow(speeds, slow):
    assert find_slow_ranks(speeds_of(actor=speeds), 3.0) == {("actor", rank): share for rank, share in slow.items()}


def test_ranks_of_another_group_are_not_peers():
    assert find_slow_ranks(speeds_of(actor=[100.0, 90.0], reward=[1.0, 1.0], critic=[2.0]), 3.0) == {}


class RankOfSpeed(Worker):
    """A rank with a known speed in each measurement."""

    def __init__(self, *speeds):
        self.speeds = list(speeds)

    @register(Dispatch.ONE_TO_ALL)
    def measure_speed(self, dtype):
        assert dtype == "bfloat16"
        return self.speeds.pop(0)[self.rank]


class Places:
    """The part of the Ray backend that the watch uses."""

    def place_of(self, worker):
        return f"{worker.name} on node n, pid 7"

    def hostnames(self, workers):
        return {"host"}


def group_of(name, *speeds):
    return WorkerGroup(ResourcePool([len(speeds[0])]), ClassWithInitArgs(RankOfSpeed, *speeds), name=name)


def test_a_slow_rank_is_in_the_log_the_metrics_and_the_trace_once(caplog):
    trainer = SimpleNamespace(config=Config(model={"dtype": "bfloat16"}), events=[])
    ordinary, slow = (8.0, 8.0), (8.0, 1.0)
    groups = [group_of("actor", slow, ordinary, slow, slow, slow, slow), group_of("critic", *[(4.0, 4.0)] * 6)]
    watch = SlowRankWatch(trainer, groups, Places())
    with caplog.at_level(logging.INFO):
        of_steps = [watch.note_step(step, 8.0 if step in (6, 16, 26) else 2.0) for step in range(1, 17)]
        of_steps += [watch.note_step(step, 8.0) for step in range(17, 27)]
    measured = {step: row["recovery/slow_ranks"] for step, row in enumerate(of_steps, start=1) if row}
    assert measured == {6: 0, 16: 1, 26: 1}
    (warning,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    named = "step 16 took 8.0 s, 4.0 times the median; worker actor/1 on node n, pid 7 computes at 0.12 of the speed of"
    assert warning.startswith(named)
    assert "step 6 took 8.0 s, 4.0 times the median; no rank is slow" in caplog.text
    ((kind, where, worker, node, start, end, *_),) = trainer.events
    assert (kind, where, worker, node) == ("recovery", "slow", "actor/1", "host")
    assert start <= end


def test_a_run_in_one_process_is_not_watched():
    trainer = SimpleNamespace(config=Config(), events=[])
    group = group_of("actor", (1.0,))
    assert watch_slow_ranks(trainer, {Role.Actor: group}, group.backend) is None


def test_each_process_that_can_be_compared_is_measured_once():
    backend, ranks = LocalBackend(), ClassWithInitArgs(RankOfSpeed, (1.0, 1.0))
    roles = {"reward": ClassWithInitArgs(Worker), "reference": ranks, "actor_rollout": ranks}
    shared = spawn_colocated(ResourcePool([2]), roles, backend)
    groups = {Role(name): group for name, group in shared.items()}
    groups |= {Role.Rollout: group_of("rollout", (1.0, 1.0)), Role.Critic: group_of("critic", (1.0,))}
    assert [group.name for group in groups_to_measure(Config(), groups)] == ["reference", "rollout"]
