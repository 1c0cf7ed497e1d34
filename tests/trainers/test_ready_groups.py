"""Batches of the groups that finish next: the calls of each engine, and runs with any order of events."""

import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from hybridflow.checkpoint import CheckpointStore
from hybridflow.config import load_config
from hybridflow.controller import ClassWithInitArgs, ResourcePool, WorkerGroup
from hybridflow.controller.placeholder import PlaceholderBackend, synthetic_batch
from hybridflow.data import BatchLoader
from hybridflow.protocol import DataProto
from hybridflow.rollout import Completion
from hybridflow.trainers.ahead import Ahead, describe_pending, save_pending, wait_for
from hybridflow.trainers.in_flight import Running
from hybridflow.trainers.length_bias import LengthBias
from hybridflow.trainers.ready_groups import ReadyGroups
from hybridflow.trainers.stages import with_group_ids
from hybridflow.trainers.training_state import TrainingSaver, restore_training
from hybridflow.workers import InFlightRolloutWorker
from hybridflow.workers.generating import DATASET_COLUMNS
from hybridflow.workers.schedule import Schedule
from hybridflow.workers.turn import Turn

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


class Runs(RuleBasedStateMachine):
    """The processes of one run, one after another, with real checkpoints on disk.

    `trained`: the prompts of each batch that was trained on in the surviving history.
    """

    @initialize(
        lag=st.integers(1, 4),
        total_steps=st.integers(1, 6),
        batch_size=st.integers(1, 4),
        num_engines=st.integers(1, 3),
        in_background=st.booleans(),
        seed=st.integers(0, 99),
    )
    def begin(self, lag, total_steps, batch_size, num_engines, in_background, seed):
        self.config, self.num_engines, self.in_background, self.seed = config_of(batch_size), num_engines, False, seed
        self.in_background, self.batch_size, self.lag = in_background, batch_size, lag
        self.folder = tempfile.TemporaryDirectory()
        self.total_steps, self.trained, self.step, self.is_alive = total_steps, [], 0, False
        self.saved = self.saving = 0
        self.start()

    def start(self):
        """Start a process: from the newest checkpoint, or from the beginning."""
        WORKERS.clear()
        self.seed += 1
        group = WorkerGroup(
            ResourcePool([self.num_engines]),
            ClassWithInitArgs(ScriptedWorker, config=self.config, seed=self.seed),
            meshes={"rollout": {"data": self.num_engines, "tensor": 1}},
        )
        ready = ReadyGroups(group)
        run = SimpleNamespace(store=CheckpointStore(Path(self.folder.name) / "checkpoints"), identity={})
        self.loader = BatchLoader(Prompts(3 * self.batch_size), self.batch_size, seed=3)

        def begin(prompts, step):
            prompts = with_group_ids(prompts)
            prompts.meta_info["noise_key"] = [0, 0, step]
            return Running(step, ready.begin(prompts))

        sampling = SimpleNamespace(begin=begin, score=lambda begun: begun.parts)
        self.ahead = Ahead(sampling, self.lag, self.total_steps)  # pyright: ignore[reportArgumentType]
        self.bias = LengthBias(self.config)
        self.saver = TrainingSaver(run.store, run.identity, [], self.loader, in_background=self.in_background)  # pyright: ignore
        self.step, self.is_alive = 0, True
        if checkpoint := run.store.latest():
            state = restore_training(checkpoint, [], self.loader)
            self.step = state["global_step"]
            self.ahead.restore(checkpoint, state["pending"])
            self.bias.load_state_dict(state["length_bias"])

    @precondition(lambda self: not self.is_alive)
    @rule(more_steps=st.integers(0, 3))
    def resume(self, more_steps):
        self.total_steps += more_steps
        self.start()
        assert self.step == self.saved

    @precondition(lambda self: self.is_alive)
    @rule(num_steps=st.integers(1, 12), engine=st.integers(0, 2))
    def generate(self, num_steps, engine):
        """Let groups of one engine finish, while others lag behind."""
        for _ in range(num_steps):
            WORKERS[engine % len(WORKERS)]._begun.step()

    @precondition(lambda self: self.is_alive and self.step < self.total_steps)
    @rule()
    def train(self):
        (part,) = self.ahead(self.loader.next_batch, self.step)
        batch = part.get()
        ids, texts = batch.batch["group_ids"].view(-1, GROUP_SIZE), batch.non_tensor_batch["prompt_texts"]
        assert (ids == ids[:, :1]).all()
        assert len(ids.unique()) == self.batch_size
        tokens = batch.batch["responses"][:, 0].tolist()
        prompts = batch.batch["prompts"][:, -1].tolist()
        assert tokens == prompts == [int(text) for text in texts]  # a group has its own prompt and responses
        self.trained.append(list(zip(ids[:, 0].tolist(), prompts[::GROUP_SIZE], strict=True)))
        self.metrics = self.bias.note(batch, self.step)
        self.step += 1

    @precondition(lambda self: self.is_alive)
    @rule()
    def save(self):
        self.finish_save()
        pending = self.ahead.pending()
        wait_for(pending)
        self.saver.save(
            self.step,
            lambda directory: save_pending(pending, directory),
            pending=describe_pending(pending),
            length_bias=self.bias.state_dict(),
        )
        self.saving = self.step
        if not self.in_background:
            self.saved = self.saving

    @precondition(lambda self: self.is_alive)
    @rule()
    def finish_save(self):
        self.saver.finish()
        self.saved = self.saving

    @precondition(lambda self: self.is_alive)
    @rule()
    def crash(self):
        """Lose everything since the last complete checkpoint."""
        del self.loader, self.ahead, self.saver, self.bias
        self.is_alive, self.saving = False, self.saved
        del self.trained[self.saved :]

    @precondition(lambda self: self.is_alive)
    @rule()
    def stop(self):
        self.save()
        self.finish_save()
        self.crash()

    def teardown(self):
        if not self.is_alive:
            self.resume(more_steps=0)
        while self.step < self.total_steps:
            self.train()
        whole = BatchLoader(Prompts(3 * self.batch_size), self.batch_size, seed=3)
        prompts = [i for _ in range(self.total_steps) for i in whole.next_batch().batch["prompts"][:, 0].tolist()]
        groups = sorted(group for batch in self.trained for group in batch)
        assert groups == list(enumerate(prompts))  # each prompt of each step once
        assert not any(worker._begun._prompts for worker in WORKERS)
        self.folder.cleanup()


SETTINGS = settings(max_examples=12, stateful_step_count=20, deadline=None, database=None, derandomize=True)


def test_any_order_of_finishes_saves_and_crashes_uses_each_group_once():
    run_state_machine_as_test(Runs, settings=SETTINGS)


@pytest.mark.slow
def test_many_long_orders_of_finishes_use_each_group_once():
    run_state_machine_as_test(Runs, settings=settings(SETTINGS, max_examples=40, stateful_step_count=50))
