"""The directory of a run: its configuration, its starts, its logs and its checkpoints."""

import fcntl
import json
import os
import time
import weakref
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from hybridflow.checkpoint import Checkpoint, CheckpointStore
from hybridflow.config import Config, to_toml
from hybridflow.errors import CheckpointConfigError, ConfigError, RunInUseError
from hybridflow.models.hub import with_names
from hybridflow.runtime.files import write_text_atomically
from hybridflow.runtime.observe import JsonlWriter, collect_run_info, get_logger
from hybridflow.runtime.observe.run_files import METRICS, RECOVERIES, ROLLOUTS, SAMPLES, is_running, read_starts
from hybridflow.runtime.observe.trace import TRACE_FILE
from hybridflow.runtime.plain_files import require_no_links, require_plain_file
from hybridflow.trainers.run.run_identity import (
    Kind,
    arithmetic_of,
    require_same_arithmetic,
    require_same_run,
    run_identity,
)
from hybridflow.workers.engine_schedule import SCHEDULE

logger = get_logger(__name__)

LOGS = (METRICS, SAMPLES, ROLLOUTS, TRACE_FILE)
"""The files that a run appends rows to."""
TOKEN_BUDGETS = "token_budgets.json"
DATA = "data"
"""Directory of data that came from the memory of a Python program; it is written before the run starts."""

WRITTEN = (*LOGS, RECOVERIES, SCHEDULE, "config.toml", "run.json", TOKEN_BUDGETS, ".lock")
"""The files that a run writes and that are not in a checkpoint."""

_NUM_SHOWN = 10


def require_unused(run_dir: Path) -> None:
    """Raise RunInUseError if another process is running in a directory, before its files are read."""
    if is_running(run_dir):
        raise _in_use(run_dir)


def _in_use(run_dir: Path) -> RunInUseError:
    return RunInUseError(
        f"another process is running in trainer.run_dir='{run_dir}'; stop it, or choose another directory."
    )


