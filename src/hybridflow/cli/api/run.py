"""A run as an object: it trains, and shows and uses what was trained."""

import shlex
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.checkpoint import Checkpoint, CheckpointStore, export_model
from hybridflow.cli.api.environment_argument import Environments, environment_sources
from hybridflow.cli.api.rows import Data, file_of, files_of, records_of, write_rows
from hybridflow.cli.api.settings import overrides
from hybridflow.cli.api.words import Words, in_own_words
from hybridflow.cli.export import trained_chat_template
from hybridflow.cli.inspect.run_table import NO_RECIPE, run_row
from hybridflow.config import Config, load_config
from hybridflow.config.load import ALGORITHMS
from hybridflow.config.run_paths import absolute_paths
from hybridflow.data.parquet_rows import Row
from hybridflow.data.row_forms import RowForm, rows_of
from hybridflow.environments.processes.closure import ENVIRONMENT, REWARD, Closure, Purpose, is_closure, offer
from hybridflow.errors import CheckpointConfigError, ConfigError, DataConfigError
from hybridflow.models.hub import local_model, require_upload, upload_model
from hybridflow.runtime.observe import get_logger
from hybridflow.runtime.observe.run_files import RunFiles
from hybridflow.trainers.build import build
from hybridflow.trainers.build.build_generation import build_generator, build_validator
from hybridflow.trainers.build.build_offline import build_dpo_trainer, build_reward_model_trainer, build_sft_trainer
from hybridflow.trainers.build.preconditions import with_required_files
from hybridflow.trainers.run.replay import Replay, replay_step
from hybridflow.trainers.run.run_directory import DATA
from hybridflow.trainers.run.run_identity import Kind
from hybridflow.trainers.run.text_generation import typed_prompts

if TYPE_CHECKING:
    import pandas

logger = get_logger(__name__)

BUILDERS: dict[str, Callable[[Config], Any]] = {
    "train": build.build_trainer,
    "sft": build_sft_trainer,
    "dpo": build_dpo_trainer,
    "reward-model": build_reward_model_trainer,
}


class Table(list[dict[str, Any]]):
    """Rows as dicts; `to_pandas()` makes a DataFrame of them."""

    def to_pandas(self) -> "pandas.DataFrame":
        """Return the rows as a DataFrame. Raises ConfigError without pandas."""
        try:
            import pandas
        except ImportError as error:
            raise ConfigError("to_pandas() needs pandas, which is not installed: pip install pandas.") from error
        return pandas.DataFrame(list(self))


