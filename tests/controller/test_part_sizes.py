"""Part sizes by measured speed: the arithmetic, and groups with ranks of different speed, on every backend."""

import sys
from random import Random

import pytest
import torch

from hybridflow.controller import (
    ClassWithInitArgs,
    Dispatch,
    LocalBackend,
    ResourcePool,
    Worker,
    WorkerGroup,
    register,
    register_dispatch_mode,
)
from hybridflow.controller.part_sizes import MAX_WAITING, GroupShares, MeasuredParts, SteadyShares, sizes_of_shares
from hybridflow.errors import DispatchError
from hybridflow.protocol import DataProto
from hybridflow.protocol.handle import Duration
from hybridflow.runtime.observe import Trace


def shares_after(*measurements, num_parts=2):
    shares = SteadyShares(num_parts)
    for seconds in measurements:
        shares.note(seconds)
    return shares


def simulate(speeds_of, num_calls, *, num_units=64, noise=0.0, overhead=0.0, seed=0, adapts=True):
    """Return the numbers of the calls after which shares changed, and the time of each call by that of a perfect split.

    `speeds_of(call)`: units per second of each part. `overhead`: units that each part costs besides.
    """
    random, shares = Random(seed), SteadyShares(len(speeds_of(0)))
    changes, times = [], []
    for call in range(num_calls):
        speeds, sizes = speeds_of(call), sizes_of_shares(shares.values, num_units)
        seconds = [
            (size + overhead) / speed * random.uniform(1 - noise, 1 + noise)
            for size, speed in zip(sizes, speeds, strict=True)
        ]
        times.append(max(seconds) / (num_units / sum(speeds)))
        of_units = [second / size for size, second in zip(sizes, seconds, strict=True)]
        if adapts and shares.note(of_units, max(seconds) / num_units):
            changes.append(call)
    return changes, times


def test_parts_are_as_equal_as_possible_before_a_measurement():
    assert sizes_of_shares(SteadyShares(3).values, 6) == [2, 2, 2]
    assert sizes_of_shares(SteadyShares(3).values, 8) == [3, 3, 2]


def test_shares_are_proportional_to_speed_after_a_few_measurements():
    assert shares_after(*[[1.0, 3.0]] * 3).values == [0.5, 0.5]  # the first one does not count
    assert shares_after(*[[1.0, 3.0]] * 4).values == pytest.approx([0.75, 0.25])
    assert shares_after(*[[1.0, 2.0, 3.0]] * 4, num_parts=3).values == pytest.approx([6 / 11, 3 / 11, 2 / 11])


def test_a_share_changes_at_most_by_a_factor_of_two_at_once():
    before = 1 / 3
    changed = shares_after(*[[1.0, 1.0, 100.0]] * 4, num_parts=3).values
    assert changed[2] == pytest.approx((before / 2) / sum([0.4975, 0.4975, before / 2]), rel=1e-2)
    assert shares_after(*[[1.0, 1.0, 100.0]] * 30, num_parts=3).values[2] < 0.01


def test_a_gain_within_the_noise_changes_nothing():
    assert shares_after(*[[1.0, 1.04]] * 50).values == [0.5, 0.5]
    assert shares_after(*[[1.0, 1.5], [1.5, 1.0]] * 50).values == [0.5, 0.5]


def test_noisy_parts_of_equal_speed_lose_little():
    for seed in range(5):
        changes, times = simulate(lambda call: [1.0, 1.0], 300, noise=0.2, seed=seed)
        _, with_equal_parts = simulate(lambda call: [1.0, 1.0], 300, noise=0.2, seed=seed, adapts=False)
        assert len(changes) <= 10
        assert sum(times) / sum(with_equal_parts) < 1.02


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.2])
def test_a_slow_part_is_within_a_tenth_of_a_perfect_split_after_ten_calls(noise):
    _, times = simulate(lambda call: [1.0, 1 / 3], 60, noise=noise)
    assert times[0] > 1.5
    assert sum(times[10:]) / 50 < (1 + noise / 2) * 1.1


def test_a_part_that_becomes_slow_and_recovers_is_followed():
    changes, times = simulate(lambda call: [1.0, 1 / 3 if 20 < call < 60 else 1.0], 100, noise=0.05)
    assert 21 < min(changes) < 30
    assert sum(times[35:60]) / 25 < 1.15
    assert sum(times[75:]) / 25 < 1.15


