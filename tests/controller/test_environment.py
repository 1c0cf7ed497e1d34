"""Environment variables of a pool, and the workers that share its processes, on both backends."""

import os

import pytest

from hybridflow.config import load_config
from hybridflow.controller import (
    ClassWithInitArgs,
    Dispatch,
    LocalBackend,
    ResourcePool,
    Worker,
    move_colocated,
    register,
    spawn_colocated,
)
from hybridflow.errors import ConfigError, WorkerError

RESERVED = ("RANK", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
NAMES = ("HYBRIDFLOW_TEST_LEVEL", "RANK", "WORLD_SIZE")


class Asker(Worker):
    """Reads its environment when it is built and when it is called, and asks the other worker of its process."""

    def __init__(self) -> None:
        self.at_start = [os.environ.get(name) for name in NAMES]

    @register(Dispatch.ONE_TO_ALL)
    def variables(self) -> list[list[str | None]]:
        return [self.at_start, [os.environ.get(name) for name in NAMES]]

    @register(Dispatch.ONE_TO_ALL)
    def ask(self) -> tuple[list[str], str]:
        answerer = self.colocated["answerer"]
        assert isinstance(answerer, Answerer)
        return sorted(self.colocated), answerer.answer(f"of {self.rank}")


class Answerer(Worker):
    def answer(self, question: str) -> str:
        return f"{question}: {self.rank}"


def test_processes_of_a_pool_have_its_variables_and_find_each_other(backend):
    classes = {"asker": ClassWithInitArgs(Asker), "answerer": ClassWithInitArgs(Answerer)}
    groups = spawn_colocated(ResourcePool([2], environment={"HYBRIDFLOW_TEST_LEVEL": "3"}), classes, backend)
    assert groups["asker"].variables() == [[["3", rank, "2"]] * 2 for rank in "01"]
    assert groups["asker"].ask() == [(["answerer", "asker"], f"of {rank}: {rank}") for rank in range(2)]
    for group in groups.values():
        group.shutdown()
    assert "HYBRIDFLOW_TEST_LEVEL" not in os.environ


def test_a_worker_that_is_shut_down_is_not_found_and_not_kept():
    classes = {"asker": ClassWithInitArgs(Asker), "answerer": ClassWithInitArgs(Answerer)}
    groups = spawn_colocated(ResourcePool([1]), classes, LocalBackend())
    groups["answerer"].shutdown()
    with pytest.raises(WorkerError, match=r"KeyError: 'answerer'"):
        groups["asker"].ask()


def test_groups_that_share_processes_move_to_new_ones_together():
    classes, backend = {"asker": ClassWithInitArgs(Asker), "answerer": ClassWithInitArgs(Answerer)}, LocalBackend()
    groups = spawn_colocated(ResourcePool([1]), classes, backend)
    before = groups["asker"].workers
    for meshes in (None, {"asker": {"default": {"data": 1, "tensor": 1}}}):
        move_colocated(groups, ResourcePool([1], environment={"HYBRIDFLOW_TEST_LEVEL": "4"}), backend, meshes)
        assert groups["asker"].workers != before
        assert groups["asker"].ask() == [(["answerer", "asker"], "of 0: 0")]
        assert groups["asker"].variables()[0][0] == ["4", "0", "1"]
    assert groups["asker"].mesh().axes == {"data": 1, "tensor": 1}
    assert groups["answerer"].mesh().axes == {"data": 1}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        *(({name: "0"}, f"environment: {name} is set by the backend for each rank; leave it out") for name in RESERVED),
        ({"A=B": "1"}, "'A=B' is not the name of a variable"),
        ({"A": 1}, "A=1 is not a text"),
        *(({"A": text}, "is not a text") for text in ("\0", "\ud800")),
        ("A=1", "'A=1' is not a mapping from names of variables to texts"),
    ],
)
def test_a_variable_that_cannot_be_set_is_an_error(environment, message):
    with pytest.raises(ConfigError, match=message):
        ResourcePool([1], environment=environment)


def test_the_configuration_names_variables_of_all_workers():
    config = load_config(None, ["controller.environment={NCCL_DEBUG = 'INFO'}"])
    assert config.controller.environment == {"NCCL_DEBUG": "INFO"}
    with pytest.raises(ConfigError, match=r"controller\.environment: WORLD_SIZE is set by the backend"):
        load_config(None, ["controller.environment={WORLD_SIZE = '2'}"])
