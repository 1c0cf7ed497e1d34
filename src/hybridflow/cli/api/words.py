"""Errors of a call in Python name its arguments, not the keys of a recipe that the arguments set."""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import wraps
from types import TracebackType
from typing import Any, TypeVar, cast

from hybridflow.cli.api.settings import keys_of
from hybridflow.config import leaf_keys
from hybridflow.config.aliases import keys_of_alias
from hybridflow.data.row_forms import Kind
from hybridflow.errors import ConfigError, HybridFlowError
from hybridflow.trainers.run.run_identity import Kind as RunKind

DATA_KINDS: dict[RunKind, Kind] = {"train": "prompts", "sft": "examples", "dpo": "pairs", "reward-model": "pairs"}
"""The name of the argument with the data, which is also the form of its rows, by kind of run."""

ARGUMENTS = {
    "model.path": "model",
    "trainer.run_dir": "run_dir",
    "reward.function": "reward",
    "environment.classes": "environments",
}
PHRASES = {
    'reward.function="path.py:function" to score': 'reward=FUNCTION or reward="path.py:function" to score',
    "in the recipe or as KEY=VALUE on the command line": 'in the recipe or as an argument, **{"KEY": VALUE}',
    "in overrides:": "in the arguments:",
    "with overrides:": "with the arguments:",
}
HINT = " Name its column with an argument, as in "
RENAME = " Rename the column that has it."
_MISSING = re.compile(r": '([^']+)' is missing; the row has ([^.]*)\.( Name the columns in data.columns, .*?\}\.)?")
_WRITTEN = r"/(train|val)-[0-9a-f]{12}\.parquet(?!: cannot)"


@dataclass(frozen=True)
class Words:
    """The arguments of a call of this kind; while it is entered, errors are said in them.

    `columns`: the values of the arguments that name columns. `directory`: where rows of the program are written.
    """

    kind: RunKind
    columns: Mapping[str, str] = field(default_factory=lambda: {"prompt": "prompt", "answer": "answer"})
    directory: str = ""

    def keys(self) -> dict[str, str]:
        """Return the arguments by the keys that they set."""
        data = DATA_KINDS[self.kind]
        return {**ARGUMENTS, "data.train_files": data, "data.val_files": f"val_{data}"}

    def require_arguments(self, settings: Mapping[str, Any], given: Iterable[str]) -> None:
        """Raise ConfigError for a setting that `given` has as an argument, or that misspells an argument."""
        found, arguments = keys_of(settings), [*self.keys().values(), *self.columns, "recipe"]
        if twice := [key for key in given if key in found]:
            raise ConfigError(f"{twice[0]} is given twice; it is an argument of its own.")
        for key in found:
            if key in arguments:
                raise ConfigError(f"{key}= is an argument of train() only; leave it out.")
            if any(leaf.startswith(f"{key}.") for leaf in leaf_keys()):
                raise ConfigError(f"{key}= is a section of keys; give a dict, as in {key}={{KEY: VALUE}}.")
            if "." not in key and not keys_of_alias(key) and (near := get_close_matches(key, arguments, n=1)):
                raise ConfigError(f"{key}= is not an argument; did you mean {near[0]}=?")

    def of(self, text: str) -> str:
        """Return the text of an error in these words."""
        for phrase, ours in PHRASES.items():
            text = text.replace(phrase, ours)
        keys, data = self.keys(), DATA_KINDS[self.kind]
        text = re.sub(
            rf"(?<![\w.])({'|'.join(map(re.escape, keys))})(?!\w|\.\w|=path\.py|={{NAME)",
            lambda key: keys[key[1]],
            text,
        )
        for directory in filter(None, (self.directory and os.path.abspath(self.directory), self.directory)):
            written = re.escape(directory) + _WRITTEN
            text = re.sub(written, lambda file: data if file[1] == "train" else f"val_{data}", text)
        return text if HINT in text or RENAME in text else _MISSING.sub(self._with_argument, text)

    def _with_argument(self, found: re.Match[str]) -> str:
        argument = next((ours for ours, theirs in self.columns.items() if theirs == found[1]), None)
        others = [name for name in found[2].split(", ") if name not in self.columns.values()]
        if not others:
            return found[0]
        nearest = get_close_matches(found[1], others, n=1) or others
        begin = found[0].removesuffix(found[3] or "")
        return f'{begin}{HINT}{argument}="{nearest[0]}".' if argument else begin + RENAME

    def __enter__(self) -> None: ...

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if isinstance(error, HybridFlowError) and error.args:
            error.args = (self.of(str(error.args[0])), *error.args[1:])


M = TypeVar("M", bound=Callable[..., Any])


def in_own_words(method: M) -> M:
    """Return the method of an object with `words`, with errors said in them."""

    @wraps(method)
    def worded(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.words:
            return method(self, *args, **kwargs)

    return cast(M, worded)
