"""Generation whose running sequences go on with new weights: batches begin and weights are loaded between two steps."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from hybridflow.config import Config, RolloutConfig, ValidationConfig
from hybridflow.controller import Dispatch, register
from hybridflow.protocol import DataProto
from hybridflow.weight_sync import WeightReceiver
from hybridflow.workers.generating import BEGUN_COLUMNS, TO_ENGINES
from hybridflow.workers.rollout import RolloutWorker
from hybridflow.workers.schedule import Schedule, read_schedule
from hybridflow.workers.turn import Turn


class InFlightRolloutWorker(RolloutWorker):
    """A worker whose running sequences continue with new weights (`rollout.on_new_weights`).

    Batches begin, and weights are loaded, in a second thread between two steps of the engine. While weights are
    loaded, no step runs.
    """

    beside = frozenset({"begin_sequences", "receive_weights", "take_schedule"})

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._turn = Turn()
        self._is_loading = False
        replay = read_schedule(config.rollout.replay) if config.rollout.replay else None
        self._schedule = Schedule(self.rank, self._begun.step, self.rollout.has_unfinished, replay)

    @register(TO_ENGINES, reads=BEGUN_COLUMNS, writes=("group_ids",))
    def begin_sequences(self, prompts: DataProto) -> DataProto:
        """Begin a batch between two steps, see `GeneratingWorker.begin_sequences`."""
        self._turn.ask()
        try:
            self._schedule.event("begin", int(prompts.meta_info["noise_key"][-1]))
            return super().begin_sequences(prompts)
        finally:
            self._turn.give_back()

    def generating(self) -> AbstractContextManager[None]:
        """Return a context that holds the turn, except between steps."""
        return self._turn.generating()

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
        self._turn.hand_over()

    @register(Dispatch.ONE_TO_ALL)
    def receive_weights(self, step: Callable[..., Any], *args: Any) -> Any:
        """Run one step of a weight sync; the engine takes no step from the first one to the check."""
        if step is WeightReceiver.start and not self._is_loading:
            self._turn.ask()
            self._is_loading = True
        try:
            if step is WeightReceiver.start:
                self._schedule.event("load", args[0].version)
            result = super().receive_weights(step, *args)
            if step is WeightReceiver.check:
                self.rollout.retract()
        except BaseException:
            self._end_loading()
            raise
        if step is WeightReceiver.check:
            self._end_loading()
        return result

    @register(Dispatch.ONE_TO_ALL)
    def take_schedule(self) -> list[dict[str, Any]]:
        """Return the events of this rank's engine since the last call, see `Schedule`."""
        return self._schedule.take()

    @register(Dispatch.ONE_TO_ALL)
    def resume_schedule(self, step: int) -> None:
        """Continue a replay after this step of training, see `Schedule`."""
        self._schedule.resume(step)

    def _end_loading(self) -> None:
        if self._is_loading:
            self._is_loading = False
            self._turn.give_back()
