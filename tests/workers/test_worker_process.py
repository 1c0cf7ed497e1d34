"""What a worker process sets before a model is built, and how fast it can compute."""

import torch

from hybridflow.controller import Worker
from hybridflow.runtime import peak_flops
from hybridflow.workers import ActorWorker, worker_process


def test_the_device_is_set_before_the_process_group_is_made(configure, monkeypatch):
    order = []
    for name in ("use_own_device", "join_process_group", "set_num_threads", "set_deterministic"):
        monkeypatch.setattr(worker_process, name, lambda *_, name=name: order.append(name))
    worker_process.prepare_worker_process(Worker(), configure())
    assert order[0] == "use_own_device"
    assert order[-1] == "join_process_group"


def test_ranks_that_share_a_process_count_its_peak_once(group):
    peaks = group(ActorWorker, num_workers=3).measure_peak("float32")
    assert peaks == [peak_flops(torch.float32), 0.0, 0.0]
