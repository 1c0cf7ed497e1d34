"""Both sides of lending (placement.lend): engines give up groups that wait, and training ranks generate them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hybridflow.config import Config
from hybridflow.controller import Dispatch, register
from hybridflow.weight_sync import WeightSender, build_sending_transport
from hybridflow.workers.actor_rollout import ActorRolloutWorker
from hybridflow.workers.in_flight import InFlightRolloutWorker


class LendingActorWorker(ActorRolloutWorker):
    """A worker that trains the policy, sends its weights to another pool, and also generates with them.

    It generates with the embedded engine, whichever engine the other pool has.
    """

    def __init__(self, config: Config, total_updates: int = 1) -> None:
        embedded = config.rollout.model_copy(update={"backend": "embedded"})
        super().__init__(config.model_copy(update={"rollout": embedded}), total_updates)
        transport = partial(build_sending_transport, self.config) if self.rank == 0 else None
        self._pool_sender = WeightSender(self.engine, self.config, transport)

    @register(Dispatch.ONE_TO_ALL)
    def send_weights(self, step: Callable[..., Any], *args: Any) -> Any:
        """Run one step of a weight sync to another pool, see `ActorWorker.send_weights`."""
        return step(self._pool_sender, *args)


class InFlightGivingWorker(InFlightRolloutWorker):
    """A worker that gives up groups that wait for memory, so that other ranks generate them."""

    beside = InFlightRolloutWorker.beside | {"give_waiting"}

    @register(Dispatch.ONE_TO_ALL)
    def give_waiting(self, batch: Sequence[int], share: float) -> list[int]:
        """Give up a share of the groups of a batch that wait, at least one; return their `group_ids`.

        `batch`: the noise key of a batch that has begun; of one that is finished, nothing waits. `finish_sequences`
        returns rows without tokens, finished by "abort", in place of their responses. The engine takes a step first, so
        that groups which fit in memory do not wait.
        """
        key = tuple(batch)
        if key not in self._begun:  # weights may be loading for the next one
            return []
        self._turn.ask()
        try:
            if self.rollout.has_unfinished():
                self._begun.step()
            given = self._begun.give_waiting(key, share) if key in self._begun else []
            if given:
                self._schedule.event("give", key[-1], groups=given)
            return given
        finally:
            self._turn.give_back()


class GivingWorker(InFlightGivingWorker):
    """The same with rollout.on_new_weights = "wait": batches begin and weights are loaded in the order of the calls."""

    beside = frozenset({"give_waiting", "take_schedule"})
