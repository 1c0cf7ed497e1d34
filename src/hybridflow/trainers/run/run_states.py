"""The states of a run after its steps, learned again from the checkpoints that it kept or from its begin.

    begin ── step 1 ... step c ── kept checkpoint c ── steps c+1 ... s, learned again ──> the state after step s

A step depends only on the state at its begin, the data, the seed and the keys of the start that made it. All happens in
a directory of its own; the run is only read.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridflow.checkpoint import Checkpoint, CheckpointStore
from hybridflow.config import Config, load_config
from hybridflow.config.checks.generation import REPLAY_IN_FLIGHT
from hybridflow.config.render import toml_value
from hybridflow.config.run_paths import absolute_paths
from hybridflow.errors import CheckpointError, ConfigError, DataConfigError, DataError
from hybridflow.runtime.observe import get_logger, read_jsonl
from hybridflow.runtime.observe.metrics import is_reproducible
from hybridflow.runtime.observe.run_files import known_starts
from hybridflow.trainers.build.build import build_trainer
from hybridflow.trainers.run.ppo_trainer import PPOTrainer
from hybridflow.trainers.run.run_directory import TOKEN_BUDGETS, RunDirectory

logger = get_logger(__name__)

LEARNS_ONLY = (
    *("trainer.resume=auto", "trainer.save_every=0", "trainer.save_every_s=0", "trainer.trackers=[]"),
    *("trainer.val_every=0", "trainer.val_before_train=false", "recovery.max_restarts=0"),
)

JOURNALS = ("rewards", "environments")

MOST_NAMED = 5
"""Metrics that an error names."""

Differences = dict[int, dict[str, tuple[float, float]]]
"""By step, the metrics that differ, with the values of a run and of its replay."""


def comparable(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics that equal runs share, by name.

    Those of weight syncs are left out: the engines of new processes get the weights again.
    """
    names = (name for name in sorted(metrics) if name != "step" and is_reproducible(name))
    return {name: metrics[name] for name in names if not name.startswith("weight_sync/")}


def copy_journals(run: Path, directory: Path) -> None:
    """Copy what a run keeps of rewards and of answers of environments, which need not be the same at each call."""
    for name in JOURNALS:
        if (run / name).is_dir():
            shutil.copytree(run / name, directory / name)


def go_back(trainer: PPOTrainer, checkpoint: Checkpoint) -> None:
    """Return to the state of a checkpoint, without what an unfinished step has left."""
    for group in trainer.groups.values():
        if "abandon_step" in group.methods:
            group.abandon_step()
    trainer.restore(checkpoint)


