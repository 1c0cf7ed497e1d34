import pytest

from hybridflow.controller import Worker


class PlainWorker(Worker):
    def __init__(self, size=0):
        self.size = size  # no super().__init__()


def test_a_worker_outside_a_group_is_rank_0_of_1(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    worker = PlainWorker(3)
    assert (worker.rank, worker.world_size, worker.local_rank, worker.local_world_size) == (0, 1, 0, 1)
    assert worker.size == 3


def test_a_worker_without_constructor_accepts_no_arguments():
    class Bare(Worker):
        pass

    with pytest.raises(TypeError, match="takes no arguments"):
        Bare(1)
