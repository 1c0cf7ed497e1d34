"""Generation whose running sequences go on with new weights: batches begin and weights are loaded between two steps."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from hybridflow.config import Config, RolloutConfig, ValidationConfig
from hybridflow.controller import Dispatch, register
from hybridflow.environments.processes.closure import Closure
from hybridflow.protocol import DataProto
from hybridflow.rollout.weight_sync.base import Announcement
from hybridflow.rollout.weight_sync.probe import Probe
from hybridflow.rollout.weight_sync.receiver import RECEIVING
from hybridflow.workers.engine_schedule import EngineSchedule, read_schedule
from hybridflow.workers.generating import BEGUN_COLUMNS, TO_ENGINES, noise_key
from hybridflow.workers.rollout import RolloutWorker


class InFlightRolloutWorker(RolloutWorker):
    """A worker whose running sequences continue with new weights (`rollout.on_new_weights`).

    Batches begin, and weights are loaded, in a second thread between two steps of the engine. While weights are
    loaded, no step runs.
    """

    second_thread_methods = RECEIVING | {"begin_sequences", "take_schedule"}

    def __init__(self, config: Config, environments: Sequence[Closure] = ()) -> None:
        super().__init__(config, environments)
        self._engine_lock = EngineLock()
        self._is_loading = False
        replay = read_schedule(config.rollout.replay) if config.rollout.replay else None
        self._schedule = EngineSchedule(self.rank, self._begun.step, self.rollout.has_unfinished, replay)

    @register(TO_ENGINES, reads=BEGUN_COLUMNS, writes=("group_ids",))
    def begin_sequences(self, prompts: DataProto) -> DataProto:
        """Begin a batch between two steps, see `GeneratingWorker.begin_sequences`."""
        self._engine_lock.ask()
        try:
            self._schedule.event("begin", noise_key(prompts)[-1])
            return super().begin_sequences(prompts)
        finally:
            self._engine_lock.give_back()

    def generating(self) -> AbstractContextManager[None]:
        """Return a context that holds the turn, except between steps."""
        return self._engine_lock.generating()

    def _generate(
        self, prompts: DataProto, settings: RolloutConfig | ValidationConfig, step: int | None = None
    ) -> DataProto:
        with self.generating():
            while self.rollout.has_unfinished():  # in a replay: otherwise the begun batches were finished before
                self._begun.step()
            return super()._generate(prompts, settings, step)

    def between_steps(self) -> None:
        """Let another batch begin or weights be loaded."""
        self._schedule.note_step()
        self._engine_lock.hand_over()

    @register(Dispatch.ONE_TO_ALL)
    def start_receiving(self, announced: Announcement) -> None:
        """Expect the announced weights; the engine takes no step until `check_weights` has ended, or an error."""
        if not self._is_loading:
            self._engine_lock.ask()
            self._is_loading = True
        with self.receiving():
            self._schedule.event("load", announced.version)
        super().start_receiving(announced)

    @register(Dispatch.ONE_TO_ALL)
    def check_weights(self, probe: Probe) -> dict[str, float]:
        """Check the weights, and continue running sequences with them: some engines advance these in the check."""
        with self.receiving():
            self.rollout.retract()
        metrics = super().check_weights(probe)
        self._end_loading()
        return metrics

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """Return a context in which a step of a sync runs; after an error the engine takes steps again."""
        try:
            yield
        except BaseException:
            self._end_loading()
            raise

    @register(Dispatch.ONE_TO_ALL)
    def take_schedule(self) -> list[dict[str, Any]]:
        """Return the events of this rank's engine since the last call, see `EngineSchedule`."""
        return self._schedule.take()

    @register(Dispatch.ONE_TO_ALL)
    def resume_schedule(self, step: int) -> None:
        """Continue a replay after this step of training, see `EngineSchedule`."""
        self._schedule.resume(step)

    def _end_loading(self) -> None:
        if self._is_loading:
            self._is_loading = False
            self._engine_lock.give_back()


class EngineLock:
    """A lock for two threads. A call that asks for it waits for one step of generation at most."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._is_taken = False
        self._num_asking = 0

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Hold the turn to generate; `hand_over` is called between steps."""
        self._take_after_others()
        try:
            yield
        finally:
            self.give_back()

    def hand_over(self) -> None:
        """Let calls that ask for the turn go first; return with the turn. Without such calls it costs nothing."""
        if self._num_asking:
            self.give_back()
            self._take_after_others()

    def ask(self) -> None:
        """Wait for the turn and take it, before generation continues."""
        with self._condition:
            self._num_asking += 1
            try:
                self._condition.wait_for(lambda: not self._is_taken)
                self._is_taken = True
            finally:
                self._num_asking -= 1

    def give_back(self) -> None:
        """Give the turn back; any thread may do it."""
        with self._condition:
            self._is_taken = False
            self._condition.notify_all()

    def _take_after_others(self) -> None:
        with self._condition:
            self._condition.wait_for(lambda: not self._is_taken and not self._num_asking)
            self._is_taken = True
