import logging
from types import SimpleNamespace

from hybridflow.config import Config
from hybridflow.controller import (
    ClassWithInitArgs,
    Dispatch,
    LocalBackend,
    ResourcePool,
    Role,
    Worker,
    WorkerGroup,
    register,
    spawn_colocated,
)
from hybridflow.trainers.slow_rank_watch import SlowRankWatch, groups_to_measure, watch_slow_ranks


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
