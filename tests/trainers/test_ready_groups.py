"""Batches of the groups that finish next (issue 43 removes them): calls of each engine, their bias, any order."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.config import load_config
from hybridflow.controller import ClassWithInitArgs, ResourcePool, WorkerGroup
from hybridflow.controller.placeholder import PlaceholderBackend, synthetic_batch
from hybridflow.data import BatchLoader
from hybridflow.protocol import DataProto
from hybridflow.rollout import Completion
from hybridflow.trainers.ahead import Ahead
from hybridflow.trainers.in_flight import Running
from hybridflow.trainers.length_bias import LengthBias
from hybridflow.trainers.ready_groups import ReadyGroups
from hybridflow.trainers.stages import with_group_ids
from hybridflow.workers import InFlightRolloutWorker
from hybridflow.workers.generating import DATASET_COLUMNS
from hybridflow.workers.schedule import Schedule
from hybridflow.workers.turn import Turn

pytestmark = pytest.mark.exhaustive
GROUP_SIZE = 2


def config_of(batch_size, lag=2):
    """Return a configuration with order "ready"."""
    return load_config(
        None,
        [
            *("rollout.order=ready", "rollout.on_new_weights=retract", "trainer.deterministic=false"),
            *("algorithm.rollout_weights=token", "controller.backend=ray", "placement.roles.rollout=generate"),
            *("placement.pools={learn=[1],generate=[1]}", f"rollout.group_size={GROUP_SIZE}", f"trainer.lag={lag}"),
            f"data.train_batch_size={batch_size}",
        ],
    )


@pytest.mark.parametrize(
    ("num_prompts", "num_engines", "sizes"), [(6, 1, [6]), (6, 2, [3, 3]), (7, 3, [3, 2, 2]), (2, 3, [1, 1])]
)
def test_each_engine_gives_a_batch_as_many_groups_as_it_began(num_prompts, num_engines, sizes):
    backend = PlaceholderBackend()
    group = WorkerGroup(
        ResourcePool([num_engines]),
        ClassWithInitArgs(InFlightRolloutWorker, config=config_of(num_prompts)),
        backend,
        meshes={"rollout": {"data": num_engines, "tensor": 1}},
    )
    prompts = with_group_ids(synthetic_batch(DATASET_COLUMNS, num_prompts))
    prompts.meta_info = {"noise_key": [0, 0, 5]}
    finish = ReadyGroups(group).begin(prompts)
    calls = [(event.worker, event.method) for event in backend.trace.take() if event.kind == "call"]
    workers = [f"InFlightRolloutWorker/{rank}" for rank in range(len(sizes))]
    assert calls == [(worker, "begin_sequences") for worker in workers]
    (part,) = finish()
    calls = [(event.worker, event.method) for event in backend.trace.take() if event.kind == "call"]
    assert calls == [(worker, "next_ready_sequences") for worker in workers]
    assert [len(rows) for rows in (handle.get() for handle in part.handles())] == [GROUP_SIZE * n for n in sizes]
    assert part.meta_info["noise_key"] == [0, 0, 5]


class Prompts:
    """A dataset whose prompts are their row numbers."""

    fingerprint, numbers = "prompts", None

    def __init__(self, num_rows):
        self._num_rows = num_rows

    def __len__(self):
        return self._num_rows

    def collate(self, indices):
        ids = torch.tensor(indices)[:, None]
        texts = {name: np.array([str(i) for i in indices], dtype=object) for name in DATASET_COLUMNS[2:]}
        return DataProto.from_dict({"prompts": ids, "prompt_mask": torch.ones_like(ids, dtype=torch.bool)}, texts)


class ScriptedEngine:
    """An engine that finishes a random one of its sequences with each step, after 1 to 5 tokens."""

    def __init__(self, seed):
        self.version, self._random = 0, np.random.default_rng(seed)
        self._running, self._finished = [], []

    def submit(self, request):
        self._running += [(request.request_id, index, list(request.prompt_ids)) for index in range(request.group_size)]

    def step(self):
        if self._running:
            request_id, index, ids = self._running.pop(self._random.integers(len(self._running)))
            tokens = ids * int(self._random.integers(1, 6))
            ones = [0.0] * len(tokens), [self.version] * len(tokens)
            self._finished.append(Completion(request_id, index, tokens, *ones))

    def finished(self):
        finished, self._finished = self._finished, []
        return finished

    def has_unfinished(self):
        return bool(self._running)


class ScriptedWorker(InFlightRolloutWorker):
    """A worker whose engine is scripted."""

    def __init__(self, config, seed):
        self.config, self.rollout, self.stop_ids = config, ScriptedEngine([seed, self.rank]), ()
        self.tokenizer = SimpleNamespace(pad_token_id=0, batch_decode=lambda ids, **_: [str(row) for row in ids])
        self._turn, self._is_loading = Turn(), False
        self._schedule = Schedule(self.rank, self._begun.step, self.rollout.has_unfinished)
        WORKERS.append(self)


WORKERS: list[ScriptedWorker] = []
"""The workers of the present process of a run."""


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 99), st.data())
def test_any_order_of_finishes_uses_each_group_once(lag, batch_size, num_engines, seed, data):
    WORKERS.clear()
    config, total_steps = config_of(batch_size, lag), 6
    group = WorkerGroup(
        ResourcePool([num_engines]),
        ClassWithInitArgs(ScriptedWorker, config=config, seed=seed),
        meshes={"rollout": {"data": num_engines, "tensor": 1}},
    )
    loader, ready, trained = BatchLoader(Prompts(3 * batch_size), batch_size, seed=3), ReadyGroups(group), []

    def begin(prompts, step):
        prompts = with_group_ids(prompts)
        prompts.meta_info["noise_key"] = [0, 0, step]
        return Running(step, ready.begin(prompts))

    sampling = SimpleNamespace(begin=begin, score=lambda begun: begun.parts)
    ahead = Ahead(sampling, lag, total_steps)  # pyright: ignore[reportArgumentType]
    for step in range(total_steps):
        (part,) = ahead(loader.next_batch, step)
        batch = part.get()
        ids = batch.batch["group_ids"].view(-1, GROUP_SIZE)
        assert (ids == ids[:, :1]).all()
        prompts = batch.batch["prompts"][:, -1].tolist()
        assert batch.batch["responses"][:, 0].tolist() == prompts  # a group has its own prompt and responses
        trained += zip(ids[:, 0].tolist(), prompts[::GROUP_SIZE], strict=True)
        for _ in range(data.draw(st.integers(0, 12))):
            WORKERS[data.draw(st.integers(0, num_engines - 1))]._begun.step()
    whole = BatchLoader(Prompts(3 * batch_size), batch_size, seed=3)
    prompts = [i for _ in range(total_steps) for i in whole.next_batch().batch["prompts"][:, 0].tolist()]
    assert sorted(trained) == list(enumerate(prompts))  # each prompt of each step once


def test_batches_trained_on_are_compared_with_those_that_began():
    def trained(*groups):
        ids = torch.tensor([group for group, _ in groups]).repeat_interleave(2)
        lengths = torch.tensor([length for _, of_group in groups for length in of_group])
        return DataProto.from_dict({"group_ids": ids, "response_mask": torch.arange(20) < lengths[:, None]})

    # Batches 0, 1 and 2 begin with the groups 0 and 1, 2 and 3, 4 and 5; group 1 is long.
    bias, restored = LengthBias(config_of(2, lag=1)), LengthBias(config_of(2, lag=1))
    assert bias.note(trained((0, (2, 4)), (2, (3, 3))), 0) == {"ready/late_share": 0.0}
    restored.load_state_dict(bias.state_dict())
    for each in (bias, restored):
        assert each.note(trained((3, (5, 5)), (4, (1, 3))), 1) == {"ready/late_share": 0.0}
        assert each.note(trained((5, (6, 6)), (1, (20, 12))), 2) == {
            "ready/late_share": 0.5,
            "ready/compared_batches": 1,
            "ready/length_trained": 12 / 4,
            "ready/length_begun": 38 / 4,
            "ready/tokens_behind": 26,
        }
