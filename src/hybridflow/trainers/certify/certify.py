"""The comparisons of a certificate, each from short runs of a recipe, every run in a process of its own.

first run   step 1 ... m ── checkpoint ── step m+1 ... N
probe                  ├── sampler - trainer, delivered - sent weights
resumed                ├── step m+1 ... N
replayed               ├── step m+1 ... N
killed                 └── step m+1: killed in a backward pass; the same command again: step m+1 ... N
on Ray      step 1 ...                                                           N, also with a killed worker
"""

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

from hybridflow.checkpoint import CheckpointStore
from hybridflow.checkpoint.certificate import CertificateLine
from hybridflow.config import Config
from hybridflow.config.roles import pools_of
from hybridflow.errors import ConfigError, HybridFlowError
from hybridflow.runtime.observe.run_files import RunFiles
from hybridflow.trainers.certify.equality import Equality, equality_of
from hybridflow.trainers.certify.kill import Kill
from hybridflow.trainers.certify.short_runs import USAGE, NotCheckedError, ShortRunError, ShortRuns


def shortened(config: Config, num_steps: int) -> list[str]:
    """Return what the short runs have in place of a recipe's values: checkpoints in the middle and at the end."""
    middle = middle_of(num_steps)
    return [
        *(f"trainer.save_every={middle}", "trainer.save_every_s=0", "trainer.keep_checkpoints=2"),
        *("trainer.resume=auto", "trainer.trackers=[]", "trainer.profile_steps=[]"),
        *("data.val_files=[]", "trainer.val_every=0", "trainer.val_before_train=false"),
        f"critic.warmup_steps={min(config.critic.warmup_steps, middle - 1)}",
    ]


def middle_of(num_steps: int) -> int:
    """Return the step of the first checkpoint."""
    return num_steps - num_steps // 2


