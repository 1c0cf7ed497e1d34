"""The functions that start a run from Python; each is one command."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hybridflow.cli.api.environment_argument import Environments, environment_sources
from hybridflow.cli.api.rows import Data, file_of, files_of, records_of, require_names_of_files, write_rows
from hybridflow.cli.api.run import Run
from hybridflow.cli.api.settings import Recipe, overrides, recipe_files
from hybridflow.cli.api.words import DATA_KINDS, Words
from hybridflow.config import load_config
from hybridflow.data.row_forms import RowForm, rows_of
from hybridflow.environments.processes.closure import ENVIRONMENT, Closure
from hybridflow.environments.processes.environment_kind import require_rewards
from hybridflow.errors import ModelConfigError, RewardConfigError
from hybridflow.trainers.build.preconditions import require_reward_functions
from hybridflow.trainers.run.run_directory import DATA
from hybridflow.trainers.run.run_identity import Kind as RunKind


def train(
    model: str | Path,
    prompts: Data,
    *,
    reward: str | Callable[..., Any] | None = None,
    environments: Environments = None,
    val_prompts: Data = None,
    recipe: Recipe = None,
    run_dir: str | Path | None = None,
    prompt: str = "prompt",
    answer: str = "answer",
    **settings: Any,
) -> Run:
    """Return a run of reinforcement learning, as `hybridflow train` makes it; `run.fit()` trains.

    `prompts` are files, or rows: dicts with the columns `prompt` (a text, or chat messages) and `answer` (if the reward
    needs one), which the arguments of these names rename. All other columns reach the reward function by their names.
    `reward` is a function, "path.py:function", or None for the built-in function of each data source. `environments`
    is a class of environments or "path.py:Class", or a dict of several by data source; `reward` scores the episodes of
    classes without one. `recipe`: the name
    of an algorithm's recipe such as "dapo", a file, or several. `settings` are keys of the configuration, as in
    `**{"trainer.total_steps": 100}` or `trainer={"total_steps": 100}`; `run_dir` is trainer.run_dir.

    Raises ConfigError, DataError, RewardConfigError and EnvironmentConfigError at once for keys, rows, functions and
    classes that cannot be trained with; the model and its tokenizer are read by `run.fit()`.
    """
    if not (reward is None or isinstance(reward, str) or callable(reward)):
        raise RewardConfigError(f"reward={reward!r} is a {type(reward).__name__}; expected a function, or its name.")
    closure = Closure.of(reward) if callable(reward) else None
    name = closure.name if closure else reward
    given: dict[str, Any] = {"reward.function": name} if name else {}
    sources, closures = environment_sources(environments)
    given |= {"environment.classes": sources} if sources else {}
    columns, closures = {"prompt": prompt, "answer": answer}, [*([closure] if closure else []), *closures]
    return _start("train", model, prompts, val_prompts, recipe, run_dir, settings, columns, given, closures)


def sft(
    model: str | Path,
    examples: Data,
    *,
    val_examples: Data = None,
    recipe: Recipe = None,
    run_dir: str | Path | None = None,
    prompt: str = "prompt",
    **settings: Any,
) -> Run:
    """Return a run of supervised training, as `hybridflow sft` makes it.

    `examples` are files, or rows with `prompt` and `response`, or with conversations in `messages`,
    which may have calls of `tools`; see `train`.
    """
    return _start("sft", model, examples, val_examples, recipe, run_dir, settings, {"prompt": prompt})


def dpo(
    model: str | Path,
    pairs: Data,
    *,
    val_pairs: Data = None,
    recipe: Recipe = None,
    run_dir: str | Path | None = None,
    prompt: str = "prompt",
    **settings: Any,
) -> Run:
    """Return a run of DPO, as `hybridflow dpo` makes it.

    `pairs` are files, or rows with `prompt`, `chosen` and `rejected`; see `train`.
    """
    return _start("dpo", model, pairs, val_pairs, recipe, run_dir, settings, {"prompt": prompt})


def reward_model(
    model: str | Path,
    pairs: Data,
    *,
    val_pairs: Data = None,
    recipe: Recipe = None,
    run_dir: str | Path | None = None,
    prompt: str = "prompt",
    **settings: Any,
) -> Run:
    """Return a run that trains a reward model, as `hybridflow reward-model` makes it; see `dpo` and `train`."""
    return _start("reward-model", model, pairs, val_pairs, recipe, run_dir, settings, {"prompt": prompt})


def _start(
    kind: RunKind,
    model: str | Path,
    data: Data,
    val_data: Data,
    recipe: Recipe,
    run_dir: str | Path | None,
    settings: dict[str, Any],
    columns: dict[str, str],
    given: Mapping[str, Any] = MappingProxyType({}),
    closures: Sequence[Closure] = (),
) -> Run:
    if not isinstance(model, str | Path):
        raise ModelConfigError(
            f"model is a {type(model).__name__}; expected a directory or a name on the hub. Save a model and its "
            "tokenizer first, with save_pretrained(DIRECTORY), and give the directory."
        )
    given = {**given, "model.path": str(model)} | ({} if run_dir is None else {"trainer.run_dir": str(run_dir)})
    words, has_val = Words(kind, columns), val_data is not None
    with words:
        words.require_arguments(settings, [*given, "data.train_files", *["data.val_files"] * has_val])
        recipes, changes = recipe_files(recipe), overrides({**given, **settings})
        first = load_config(recipes, changes)
        name = DATA_KINDS[kind]
        batch_size = first.data.train_batch_size if kind == "train" else first.offline.batch_size
        limits = {
            "train": (first.trainer.total_steps * batch_size, "trainer.total_steps"),
            "val": (first.validation.max_samples, "validation.max_samples"),
        }
        written: list[tuple[list[Any], Path]] = []

        def files(data: Data, name: str, split: str) -> Sequence[str]:
            if (named := files_of(data)) is not None:
                if other := {ours: theirs for ours, theirs in columns.items() if ours != theirs}:
                    changes.extend(overrides({"data.columns": other}))
                require_names_of_files(named, name)
                return named
            records = records_of(data, name, *limits[split])
            rows = rows_of(records, DATA_KINDS[kind], RowForm(columns), split)
            file = file_of(rows, Path(first.trainer.run_dir) / DATA, split)
            written.append((rows, file))
            return [str(file)]

        changes += overrides({"data.train_files": files(data, name, "train")})
        if has_val:
            changes += overrides({"data.val_files": files(val_data, f"val_{name}", "val")})
        run = Run(Path(first.trainer.run_dir), kind, recipes, changes, closures, words)
        for given_class in [each.function() for each in closures if each.purpose is ENVIRONMENT]:
            require_rewards(given_class, run.config.reward.function)
        for rows, file in written if kind == "train" else ():
            samples = [sample for row in rows if (sample := _sample_of(row))]
            require_reward_functions(run.config, samples, [name if file.name.startswith("train") else f"val_{name}"])
        for rows, file in written:  # all is valid
            write_rows(rows, file)
    return run


def _sample_of(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what a reward function gets of a row; None if the row is malformed, which its reader says."""
    source, truth, info = row.get("data_source"), row.get("reward_model"), row.get("extra_info")
    if not (isinstance(source, str) and isinstance(truth, Mapping) and isinstance(info, Mapping | None)):
        return None
    return {"data_source": source, "ground_truth": truth.get("ground_truth"), "extra_info": info}
