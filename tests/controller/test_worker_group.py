import gc
import weakref

import pytest

from hybridflow.controller import ClassWithInitArgs, Dispatch, ResourcePool, Worker, WorkerGroup, register
from hybridflow.controller.worker_group import columns_of_methods
from hybridflow.errors import DispatchError, WorkerError


class Counter(Worker):
    def __init__(self, config=None):
        self.config = config
        self.calls = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def count(self, step: int = 1) -> int:
        """Add `step` to the number of calls."""
        self.calls += step
        return self.calls

    @register()
    def tell(self, *args, **kwargs):
        return self.rank, args, kwargs

    def reset(self):
        self.calls = 0

    limit = 10


class Critic(Worker):
    def __init__(self, config=None):
        self.config = config

    @register(reads=lambda config: ("values", "returns") if config else ("values",), writes=(), rows="one")
    def update(self, batch):
        return None


class Broken(Critic):
    def __init__(self, config):
        raise RuntimeError("started")


def make_group(process_on_nodes=(2,), **kwargs):
    return WorkerGroup(ResourcePool(list(process_on_nodes)), ClassWithInitArgs(Counter), **kwargs)


def test_a_group_has_a_worker_for_each_rank():
    group = make_group([2, 1], name="counter")
    assert group.world_size == 3
    assert group.worker_names == ["counter/0", "counter/1", "counter/2"]
    assert [worker.name for worker in group.workers] == group.worker_names
    assert group.is_alive()
    assert repr(group) == "WorkerGroup('counter', world_size=3)"
    assert make_group().name == "Counter"


def test_registered_methods_are_methods_of_the_group():
    group = make_group()
    assert group.count() == [1, 1]
    assert group.count(step=2) == [3, 3]
    assert group.count.__doc__ == "Add `step` to the number of calls."
    assert sorted(group.methods) == ["count", "tell"]
    assert "count" in dir(group)
    assert hasattr(group, "count")


def test_an_unknown_method_is_an_attribute_error():
    group = make_group()
    assert not hasattr(group, "calls")
    with pytest.raises(AttributeError, match="has no method 'cuont'; Counter registers count, tell"):
        group.cuont()
    with pytest.raises(AttributeError):
        _ = group.limit


def test_methods_are_executed_on_all_ranks_or_rank_zero():
    group = make_group()
    assert group.execute_all_sync("tell", [10, 20], "all", key=(1, 2)) == [
        (0, (10, "all"), {"key": 1}),
        (1, (20, "all"), {"key": 2}),
    ]
    assert group.execute_rank_zero_sync("tell", [10, 20], key=(1, 2)) == (0, ([10, 20],), {"key": (1, 2)})
    assert [handle.get() for handle in group.execute_all("count")] == [1, 1]
    assert [handle.get() for handle in group.execute_all_async("count")] == [2, 2]
    assert group.execute_rank_zero("count").get() == 3
    assert group.execute_rank_zero_async("count").get() == 4
    with pytest.raises(DispatchError, match="a list of 3 elements cannot be split over 2 ranks"):
        group.execute_all_sync("tell", [1, 2, 3])
    for attempt in (lambda: group.reset(), lambda: group.execute_all_sync("reset")):
        with pytest.raises(DispatchError, match=r"Counter\.reset cannot be called on a worker group: add @register"):
            attempt()
    with pytest.raises(AttributeError, match="has no method 'nothing'"):
        group.execute_rank_zero_async("nothing")


def test_calls_on_a_closed_group_raise():
    with make_group() as group:
        count = group.count
        assert group.count() == [1, 1]
    assert not group.is_alive()
    for attempt in (group.count, count, count.remote, lambda: group.execute_all_sync("count")):
        with pytest.raises(DispatchError, match=r"Counter\.count was called on .*, which was shut down"):
            attempt()
    group.shutdown()


def test_a_group_with_a_stopped_worker_is_not_alive():
    group = make_group()
    group.backend.shutdown(group.workers[1:])
    assert not group.is_alive()
    with pytest.raises(WorkerError, match="Counter/1 was shut down"):
        group.count()


def test_an_unreferenced_group_is_freed_with_its_workers():
    group = make_group()
    group.count()
    gone = weakref.ref(group)
    gc.disable()
    try:
        del group
        assert gone() is None
    finally:
        gc.enable()


def test_replicas_are_groups_of_the_workers_that_get_the_same_part():
    group = make_group([4], meshes={"rollout": {"data": 2, "tensor": 2}}, name="counter")
    first, second = group.replicas("rollout")
    assert (first.worker_names, second.worker_names) == (["counter/0", "counter/1"], ["counter/2", "counter/3"])
    assert second.mesh("rollout").axes == {"data": 1, "tensor": 2}
    second.count()
    assert group.count() == [1, 1, 2, 2]
    assert [replica.world_size for replica in group.replicas()] == [1, 1, 1, 1]
    with pytest.raises(DispatchError, match="has no mesh 'train'"):
        group.replicas("train")


def test_a_mesh_of_another_size_than_the_pool_is_an_error_before_workers_start():
    with pytest.raises(DispatchError, match=r"has 6 ranks, but .* has 4"):
        WorkerGroup(ResourcePool([4]), ClassWithInitArgs(Broken, 1), meshes={"default": {"data": 3, "tensor": 2}})


def test_a_method_named_like_a_group_method_is_an_error():
    class Clash(Worker):
        @register()
        def shutdown(self): ...

    with pytest.raises(DispatchError, match=r"Clash\.shutdown cannot be bound: WorkerGroup already defines shutdown"):
        WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Clash))


def test_columns_of_methods_are_resolved_without_starting_workers():
    assert columns_of_methods(ClassWithInitArgs(Broken, config=True))["update"].reads == ("values", "returns")
    declared = columns_of_methods(ClassWithInitArgs(Broken, config=False))["update"]
    assert (declared.where, declared.reads, declared.writes) == ("Broken.update", ("values",), ())
    assert make_group().count.columns.reads is None


def test_a_missing_configuration_raises_before_workers_start():
    with pytest.raises(DispatchError, match=r"Critic\.update declares reads as a function of the configuration"):
        WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Critic))
