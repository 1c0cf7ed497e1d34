"""Recovery inside a run: after a failure that new processes can mend, it goes back to a snapshot and repeats the step.

    worker dies ── settle ── restart its group ── restore the snapshot ── verify ── repeat the step

A step depends only on the state at its begin, the data and the seed, so the repeated step has the same results.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from hybridflow.checkpoint import Checkpoint
from hybridflow.errors import CheckpointError, DataError, HybridFlowError, LostWorkerError
from hybridflow.runtime.observe import JsonlWriter, TraceEvent, get_logger
from hybridflow.runtime.observe.run_files import RECOVERIES
from hybridflow.trainers.build.groups import as_ray
from hybridflow.trainers.build.pool_sizes import PoolSizes, use_sizes
from hybridflow.trainers.build.token_budgets import TokenBudgets
from hybridflow.trainers.run.recovery.failures import Action, Tries, action_for, fault_of
from hybridflow.trainers.run.recovery.restarted_groups import RestartedGroups
from hybridflow.trainers.run.recovery.snapshots import Snapshots, memory_problem, snapshot_directory
from hybridflow.trainers.run.trainer import Trainer

logger = get_logger(__name__)


class Recovery:
    """The recovery of one run. `sizes` is None if its groups keep their number of ranks."""

    def __init__(
        self,
        trainer: Trainer,
        groups: RestartedGroups,
        budgets: TokenBudgets,
        snapshots: Snapshots,
        sizes: PoolSizes | None = None,
    ) -> None:
        recovery = trainer.config.recovery
        self._trainer, self._groups, self._budgets, self.snapshots = trainer, groups, budgets, snapshots
        self._sizes = sizes
        self._tries = Tries(recovery.max_restarts, recovery.backoff_s)
        self._metrics: dict[str, float] = {}

    def begin_snapshot(self) -> None:
        """Begin the snapshot of the last step, if one is due."""
        self.snapshots.begin(self._trainer.global_step, self._trainer.save_with)

    def take_snapshot(self) -> None:
        """Begin the snapshot of the last step, if one is due, and complete it."""
        self.begin_snapshot()
        self.snapshots.finish()

    def note_step(self) -> dict[str, float]:
        """Complete the snapshot of an earlier step; return metrics of the recoveries since the last call."""
        step = self._trainer.global_step
        self.snapshots.finish(step)
        self._tries.note_step(step)
        self._budgets.note_step()
        metrics, self._metrics = self._metrics, {}
        return metrics | self._sizes.metrics() if self._sizes else metrics

    def use_room(self) -> None:
        """Start more processes if a pool has less than configured and the cluster has room for them now.

        They begin with the state after the last step, of which every group has a snapshot or a checkpoint first.
        """
        growable = self._sizes.growable(self._trainer.groups) if self._sizes else []
        if not growable:
            return
        start, step = time.time(), self._trainer.global_step
        for save in (None, self.take_snapshot, self._trainer.save):
            if save:
                save()
            self._trainer.finish_save()
            if (point := self._newest_point()) and point.step >= step:
                break
        else:
            return  # the log says why
        names = self._groups.settle(also=growable)
        logger.warning("there is room for more processes: new ones for %s", ", ".join(names))
        self._restart(names, point)
        self._record([], "resize", names, 0, start)
        self._groups.keep_standbys()

    def __call__(self, error: HybridFlowError) -> None:
        """Go back to the newest snapshot or checkpoint with workers that can go on.

        Raises `error` if the run cannot recover from it. Another failure meanwhile counts as a further try.
        """
        start, step, errors = time.time(), self._trainer.global_step, [error]
        while True:
            action = self._action_for(error)
            is_exhausted = action is Action.RESTART and self._tries.is_exhausted()
            if action is Action.STOP or is_exhausted:
                if is_exhausted:
                    logger.error("%d tries in a row have failed (recovery.max_restarts)", self._tries.count)
                raise error
            logger.warning("step %d failed (%s): %s", step + 1, fault_of(error).value, error)
            try:
                point, restarted = self._go_back(error, action)
            except HybridFlowError as again:
                if again is error:
                    raise
                error = again
                errors.append(again)
                continue
            self._record(errors, action.name.lower(), restarted, step - point.step, start)
            self._groups.keep_standbys()
            return

    def _action_for(self, error: HybridFlowError) -> Action:
        """Return the action for a failure. A worker that was killed for memory may have had a greedy neighbour."""
        action = action_for(error)
        is_smallest = action is Action.SMALLER and not self._budgets.can_halve()
        return Action.RESTART if is_smallest and isinstance(error, LostWorkerError) else action

    def _go_back(self, error: HybridFlowError, action: Action) -> tuple[Checkpoint, list[str]]:
        """Return the point from which the run goes on, and the groups with new processes."""
        failed = self._groups.settle()
        self._trainer.saver.rescue()
        self.snapshots.rescue()
        point = self._newest_point()
        if point is None:
            logger.error(
                "the run cannot go back: there is neither a snapshot nor a checkpoint (recovery.snapshot_every, "
                "trainer.save_every)"
            )
        if point is None or (action is Action.SMALLER and not self._budgets.halve()):
            raise error
        new = f"going back to step {point.step} with new processes for {', '.join(failed) or 'no group'}"
        if action is Action.SMALLER:  # ends by itself, with the smallest budget
            logger.warning("%s", new)
        else:
            pause_s = self._tries.next_pause_s(self._trainer.global_step)
            most = self._trainer.config.recovery.max_restarts
            logger.warning("%s, try %d of %d", new, self._tries.count, most)
            time.sleep(pause_s)
        self._restart(failed, point)
        return point, failed

    def _restart(self, names: Sequence[str], point: Checkpoint) -> None:
        """Start new processes for these groups, and let all groups begin with the state of a point."""
        self._groups.restart(names)
        if self._sizes and self._sizes.config is not self._trainer.config:
            use_sizes(self._trainer, self._sizes.config)
        self._budgets.apply()
        self._trainer.restore(point, verify=True)

    def _newest_point(self) -> Checkpoint | None:
        """Return the newest snapshot or checkpoint whose files are undamaged; None if there is none."""
        stores = (self._trainer.run.store, self.snapshots.store)
        found = sorted(((step, store) for store in stores for step in store.list()), key=lambda pair: pair[0])
        for step, store in reversed(found):
            try:
                return store.verify(step)
            except CheckpointError as error:
                logger.warning("step %d cannot be restored: %s", step, error)
        return None

    def _record(
        self, errors: Sequence[HybridFlowError], action: str, restarted: list[str], repeated: int, start: float
    ) -> None:
        """Write the recovery to the trace, the metrics of the next row, the console and `recoveries.jsonl`."""
        trainer, end = self._trainer, time.time()
        where = ",".join(restarted) or "no group"
        trainer.events = [*trainer.events, TraceEvent("recovery", action, where, "", start, end)]
        for name, value in (("failures", len(errors)), ("repeated_steps", repeated), ("time_s", end - start)):
            self._metrics[f"recovery/{name}"] = self._metrics.get(f"recovery/{name}", 0.0) + value
        row = {
            "step": trainer.global_step + repeated + 1,
            "from_step": trainer.global_step,
            "action": action,
            "restarted": restarted,
            "time": start,
            "seconds": round(end - start, 3),
            "faults": [fault_of(error).name.lower() for error in errors],
            "errors": [f"{type(error).__name__}: {str(error).partition(chr(10))[0]}" for error in errors],
        }
        try:
            JsonlWriter(trainer.run.path / RECOVERIES).write(row)
        except OSError as error:
            raise DataError(f"'{trainer.run.path / RECOVERIES}' cannot be written: {error}.") from error
        logger.warning("recovered in %.1f s, going on after step %d", end - start, trainer.global_step)


@contextmanager
def recovering(recovery: Recovery | None, rewind: Any) -> Iterator[None]:
    """Recover from an error of the block, if the run can, and call `rewind()` afterwards."""
    try:
        yield
    except HybridFlowError as error:
        if recovery is None:
            raise
        recovery(error)
        rewind()


def build_recovery(trainer: Trainer, budgets: TokenBudgets, sizes: PoolSizes | None = None) -> Recovery | None:
    """Return the recovery of a run on Ray; None in one process, and with recovery.max_restarts = 0."""
    config = trainer.config
    if config.controller.backend != "ray" or not config.recovery.max_restarts:
        return None
    backend, groups = as_ray(trainer.backend), trainer.groups
    runs_on = config.updates_in_flight  # a snapshot would wait for batches that have begun
    connected = runs_on or config.rollout.weight_sync in ("broadcast", "ipc")
    every = 0 if runs_on else config.recovery.snapshot_every
    hostnames = backend.hostnames([worker for group in groups.values() for worker in group.workers])
    directory = snapshot_directory(config, hostnames)
    if every and (problem := memory_problem(config, directory)):
        logger.warning("%s", problem)
        every = 0
    snapshots = Snapshots(directory, every, config.trainer.lag, partial(trainer.new_saver, in_background=True))
    by_name = {role.value: group for role, group in groups.items()}
    move, standby = sizes and partial(sizes.refit, groups), config.recovery.standby
    restarted = RestartedGroups(backend, by_name, connected=connected, standby=standby, move=move)
    restarted.keep_standbys()
    return Recovery(trainer, restarted, budgets, snapshots, sizes)
