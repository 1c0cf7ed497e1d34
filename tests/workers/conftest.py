"""Worker groups of one or several ranks on a tiny model, and the batches that they learn from."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from hybridflow.config import Config, load_config
from hybridflow.controller import ClassWithInitArgs, ResourcePool, Worker, WorkerGroup
from hybridflow.protocol import DataProto


@pytest.fixture
def configure(tiny_model) -> Iterator[Callable[..., Config]]:
    """Yield `configure("key=value", ...)`, a configuration of the tiny model; restore process settings at the end."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()

    def build(*overrides: str) -> Config:
        defaults = [f"model.path={tiny_model()}", "controller.threads=1", "data.max_response_length=6"]
        return load_config(None, [*defaults, "memory.max_tokens_per_micro_batch=1024", *overrides])

    yield build
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture
def group(configure) -> Callable[..., WorkerGroup]:
    """Return `group(ActorRolloutWorker, "rollout.group_size=2", num_workers=3)`."""

    def build(cls: type[Worker], *overrides: str, num_workers: int = 1, **arguments: int) -> WorkerGroup:
        return WorkerGroup(
            ResourcePool([num_workers]),
            ClassWithInitArgs(cls, config=configure(*overrides), **arguments),
            meshes={"rollout": {"data": num_workers, "tensor": 1}},
        )

    return build


@pytest.fixture
def with_mini_batches() -> Callable[..., object]:
    """Return a function that adds the row ids of each optimizer step, and the KL coefficient, to a batch."""

    def build(batch, *steps: Sequence[int], kl_coef: float = 0.0):
        batch = batch.select()
        batch.meta_info |= {"mini_batches": [list(step) for step in steps], "kl_coef": kl_coef}
        return batch

    return build


@pytest.fixture
def learnable(rollout_rows) -> Callable[..., DataProto]:
    """Return a function that builds four rows with the columns of an on-policy update, and further ones of zeros."""

    def build(advantages=(1.0, -1.0, 0.5, -0.5), more=()):
        rows = rollout_rows([2, 3, 1, 2], [3, 1, 4, 2])
        zeros = torch.zeros(rows.batch["response_mask"].shape)
        columns = dict.fromkeys(("rollout_log_probs", *more), zeros)
        return rows.union(DataProto.from_dict({**columns, "advantages": torch.tensor(advantages)[:, None]}))

    return build
