"""What a worker process sets before a model is built."""

from hybridflow.controller import Worker
from hybridflow.workers import worker_process


def test_the_device_is_set_before_the_process_group_is_made(configure, monkeypatch):
    order = []
    for name in ("use_own_device", "join_process_group", "set_num_threads", "set_deterministic"):
        monkeypatch.setattr(worker_process, name, lambda *_, name=name: order.append(name))
    worker_process.prepare_worker_process(Worker(), configure())
    assert order[0] == "use_own_device"
    assert order[-1] == "join_process_group"
