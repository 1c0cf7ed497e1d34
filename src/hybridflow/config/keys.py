"""All configuration keys by dotted name, and the key most similar to a misspelled one."""

from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher
from typing import get_args

from hybridflow.config.sections.base import Section
from hybridflow.config.sections.config import Config

LEAST_SIMILARITY, VERY_SIMILAR = 0.6, 0.75

MODELS = ("model.path", "critic.model_path", "reference.model_path", "teacher.model_path", "reward.model_path")
DIRECTORIES = (*MODELS, "trainer.run_dir", "recovery.snapshot_dir")
FILES = ("data.train_files", "data.val_files")
"""Keys whose values are paths; those of models and files may be names on the hub."""
PROMPT_FILE = "prompt_file"
"""The entry of reward.kwargs for the path of the judge's prompt; its other values are not paths."""


def sections(root: Section | None = None, name: str = "") -> Iterator[tuple[str, Section]]:
    """Yield the dotted name and the values of each section, parents first; the root's name is empty."""
    section = Config() if root is None else root
    yield name, section
    for key, value in section:
        if isinstance(value, Section):
            yield from sections(value, f"{name}.{key}" if name else key)


def leaf_keys(config: Config | None = None) -> dict[str, object]:
    """Return {dotted name: value} of every key, in the order of the sections; without a config, the defaults."""
    return {
        f"{name}.{key}": value
        for name, section in sections(config)
        for key, value in section
        if not isinstance(value, Section)
    }


def holds_text(name: str) -> bool:
    """Return whether every valid value of a key is text; false for an unknown key, and one of true, false or "auto"."""
    prefix, _, key = name.rpartition(".")
    section = dict(sections()).get(prefix)
    if not prefix or section is None or not isinstance(getattr(section, key, None), str):
        return False
    return bool not in get_args(type(section).model_fields[key].annotation)


def nearest_key(name: str, candidates: Iterable[str] | None = None) -> str | None:
    """Return the candidate (default: any key) most similar to `name`, or None if none is similar enough.

    The last parts are compared first, so that `kl_coeff` finds `algorithm.kl_coef` and `lr` finds
    `actor.optimizer.lr`; ties are decided by the parts before it, then by the order of the sections. A key of the same
    section that is very similar comes first: `data.batch_size` finds `data.train_batch_size`.
    """
    prefix, _, leaf = name.rpartition(".")
    names = [*(leaf_keys() if candidates is None else candidates)]
    own = [each for each in names if prefix and each.rpartition(".")[0] == prefix]
    near = [each for each in own if _similarity(leaf, each.rpartition(".")[2]) > VERY_SIMILAR]
    best, best_similarity = None, (LEAST_SIMILARITY, -1.0)
    for candidate in near or names:
        candidate_prefix, _, candidate_leaf = candidate.rpartition(".")
        similarity = (_similarity(leaf, candidate_leaf), _similarity(prefix, candidate_prefix) if prefix else 0.0)
        if similarity > best_similarity:
            best, best_similarity = candidate, similarity
    return best


def _similarity(a: str, b: str) -> float:
    return SequenceMatcher(None, a, b, autojunk=False).ratio()
