"""Introduces the worker objects of one process to each other."""

from collections.abc import Mapping
from weakref import WeakValueDictionary

from hybridflow.controller.worker import Worker


def introduce(instances: Mapping[str, object]) -> None:
    """Set `colocated` of each Worker to all Workers by the names of their groups; one that is shut down leaves it."""
    workers = WeakValueDictionary({name: each for name, each in instances.items() if isinstance(each, Worker)})
    for worker in workers.values():
        worker.colocated = workers