class RunDirectory:
    """`config.toml, run.json`, the files of `LOGS` and `checkpoints/` of one run.

    `checkpoint` is the newest checkpoint, from which the run continues, None for a new run; `step` is its step.
    Constructing one writes nothing; `begin` does. Raises CheckpointError if the newest checkpoint is damaged or belongs
    to another run, if the directory is not empty and `trainer.resume` is "never", if `checkpoints` is not a directory,
    if an entry of the directory is a symbolic link, through which the run would write elsewhere, or if a file that a
    run writes exists and is not a regular file, such as a FIFO, which would block it.
    """

    def __init__(self, config: Config, kind: Kind) -> None:
        self.config, self.path = config, Path(config.trainer.run_dir)
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"trainer.run_dir='{self.path}' is a file; choose a directory.")
        if config.trainer.resume == "never" and self.path.is_dir() and any(p.name != DATA for p in self.path.iterdir()):
            raise CheckpointConfigError(
                f"'{self.path}' is not empty and trainer.resume='never'; "
                "choose another trainer.run_dir, or resume = 'auto'."
            )
        self._require_plain_files()
        self.store = CheckpointStore(self.path / "checkpoints", keep=config.trainer.keep_checkpoints)
        self.identity = run_identity(config, kind)
        self.checkpoint: Checkpoint | None = self.store.latest()
        if self.checkpoint:
            require_same_run(self.checkpoint, self.identity)
        self.step = self.checkpoint.step if self.checkpoint else 0
        self.documents: dict[str, str] = {}  # contents by file name; `begin` writes them
        self.start_facts: dict[str, Any] = {}  # `begin` records them in `run.json`
        self._release_lock: weakref.finalize[..., Self] | None = None

    def record_arithmetic(self, ranks: Iterable[Mapping[str, str]]) -> None:
        """Add what the workers compute with to the identity. Raises CheckpointConfigError if it must not change."""
        self.identity["arithmetic"] = self.start_facts["arithmetic"] = arithmetic_of(ranks)
        if self.checkpoint:
            require_same_arithmetic(self.checkpoint, self.identity)

    def begin(self) -> tuple[JsonlWriter, JsonlWriter, JsonlWriter, JsonlWriter]:
        """Record this start, and open the files of `LOGS`.

        Rows of steps after the checkpoint are removed, since the run writes them again. Steps up to the checkpoint that
        have no row in `metrics.jsonl` are logged as a warning: every checkpoint is written after its row.

        Raises CheckpointError if the directory cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock_directory()
            self._require_unchanged()
            self._keep_logs_without_checkpoint()
            (self.path / "trace").mkdir(exist_ok=True)
            metrics, samples, rollouts, trace = (JsonlWriter(self.path / name) for name in LOGS)
            for writer in (samples, rollouts, trace):
                writer.truncate_after(self.step if self.checkpoint else -1)
            self._warn_of_missing_rows(metrics.truncate_after(self.step if self.checkpoint else -1))
            self._record_start()
            for name, text in self.documents.items():
                write_text_atomically(self.path / name, text)
        except OSError as error:
            raise CheckpointConfigError(f"trainer.run_dir='{self.path}' cannot be written: {error}.") from error
        if self.checkpoint:
            logger.info("continuing '%s' after step %d", self.path, self.step)
        return metrics, samples, rollouts, trace

    def end(self) -> None:
        """Release the lock of the directory."""
        if self._release_lock is not None:
            self._release_lock()

    def _require_plain_files(self) -> None:
        try:
            for name in WRITTEN:
                require_plain_file(self.path / name)
            require_no_links(self.path)
        except OSError as error:
            raise CheckpointConfigError(
                f"trainer.run_dir='{self.path}' cannot be used: {error}, but a run writes it; move it away, or choose "
                "another directory."
            ) from error

    def _lock_directory(self) -> None:
        lock = os.open(self.path / ".lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o644)
        self._release_lock = weakref.finalize(self, os.close, lock)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # `is_running` locks it for a moment
                time.sleep(0.1)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.end()
            raise _in_use(self.path) from error
        except OSError as error:
            logger.warning(
                "the file system of trainer.run_dir='%s' has no locks (%s): a second process that is started in this "
                "directory by mistake is not detected, and both would write there.",
                self.path,
                error,
            )

    def _require_unchanged(self) -> None:
        """Raise RunInUseError if another process continued the run before this process locked the directory."""
        step = max(self.store.list(), default=0)
        if step != self.step:
            self.end()
            raise RunInUseError(
                f"another process continued the run in trainer.run_dir='{self.path}': this process would continue "
                f"after step {self.step}, but there is a checkpoint of step {step} now. Nothing changed; run it again."
            )

    def _keep_logs_without_checkpoint(self) -> None:
        """Rename logs of an earlier run that has no checkpoint, so that a new run does not overwrite them."""
        for name in (*LOGS, RECOVERIES):
            file = self.path / name
            if self.checkpoint is None and file.is_file() and file.stat().st_size:
                file.replace(file.with_name(f"{file.name}.old"))
                logger.warning("'%s' belongs to an earlier run without a checkpoint; renamed to '%s.old'", file, name)

    def _warn_of_missing_rows(self, steps: set[int]) -> None:
        missing = sorted(set(range(1, self.step + 1)) - steps)
        if missing:
            shown = ", ".join(map(str, missing[:_NUM_SHOWN])) + (", ..." if len(missing) > _NUM_SHOWN else "")
            logger.warning(
                "'%s' was damaged or cut: the rows of %d of the %d finished steps are missing (%s). The run continues "
                "without them.",
                self.path / LOGS[0],
                len(missing),
                self.step,
                shown,
            )

    def starts(self) -> list[dict[str, Any]]:
        """Return the starts in `run.json`: time, step, configuration, versions and hardware of each."""
        return read_starts(self.path)

    def _record_start(self) -> None:
        """Write the configuration to `config.toml`, and add this start to `run.json`."""
        start = {
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "after_step": self.step,
            "kind": self.identity["kind"],
            "directory": str(Path.cwd()),
            "config": self.identity["config"],
            "models": self.identity["models"],
            **self.start_facts,
            **collect_run_info(),
        }
        text = json.dumps({"starts": [*self.starts(), start]}, indent=1, ensure_ascii=False)
        write_text_atomically(self.path / "run.json", f"{text}\n")
        write_text_atomically(self.path / "config.toml", to_toml(with_names(self.config)))
