"""Runs with batches begun, in any order of steps, saves, crashes, stops and resumes, use each prompt once."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hybridflow.checkpoint import CheckpointStore
from hybridflow.data import BatchLoader
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.trainers.run.training_state import TrainingSaver, restore_training
from hybridflow.trainers.sampling.ahead import Ahead, describe_pending, save_pending
from hybridflow.trainers.sampling.generation import Begun
from hybridflow.trainers.sampling.sampled import NextPrompts, joined

BATCH_SIZE, GROUP_SIZE = 2, 3


class Prompts:
    """A dataset whose prompts are their row numbers."""

    fingerprint, numbers = "prompts", None

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    def __len__(self) -> int:
        return self._num_rows

    def collate(self, indices: Sequence[int]) -> DataProto:
        return DataProto.from_dict({"prompts": torch.tensor(indices)})


class RecordingSampling:
    """A sampling whose rows are `GROUP_SIZE` times the prompt, the version of the weights and the step."""

    def __init__(self, *, is_greedy: bool) -> None:
        self.version, self._is_greedy, self.metrics = 0, is_greedy, {}

    def begin(self, prompts: DataProto, step: int) -> Begun:
        rows = prompts.repeat(GROUP_SIZE, interleave=True)
        rows = rows.union(self._columns(len(rows), step))
        greedy = DataProtoFuture.of(prompts.union(self._columns(len(prompts), step))) if self._is_greedy else None
        half = DataProtoFuture.of(rows).slice(0, GROUP_SIZE), DataProtoFuture.of(rows).slice(GROUP_SIZE)
        return Begun(step, lambda: half if len(rows) > GROUP_SIZE else half[:1], greedy)

    def _columns(self, num_rows: int, step: int) -> DataProto:
        return DataProto.from_dict(
            {"versions": torch.full((num_rows,), self.version), "steps": torch.full((num_rows,), step)}
        )

    def finish(self, begun: Begun, next_prompts: NextPrompts) -> tuple[DataProtoFuture, ...]:
        assert (begun.greedy is not None) == self._is_greedy
        return begun.parts


class Runs(RuleBasedStateMachine):
    """The processes of one run, one after another, with real checkpoints on disk.

    `trained`: the batches that were trained on in the surviving history, each as (step, versions, prompts).
    `admitted[n]`: the first step of the process whose `total_steps` was the first above n, in the surviving history.
    """

    @initialize(
        lag=st.integers(1, 5),
        total_steps=st.integers(1, 6),
        num_rows=st.integers(BATCH_SIZE, 9),
        in_background=st.booleans(),
        is_greedy=st.booleans(),
    )
    def begin(self, lag: int, total_steps: int, num_rows: int, in_background: bool, is_greedy: bool) -> None:
        self.lag, self.num_rows, self.in_background, self.is_greedy = lag, num_rows, in_background, is_greedy
        self.folder = tempfile.TemporaryDirectory()
        self.trained, self.admitted, self.step = [], [0] * total_steps, 0
        self.saved = self.saving = (0, list(self.admitted))
        self.is_alive = False
        self.start()

    def start(self) -> None:
        """Start a process: from the newest checkpoint, or from the initial weights."""
        run = SimpleNamespace(store=CheckpointStore(Path(self.folder.name) / "checkpoints"), identity={})
        self.loader = BatchLoader(Prompts(self.num_rows), BATCH_SIZE, seed=3)
        self.sampling = RecordingSampling(is_greedy=self.is_greedy)
        self.ahead = Ahead(self.sampling, self.lag, len(self.admitted))  # pyright: ignore[reportArgumentType]
        self.saver = TrainingSaver(run.store, run.identity, [], self.loader, in_background=self.in_background)  # pyright: ignore
        self.step, self.is_alive = 0, True
        if checkpoint := run.store.latest():
            state = restore_training(checkpoint, [], self.loader)
            self.step = state["global_step"]
            self.ahead.restore(checkpoint, state["pending"])

    @precondition(lambda self: not self.is_alive)
    @rule(more_steps=st.integers(0, 3))
    def resume(self, more_steps: int) -> None:
        step, admitted = self.saved
        self.admitted = admitted + [step] * more_steps
        self.start()
        assert self.step == step

    @precondition(lambda self: self.is_alive and self.step < len(self.admitted))
    @rule()
    def train(self) -> None:
        self.sampling.version = self.step
        rows = joined(list(self.ahead(self.loader.next_batch, self.step))).get().batch
        assert rows["steps"].unique().tolist() == [self.step]
        prompts = rows["prompts"].view(-1, GROUP_SIZE)
        assert (prompts == prompts[:, :1]).all()
        self.trained.append((self.step, rows["versions"].unique().tolist(), prompts[:, 0].tolist()))
        self.step += 1

    @precondition(lambda self: self.is_alive)
    @rule()
    def save(self) -> None:
        self.finish_save()
        pending = self.ahead.pending()
        self.saver.save(
            self.step, lambda directory: save_pending(pending, directory), pending=describe_pending(pending)
        )
        self.saving = (self.step, list(self.admitted))
        if not self.in_background:
            self.saved = self.saving

    @precondition(lambda self: self.is_alive)
    @rule()
    def finish_save(self) -> None:
        self.saver.finish()
        self.saved = self.saving

    @precondition(lambda self: self.is_alive)
    @rule()
    def crash(self) -> None:
        """Lose everything since the last complete checkpoint."""
        del self.loader, self.sampling, self.ahead, self.saver
        self.is_alive, self.saving = False, self.saved
        del self.trained[self.saved[0] :]

    @invariant()
    def each_prompt_is_used_once_with_weights_of_the_right_step(self) -> None:
        whole = BatchLoader(Prompts(self.num_rows), BATCH_SIZE, seed=3)
        assert self.trained == [
            (n, [max(n - self.lag, self.admitted[n])], whole.next_batch().batch["prompts"].tolist())
            for n in range(len(self.trained))
        ]

    def teardown(self) -> None:
        if not self.is_alive:
            self.resume(more_steps=0)
        while self.step < len(self.admitted):
            self.train()
        assert len(self.trained) == len(self.admitted)
        self.each_prompt_is_used_once_with_weights_of_the_right_step()
        self.folder.cleanup()


@pytest.mark.parametrize(("num_runs", "num_rules"), [(12, 20), pytest.param(400, 50, marks=pytest.mark.exhaustive)])
def test_any_interleaving_of_steps_saves_and_crashes_uses_each_prompt_once(num_runs, num_rules):
    run_state_machine_as_test(
        Runs,
        settings=settings(
            max_examples=num_runs, stateful_step_count=num_rules, deadline=None, database=None, derandomize=True
        ),
    )
