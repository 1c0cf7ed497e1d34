import pytest

from hybridflow.controller import Worker
from hybridflow.controller.worker import RANKS_TAKE_TURNS
from hybridflow.errors import WorkerError


class PlainWorker(Worker):
    def __init__(self, size=0):
        self.size = size  # no super().__init__()


@pytest.fixture
def environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", RANKS_TAKE_TURNS):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_worker_outside_a_group_is_rank_0_of_1(environment):
    worker = PlainWorker(3)
    assert (worker.rank, worker.world_size, worker.local_rank, worker.local_world_size) == (0, 1, 0, 1)
    assert worker.size == 3


def test_a_worker_reads_its_rank_from_the_environment(environment):
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        environment.setenv(name, value)
    worker = PlainWorker()
    environment.setenv("RANK", "0")
    assert (worker.rank, worker.world_size, worker.local_rank, worker.local_world_size) == (5, 8, 1, 4)


def test_a_worker_without_constructor_accepts_no_arguments(environment):
    class Bare(Worker):
        pass

    with pytest.raises(TypeError, match="takes no arguments"):
        Bare(1)


def test_collectives_are_available_with_one_process_per_rank(environment):
    environment.setenv("WORLD_SIZE", "8")
    PlainWorker().require_collectives("averaging gradients")


def test_collectives_raise_if_ranks_take_turns(environment):
    environment.setenv("WORLD_SIZE", "2")
    environment.setenv(RANKS_TAKE_TURNS, "1")
    with pytest.raises(WorkerError, match=r"PlainWorker .* 2 ranks \(averaging gradients\).*process_on_nodes=\[1\]"):
        PlainWorker().require_collectives("averaging gradients")