class Run:
    """A run in a directory (`path`); `train`, `sft`, `dpo`, `reward_model` and `open_run` return one.

    Nothing runs between two calls: each one starts its workers and ends them. A step of a method is that of a
    checkpoint (None: the newest one; before the first, the initial model).
    """

    def __init__(
        self,
        path: Path,
        kind: Kind,
        recipes: Sequence[Path],
        changes: Sequence[str],
        closures: Sequence[Closure] = (),
        words: Words | None = None,
    ) -> None:
        self.path, self.kind, self.words = path, kind, replace(words or Words(kind), directory=str(path / DATA))
        self._recipes, self._changes, self._closures = recipes, list(changes), closures

    def __repr__(self) -> str:
        if not (self.path / "run.json").is_file():
            return f"<hybridflow {self.kind} in '{self.path}': not started>"
        row = run_row(self.path)
        return f"<hybridflow {self.kind} in '{self.path}': step {row.step} of {row.total_steps}, {row.state}>"

    @property
    def config(self) -> Config:
        """The configuration, with what recipes, arguments and defaults give each key."""
        return self._config()

    @in_own_words
    def fit(self, stop_after: int | None = None, **settings: Any) -> "Run":
        """Train, from the newest checkpoint of the directory or from the start, and return this run.

        It saves and returns after step `stop_after`, or after the step in which Ctrl-C or SIGTERM arrives. `settings`
        are keys of the configuration that hold from now on, as in `**{"trainer.total_steps": 200}`.
        """
        config = self._config(settings)
        if self._closures and self._checkpoint(None) is not None:
            _require_same_closures(self._closures, self.path)
        self._changes += overrides(settings)
        with BUILDERS[self.kind](config) as trainer:
            names = [file.stem if file.parent == ALGORITHMS else file.name for file in self._recipes]
            trainer.run.start_facts["recipe"] = " ".join(names) or NO_RECIPE
            trainer.fit(stop_after)
        row, where = run_row(self.path), shlex.quote(str(self.path))
        logger.info(
            "'%s' is at step %d of %d, %s; look at it with run.metrics, run.samples() and run.report(), or with "
            "`hybridflow report %s` and `hybridflow watch %s`",
            *(self.path, row.step, row.total_steps, row.state, where, where),
        )
        return self

    def resume(self, stop_after: int | None = None, **settings: Any) -> "Run":
        """Continue from the newest checkpoint, see `fit`. Raises CheckpointConfigError if there is none."""
        if self._checkpoint(None) is None:
            raise CheckpointConfigError(f"'{self.path}' has no checkpoint to resume from; fit() starts the run.")
        return self.fit(stop_after, **settings)

    @property
    def metrics(self) -> Table:
        """The metrics of each step so far: `metrics.jsonl`."""
        return Table(self._files().metrics)

    def samples(self, step: int | None = None) -> Table:
        """Return the responses that were kept, with their tokens: those of `step`, or all."""
        return Table(sample for sample in self._files().samples if step in (None, sample["step"]))

    def report(self, output: str | Path | None = None) -> Path:
        """Write the page of the run, one HTML file (default: `report.html` in the run's directory); return its path."""
        from hybridflow.cli.inspect.report import write_report

        file = Path(output) if output is not None else self.path / "report.html"
        write_report([self._files()], file)
        return file

    @in_own_words
    def generate(
        self,
        prompts: str | Sequence[str | Sequence[Mapping[str, str]]],
        *,
        step: int | None = None,
        n: int = 1,
        temperature: float | None = None,
        **settings: Any,
    ) -> Any:
        """Return the response to a prompt, or a list with one for each of several prompts.

        A prompt is a text, or chat messages. With `n` above 1 each is a list of `n` responses. `temperature` 0, the
        default of `validation.temperature`, is greedy. `settings` are keys of the configuration.
        """
        given = {"validation.group_size": n} | ({} if temperature is None else {"validation.temperature": temperature})
        config = self._config({**given, **settings})
        config = with_required_files(config)
        rows = _prompts([prompts] if isinstance(prompts, str) else prompts)
        cap = "data.max_response_length" not in settings
        with build_generator(config, self._checkpoint(step), rows, cap_response_length=cap) as generator:
            found = [row["responses"] if n > 1 else row["responses"][0] for row in generator.run(rows)]
        return found[0] if isinstance(prompts, str) else found

    @in_own_words
    def evaluate(
        self,
        prompts: Data = None,
        *,
        step: int | None = None,
        prompt: str = "prompt",
        answer: str = "answer",
        **settings: Any,
    ) -> dict[str, float]:
        """Return the validation metrics of a checkpoint on files or rows of prompts (None: data.val_files)."""
        given: dict[str, Any] = {}
        if prompts is not None:
            files = files_of(prompts)
            if files is None:
                limit = self._config(settings).validation.max_samples
                records = records_of(prompts, "prompts", limit, "validation.max_samples")
                rows = rows_of(records, "prompts", RowForm({"prompt": prompt, "answer": answer}), "val")
                file = file_of(rows, self.path / DATA, "val")
                write_rows(rows, file)
                files = [str(file)]
            given["data.val_files"] = files
        elif not self._config(settings).data.val_files:
            raise ConfigError("evaluate() has no prompts, and the run no val_prompts; give rows: evaluate(rows).")
        with build_validator(self._config({**given, **settings}), self._checkpoint(step)) as validator:
            metrics, _ = validator.run()
        return metrics

    @in_own_words
    def replay(self, step: int, **changes: Any) -> Replay:
        """Learn a step of the run again, and once more under `changes`, keys of the configuration.

        See `hybridflow replay`, and `open_run` for rewards and environments that Python held. The run is only read.
        """
        self._files()
        self._config()  # lets workers find what Python holds
        with tempfile.TemporaryDirectory(prefix="replay-", dir=self.path) as scratch:
            return replay_step(self.path, step, overrides(changes), scratch=Path(scratch))

    @in_own_words
    def export(
        self,
        out: str | Path,
        *,
        step: int | None = None,
        dtype: str | None = None,
        adapter: bool = False,
        push_to_hub: str | None = None,
        private: bool = False,
    ) -> Path:
        """Write a checkpoint as a Hugging Face model directory and return it; see `hybridflow export`.

        `push_to_hub`: the repository OWNER/NAME that the directory is uploaded to; a new one may be `private`.
        """
        checkpoint = self._checkpoint(step)
        if checkpoint is None:
            raise CheckpointConfigError(f"'{self.path}' has no checkpoint to export; fit() makes them.")
        if push_to_hub is not None:
            require_upload(push_to_hub, private=private)
        model_dir, template = local_model("model.path", self._config().model.path), trained_chat_template(self.path)
        export_model(checkpoint, model_dir, out, dtype=dtype, adapter=adapter, chat_template=template)
        if push_to_hub is not None:
            upload_model(Path(out), push_to_hub)
        return Path(out)

    def _files(self) -> RunFiles:
        if not (self.path / "run.json").is_file():
            raise DataConfigError(f"'{self.path}' has no run yet; fit() starts it.")
        return RunFiles(self.path)

    def _config(self, settings: Mapping[str, Any] | None = None) -> Config:
        """Return the configuration with further settings, and let workers find what Python holds."""
        for closure in self._closures:
            offer(closure)
        return load_config(self._recipes, [*self._changes, *overrides(settings or {})])

    def _checkpoint(self, step: int | None) -> Checkpoint | None:
        store = CheckpointStore((self.path / "checkpoints").absolute())
        return store.latest() if step is None else store.open(step)