def test_a_part_that_is_slow_at_every_second_call_does_not_oscillate():
    changes, _ = simulate(lambda call: [1.0, 1 / 3 if call % 2 else 1.0], 200)
    assert len(changes) <= 2


def test_a_change_that_does_not_help_is_taken_back():
    changes, times = simulate(lambda call: [1.0, 0.5], 50, num_units=8, overhead=1000.0)
    assert len(changes) == 2
    assert times[-1] == times[0]


def test_the_trace_says_why_a_share_changed():
    trace, shares = Trace(), SteadyShares(2)
    of_group = GroupShares("uneven", {"double": "measured"}, trace)
    for slowest in (1.0, 1.0, 1.0, 1.0, 3.0, 3.0, 3.0):  # the call takes three times as long with the new shares
        if shares.note([1.0, 3.0], slowest):
            of_group.record("double", shares)
    notes = [event.note for event in trace.take()]
    assert notes == [
        "75.0% of the rows, since a row takes 0.50 times the mean of the parts",
        "25.0% of the rows, since a row takes 1.50 times the mean of the parts",
        *["50.0% of the rows, since the last change did not help"] * 2,
    ]


def test_no_part_is_empty_and_sizes_add_up():
    for num_units in range(3, 40):
        sizes = sizes_of_shares([0.9985, 0.0005, 0.001], num_units)
        assert min(sizes) >= 1
        assert sum(sizes) == num_units


def lasting(seconds):
    duration = Duration()
    duration.seconds = seconds
    return duration


def measured(sizes, *seconds):
    """Return `MeasuredParts` after calls of these sizes and durations; a tuple has the durations of a part's ranks."""
    parts = MeasuredParts(len(sizes))
    for of_call in seconds:
        durations = [
            [lasting(s) for s in (of_part if isinstance(of_part, tuple) else (of_part,))] for of_part in of_call
        ]
        parts.note(sizes, durations)
    parts.update()
    return parts


def test_the_slowest_rank_sets_the_speed_of_a_part():
    assert measured([4, 4], *[[(1.0, 3.0), (1.0, 1.0)]] * 4).shares.values == pytest.approx([0.25, 0.75])


def test_only_the_newest_unfinished_calls_are_kept():
    parts = MeasuredParts(1)
    for _ in range(100):
        parts.note([1], [[Duration()]])
    assert len(parts._calls) == MAX_WAITING
    assert not parts.update()
    assert len(parts._calls) == MAX_WAITING


def test_a_call_of_zero_duration_is_ignored():
    assert measured([4, 4], *[[0.0, 3.0]] * 9).shares.values == [0.5, 0.5]


CLOCKS = ("hybridflow.controller.local", "hybridflow.controller.ray.worker_process", "hybridflow.runtime.observe.waits")


class Clock:
    """Stands for the module `time` where calls are measured; only the workers move it."""

    now = 0.0

    def time(self):
        return self.now

    perf_counter = time


def clock_of_this_process():
    """Return the clock by which the backends measure calls in this process; the first caller installs it."""
    modules = [sys.modules[name] for name in CLOCKS if name in sys.modules]
    clocks = [module.time for module in modules if hasattr(module.time, "now")] or [Clock()]
    for module in modules:
        module.time = clocks[0]
    return clocks[0]


@pytest.fixture(autouse=True)
def restored_time(monkeypatch):
    for module in [sys.modules[name] for name in CLOCKS if name in sys.modules]:
        monkeypatch.setattr(module, "time", module.time)