class Comparisons:
    """The comparisons of the short runs of a recipe. `quick`: without the kill of a worker."""

    def __init__(self, config: Config, runs: ShortRuns, *, quick: bool = False) -> None:
        self._config, self._runs, self._quick = config, runs, quick
        self._is_local = config.controller.backend == "local"

    @cached_property
    def first(self) -> Path:
        """The run that others are compared with. Raises ConfigError if the recipe is not possible, or has few steps."""
        try:
            first = self._runs.train("first run")
        except ShortRunError as error:
            raise (ConfigError(error.reason) if error.status == USAGE else error) from None
        steps = CheckpointStore(first / "checkpoints").list()
        if steps != (self._runs.middle, self._runs.num_steps):
            raise ConfigError(
                f"the run ended after step {max(steps, default=0)}, but {self._runs.num_steps} are compared; set fewer "
                "with --steps (at least 2), or a larger trainer.total_steps or trainer.epochs."
            )
        return first

    def lines(self) -> Iterator[CertificateLine]:
        """Make one comparison after another."""
        is_exact = self._config.rollout.exact
        yield _line("sampler - trainer", self._sampler, must_be_exact=is_exact)
        yield _line("delivered - sent weights", self._delivered)
        yield _line("resumed - uninterrupted", self._resumed)
        yield _line("replayed - first run", self._replayed)
        yield _line("killed driver - undisturbed", partial(self._killed, "driver"))
        yield _line("local - Ray", self._local_and_ray)
        yield _line("killed worker - undisturbed", partial(self._killed, "worker"))

    @cached_property
    def _probe(self) -> dict[str, Equality]:
        return self._runs.check("probe", self.first)

    def _sampler(self) -> Equality:
        found = self._probe["sampler"]
        hint = "" if self._config.rollout.exact else "; rollout.exact=true makes this 0, where it is possible"
        return replace(found, difference=found.difference and f"{found.difference}{hint}")

    def _delivered(self) -> Equality:
        if "delivered" in self._probe:
            return self._probe["delivered"]
        raise NotCheckedError(
            "vLLM has its weights in a layout of its own; each sync compares the fingerprints of what arrives, and "
            "log-probs of fixed tokens"
        )

    @property
    def _as_first(self) -> tuple[str, ...]:
        """What a run needs to repeat the first one: if weights come while sequences run, its schedule."""
        return (f"rollout.replay={self.first}",) if self._config.updates_in_flight else ()

    def _resumed(self) -> Equality:
        copied = self._runs.copy(self.first, "resumed run")
        return self._equality(self.first, self._runs.train("resumed run", *self._as_first, run=copied))

    def _replayed(self) -> Equality:
        if self._as_first:
            return self._equality(self.first, self._from_begin("replayed run"), after=0)
        return self._runs.check("replay", self.first)["replayed"]

    def _killed(self, whom: Literal["driver", "worker"]) -> Equality:
        if whom == "worker" and self._quick:
            raise NotCheckedError("--quick leaves it out")
        if whom == "worker" and not self._config.recovery.max_restarts:
            raise NotCheckedError("the recipe does not recover: recovery.max_restarts=0")
        name, first, changes = f"run with a killed {whom}", self.first, self._as_first
        if whom == "worker" and self._is_local:
            first, changes = self._on_ray, (*self._as_first, "controller.backend=ray")
        killed = self._runs.copy(first, name)
        kill = Kill(str(self._runs.scratch / f"kill_{whom}"), whom, self._runs.middle + 1)
        self._runs.train(name, *changes, run=killed, kill=kill)
        if not kill.reached.exists():
            raise NotCheckedError(f"the {whom} was not killed: rank 0 of the actor made no backward pass")
        if whom == "driver":
            self._runs.train(f"{name}, again", *changes, run=killed)
        elif len(RunFiles(killed).recoveries) <= len(RunFiles(first).recoveries):
            return Equality("recoveries.jsonl", "the run has no row of a recovery")
        return self._equality(first, killed)

    def _equality(self, first: Path, other: Path, after: int | None = None) -> Equality:
        """Compare what follows the middle, and remove an equal run: checkpoints are large.

        On Ray, the random numbers of the controller's process are others.
        """
        after = self._runs.middle if after is None else after
        found = equality_of(first, other, after=after, with_controller=self._is_local and first == self.first)
        if not found.difference:
            shutil.rmtree(other)
        return found

    @cached_property
    def _one_rank(self) -> tuple[str, ...]:
        """What makes one process of the recipe's, in which a local run has all roles; nothing if it has one."""
        pools, placement = pools_of(self._config), self._config.placement
        if all(sum(nodes) == 1 for nodes in pools.values()) and (self._as_first or not placement.pools):
            return ()
        if self._as_first:
            raise NotCheckedError("the schedule of rollout.on_new_weights='retract' is that of several processes")
        placed = ("controller.num_workers=1", "placement.pools={}", "placement.roles={}", "placement.min_processes={}")
        return (*placed, "rollout.tensor=1", *(f"parallel.{name}=1" for name, _ in self._config.parallel))

    @cached_property
    def _on_ray(self) -> Path:
        if not self._is_local and not self._one_rank:
            return self.first
        return self._from_begin("run on Ray", "controller.backend=ray", *self._one_rank)

    @cached_property
    def _local(self) -> Path:
        if self._is_local:
            return self.first
        changes = ("controller.backend=local", "controller.address=", *self._one_rank)
        return self._from_begin("run in one process", *changes)

    def _local_and_ray(self) -> Equality:
        found = equality_of(self._local, self._on_ray, with_controller=False)
        ranks = "one process in place of the recipe's; " if self._one_rank else ""
        return Equality(f"{ranks}{found.compared}", found.difference)

    def _from_begin(self, name: str, *changes: str) -> Path:
        run = self._runs.copy(self.first, name, with_checkpoint=False)
        return self._runs.train(name, *self._as_first, *changes, run=run)


def _line(name: str, compare: Callable[[], Equality], *, must_be_exact: bool = True) -> CertificateLine:
    start = time.monotonic()
    try:
        found = compare()
        result = "differs" if found.difference else "exact"
        compared, details = found.compared, found.difference
    except NotCheckedError as reason:
        result, compared, details = "not checked", "", str(reason)
    except HybridFlowError as error:
        result, compared, details = "failed", "", str(error)
    return CertificateLine(name, result, compared, details, round(time.monotonic() - start, 1), must_be_exact)