class RunStates:
    """A trainer that goes from state to state of a run; `differs` are metrics unlike the run's, by step.

    `starts` are those in run.json, `rows` those of the completed steps, `newest` is the last one, `validations` are the
    rows with `val/...`. `base` is the checkpoint from which `at` came, None for the begin of the run. `changes` are
    overrides for all starts. `scratch`: a new or empty directory for what is written. Raises ConfigError unless it is
    a run of `hybridflow train`; with `require_equal`, DataError at the first step that differs.
    """

    def __init__(
        self, run_dir: Path, scratch: Path, *, changes: Sequence[str] = (), require_equal: bool = False
    ) -> None:
        self.run_dir, self.scratch, self._require_equal = run_dir, scratch, require_equal
        self._paths, self._changes = absolute_paths(run_dir / "config.toml"), (*LEARNS_ONLY, *changes)
        rows = read_jsonl(run_dir / "metrics.jsonl")
        self.validations = {row["step"]: row for row in rows if "val/score/mean" in row}
        self.rows = {row["step"]: row for row in rows if "timing_s/step" in row}
        self.newest = max(self.rows, default=0)
        if self.rows and "critic/score/mean" not in self.rows[self.newest]:
            raise ConfigError(
                f"'{run_dir}' is not a run of `hybridflow train`, the only kind whose steps can be learned again."
            )
        self.starts = known_starts(run_dir)
        self.store = CheckpointStore(run_dir / "checkpoints")
        self.differs: Differences = {}
        self.base: Checkpoint | None = None
        self.trainer: PPOTrainer | None = None
        self._place = -1
        self._configs: dict[int, Config] = {}
        self._kept = CheckpointStore(scratch / "kept", keep=1)
        self._damaged: list[tuple[int, CheckpointStore]] = []

    def at(self, step: int, *, before: int | None = None) -> PPOTrainer:
        """Return the trainer in the state after `step`, with the keys of the start that learned `before`, or `step`."""
        target = self.place_of(max(before or step, 1))
        at_hand = self.trainer.global_step if self.trainer else -1
        if not max((each for each, _ in self._checkpoints(step)), default=0) <= at_hand <= step:
            self.base = self._newest_checkpoint(step)
            first = self.base.step if self.base else 0
            self._go_to(target if first == step else self.place_of(first + 1), self.base)
        while True:
            assert self.trainer is not None
            done = self.trainer.global_step
            place = self.place_of(done + 1) if done < step else target
            if place != self._place:
                shutil.rmtree(moved := self.scratch / "moved", ignore_errors=True)
                self._go_to(place, self._saved_in(CheckpointStore(moved)))
            elif done == step:
                return self.trainer
            else:
                self.trainer.train_step()
                self.note_differences(done + 1, self.trainer.metrics)

    def place_of(self, step: int) -> int:
        """Return which start learned a step, the last one if several did. Raises DataError if none is recorded."""
        places = [place for place, start in enumerate(self.starts) if start.get("after_step", 0) < step]
        if not places:
            raise DataError(f"'{self.run_dir / 'run.json'}' has no start that learned step {step}; restore the file.")
        return places[-1]

    def changes_of(self, place: int, other: int) -> list[str]:
        """Return the keys of a start that another start has otherwise, as "key=value"."""
        then, now = (self.starts[each].get("config", {}) for each in (place, other))
        return [f"{key}={toml_value(value)}" for key, value in then.items() if key in now and now[key] != value]

    def _overrides_of(self, place: int) -> list[str]:
        """Return the keys of a start that differ from config.toml, which has those of the newest, as "key=value"."""
        changed = self.changes_of(place, len(self.starts) - 1)
        return [*changed, *absolute_paths(self.run_dir / "config.toml", changed, place)] if changed else []

    def keep(self) -> Checkpoint:
        """Save the present state, from which later calls of `at` may start, in place of the one kept before."""
        self.base = self._saved_in(self._kept)
        return self.base

    def config_of(self, place: int, changes: Sequence[str], name: str) -> Config:
        """Return the configuration of a start with changes, in a new directory with the rewards and budgets kept."""
        directory = self.scratch / name
        directory.mkdir(parents=True)
        copy_journals(self.run_dir, directory)
        if (self.run_dir / TOKEN_BUDGETS).is_file():
            shutil.copy(self.run_dir / TOKEN_BUDGETS, directory)
        overrides = [*self._paths, *self._overrides_of(place), *changes, *self._changes]
        config = load_config(self.run_dir / "config.toml", [*overrides, f"trainer.run_dir={directory}"])
        REPLAY_IN_FLIGHT.require(config)
        return config

    def note_differences(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add the metrics of a step that are not those of the run to `differs`."""
        row = self.rows.get(step, {})
        values = {name: (float(row[name]), float(value)) for name, value in comparable(metrics).items() if name in row}
        if wrong := {name: pair for name, pair in values.items() if repr(pair[0]) != repr(pair[1])}:
            self.differs[step] = wrong
            if self._require_equal:
                raise DataError(self._why_unreachable(step, list(wrong)))

    def first_in_journals(self) -> int:
        """Return the first step whose rewards and answers of environments are kept; those before are computed again."""
        files = [file.name for journal in JOURNALS for file in (self.run_dir / journal).glob("step_*")]
        return min((int(name.split("_")[1]) for name in files), default=1)

    def build(self, config: Config) -> PPOTrainer:
        """Replace the trainer by one with another configuration, in the state of the begin, and return it."""
        self.close()
        self.trainer = build_trainer(config)
        return self.trainer

    def close(self) -> None:
        """Close the trainer."""
        trainer, self.trainer, self._place = self.trainer, None, -1
        if trainer is not None:
            trainer.close()

    def _why_unreachable(self, step: int, wrong: Sequence[str]) -> str:
        shown, first = ", ".join([*wrong[:MOST_NAMED], *["..."] * (len(wrong) > MOST_NAMED)]), self.first_in_journals()
        now = self.trainer.run.identity["arithmetic"] if self.trainer else {}
        then = self.starts[self._place].get("arithmetic", {})
        facts = [f"{name} is {now[name]}, was {then[name]}" for name in now if then.get(name, now[name]) != now[name]]
        return (
            f"step {step} of '{self.run_dir}' cannot be learned again with the same bits, nor those after it: {shown} "
            "differ from metrics.jsonl"
            + (f". This machine rounds differently: {'; '.join(facts)}" if facts else "")
            + (f". Rewards of steps 1 to {first - 1} are no longer kept and may differ" if step < first else "")
            + ". Use the machine, the versions and the reward function of the run."
        )

    def _saved_in(self, store: CheckpointStore) -> Checkpoint:
        assert self.trainer is not None
        self.trainer.save_with(self.trainer.new_saver(store, in_background=False))
        return store.verify(self.trainer.global_step)

    def _checkpoints(self, step: int) -> list[tuple[int, CheckpointStore]]:
        """Return the steps of the checkpoints up to `step`, newest first, each with its store."""
        found = [(each, store) for store in (self.store, self._kept) for each in store.list() if each <= step]
        return sorted((each for each in found if each not in self._damaged), key=lambda each: each[0], reverse=True)

    def _newest_checkpoint(self, step: int) -> Checkpoint | None:
        """Return the newest undamaged checkpoint up to a step; None if there is none."""
        for found in self._checkpoints(step):
            try:
                return found[1].verify(found[0])
            except CheckpointError as error:
                self._damaged.append(found)
                logger.warning("the replay starts before step %d: %s", found[0], error)
        return None

    def _go_to(self, place: int, checkpoint: Checkpoint | None) -> None:
        """Continue under the keys of a start, from a checkpoint or the begin of the run."""
        if checkpoint is None or place != self._place:
            if place not in self._configs:
                self._configs[place] = self.config_of(place, (), f"run-{place}")
            trainer, self._place = self.build(self._configs[place]), place
            self._require_same_inputs(self.starts[place], trainer.run)
        if checkpoint is not None:
            assert self.trainer is not None
            go_back(self.trainer, checkpoint)

    def _require_same_inputs(self, start: Mapping[str, Any], now: RunDirectory) -> None:
        """Raise DataConfigError if a model or data set is not the one that a start has recorded."""
        models, data = now.identity["models"], now.start_facts["data"]
        changed = [key for key, value in models.items() if start.get("models", {}).get(key, value) != value]
        sets = {
            name.partition("_")[0] for name, value in data.items() if start.get("data", {}).get(name, value) != value
        }
        if changed := [*changed, *(f"data.{name}_files" for name in sorted(sets))]:
            raise DataConfigError(
                f"no step of '{self.run_dir}' can be learned again: {', '.join(changed)} changed in content since the "
                "run, see run.json; restore the files."
            )