def open_run(
    run_dir: str | Path, *, reward: Callable[..., Any] | None = None, environments: Environments = None
) -> Run:
    """Return the run in a directory, as its last start configured it, with paths from where it was started.

    A reward function or a class of environments that Python held when the run began is not stored: give it again.
    Raises RewardConfigError or EnvironmentConfigError if its source has changed since, and DataConfigError if the
    directory is not that of a run.
    """
    path = Path(run_dir)
    files = RunFiles(path)
    kind = files.starts[-1].get("kind", "train")
    config = path / "config.toml"
    closures = [Closure.of(reward)] if reward is not None else []
    sources, classes = environment_sources(environments)
    for given, purpose in ((closures, REWARD), (sources, ENVIRONMENT)):
        if given and not _held_by_python(files, purpose):
            stored = files.config.get(purpose.key)
            raise purpose.error(
                f"'{path}' has {purpose.key}={stored!r}, which is stored; leave {purpose.argument} out."
            )
    closures += classes
    _require_same_closures(closures, path)
    changes = [*absolute_paths(config), *overrides({"trainer.run_dir": str(path)})]
    return Run(path, kind, [config], changes, closures)


def _held_by_python(files: RunFiles, purpose: Purpose) -> set[str]:
    """Return the names of what Python held for this purpose when the run in a directory began."""
    value = files.config.get(purpose.key)
    names = value.values() if isinstance(value, Mapping) else [value]
    return {str(name) for name in names if is_closure(str(name))}


def _require_same_closures(closures: Sequence[Closure], path: Path) -> None:
    """Raise the error of its purpose for what the run in a directory had otherwise."""
    for closure in closures:
        held = _held_by_python(RunFiles(path), closure.purpose)
        if held and closure.name not in held:
            before = " and ".join(sorted(name.partition(":")[2] for name in held))
            raise closure.purpose.error(
                f"{closure.purpose} is {closure.name.partition(':')[2]}, but that of the run in '{path}' was {before}: "
                "its name or its source (the digest after the dash) has changed. Give what the run began with, or "
                "choose another run_dir."
            )


def _prompts(prompts: Iterable[str | Sequence[Mapping[str, str]]]) -> list[Row]:
    if not isinstance(prompts, Iterable) or isinstance(prompts, Mapping):
        raise ConfigError(f"generate() got {prompts!r:.100}; give a text, or a list of texts or of chat messages.")
    given = list(prompts)
    if not given:
        raise ConfigError("generate() got no prompt; give a text, or a list of texts or of chat messages.")
    rows = []
    for i, each in enumerate(given):
        is_chat = isinstance(each, Sequence) and all(isinstance(part, Mapping) for part in each)
        if not (isinstance(each, str) or is_chat):
            hint = "; put one conversation into a list: [[{...}]]" if isinstance(each, Mapping) else ""
            raise ConfigError(
                f"generate() got prompt {i}, {each!r:.100}; expected a text, or a list of chat messages{hint}."
            )
        typed = isinstance(each, str)
        rows += typed_prompts([each]) if typed else [Row(f"prompt {i}", {"prompt": [dict(m) for m in each]})]
    return rows