class Uneven(Worker):
    """A worker that takes five times as long per row on rank 1, on the clock of its process."""

    def __init__(self, config=None):
        self.received, self.clock = [], clock_of_this_process()

    def work(self, batch):
        self.received.append(len(batch))
        self.clock.now += len(batch) * (0.02 if self.rank == 1 else 0.004)

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("x",), writes=("y",), rows=2, parts=lambda config: config["parts"])
    def double(self, batch):
        self.work(batch)
        return DataProto.from_dict({"y": batch.batch["x"].repeat_interleave(2) * 10})

    @register(
        Dispatch.DP_COMPUTE_PROTO, reads=("x", "group_ids"), writes=("y",), keep_groups="group_ids", parts="measured"
    )
    def in_groups(self, batch):
        self.work(batch)
        return DataProto.from_dict({"y": batch.batch["group_ids"]})

    @register(Dispatch.MEGATRON_COMPUTE_PROTO, reads=("x",), writes=("y",), parts="measured")
    def on_mesh(self, batch):
        self.work(batch)
        return DataProto.from_dict({"y": batch.batch["x"]})

    @register(Dispatch.ONE_TO_ALL)
    def sizes(self):
        return self.received


def group_of(backend, parts="measured", processes=2, **options):
    return WorkerGroup(
        ResourcePool([processes]), ClassWithInitArgs(Uneven, config={"parts": parts}), backend, "uneven", **options
    )


X = DataProto.from_dict({"x": torch.arange(24)})


def test_a_slow_rank_gets_fewer_rows_and_order_is_kept(backend):
    with group_of(backend) as group:
        for _ in range(6):
            assert group.double(X).batch["y"].tolist() == [row * 10 for row in range(24) for _ in "ab"]
        fast, slow = group.sizes()
        events = [event for event in backend.trace.take() if event.kind == "parts"]
        least = group.shares.least()["double"]
        future = group.double.remote(X)
        assert len(future) == 48
        assert future.slice(30, 34).get().batch["y"].tolist() == [150, 150, 160, 160]
        again = group.double(future.select_columns("y").rename("y", "x"))
        assert again.batch["y"].tolist() == [row * 100 for row in range(24) for _ in "abcd"]
    assert (fast, slow) == ([12, 12, 12, 12, 18, 18], [12, 12, 12, 12, 6, 6])  # at most half as many at once
    assert [event.worker for event in events] == ["uneven/0", "uneven/1"]
    assert events[1].note == "23.1% of the rows, since a row takes 1.67 times the mean of the parts"
    assert least == pytest.approx(0.46, abs=0.01)


def test_parts_equal_ignores_measured_speed():
    with group_of(LocalBackend(), "equal") as group:
        for _ in range(3):
            group.double(X)
        assert group.sizes() == [[12, 12, 12], [12, 12, 12]]


def test_measured_parts_keep_groups_on_one_rank():
    batch = X.union(DataProto.from_dict({"group_ids": torch.arange(24) // 4}))
    with group_of(LocalBackend()) as group:
        for _ in range(5):
            assert group.in_groups(batch).batch["y"].tolist() == batch.batch["group_ids"].tolist()
        fast, slow = group.sizes()
    assert slow[-1] < 12
    assert all(size % 4 == 0 for size in fast + slow)


def test_the_ranks_of_a_replica_get_the_same_part():
    with group_of(LocalBackend(), processes=4, meshes={"default": {"data": 2, "tensor": 2}}) as group:
        for _ in range(5):
            assert group.on_mesh(X).batch["y"].tolist() == list(range(24))
        sizes = group.sizes()
    assert sizes[0] == sizes[1]
    assert sizes[2] == sizes[3]
    assert sizes[0][-1] < sizes[2][-1]  # rank 1 belongs to the first part


def test_a_batch_with_fewer_rows_than_ranks_is_padded():
    with group_of(LocalBackend(), processes=3) as group:
        assert group.double(X[:2]).batch["y"].tolist() == [0, 0, 10, 10]


def test_measured_parts_are_not_supported_with_custom_modes():
    mode = register_dispatch_mode("FOR_PARTS", lambda group: ((), {}), lambda group, outputs: outputs, lambda group: 2)
    with pytest.raises(DispatchError, match="FOR_PARTS, which makes its parts itself"):
        register(mode, parts="measured")


def test_a_parts_function_requires_a_configuration_and_a_valid_value():
    with pytest.raises(DispatchError, match=r"NoConfig\.double declares parts as a function"):
        WorkerGroup(ResourcePool([1]), ClassWithInitArgs(NoConfig))
    with pytest.raises(DispatchError, match=r"Uneven\.double: parts='fair'"):
        group_of(LocalBackend(), "fair")


class NoConfig(Worker):
    double = Uneven.double
