"""The tree of keys: every leaf by its dotted name, and the one nearest to a misspelled name."""

from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher

from hybridflow.config.sections.base import Section
from hybridflow.config.sections.config import Config

NEAR_ENOUGH = 0.6


def sections(root: Section | None = None, name: str = "") -> Iterator[tuple[str, Section]]:
    """Each section with its dotted name and its defaults, parents first; the root's name is empty."""
    section = Config() if root is None else root
    yield name, section
    for key, value in section:
        if isinstance(value, Section):
            yield from sections(value, f"{name}.{key}" if name else key)


def leaf_keys(config: Config | None = None) -> dict[str, object]:
    """Dotted name -> value of every key, in the order of the sections; without a config, the defaults."""
    return {
        f"{name}.{key}": value
        for name, section in sections(config)
        for key, value in section
        if not isinstance(value, Section)
    }


def nearest_key(name: str, candidates: Iterable[str] | None = None) -> str | None:
    """The candidate (by default: any key) most like `name`, or None where nothing is like it.

    The last part counts first, so that `kl_coeff` finds `algorithm.kl_coef` and `lr` finds
    `actor.optimizer.lr`; what stands before it decides between equals, and then the order of the sections.
    """
    prefix, _, leaf = name.rpartition(".")
    best, best_likeness = None, (NEAR_ENOUGH, -1.0)
    for candidate in leaf_keys() if candidates is None else candidates:
        candidate_prefix, _, candidate_leaf = candidate.rpartition(".")
        likeness = (_likeness(leaf, candidate_leaf), _likeness(prefix, candidate_prefix) if prefix else 0.0)
        if likeness > best_likeness:
            best, best_likeness = candidate, likeness
    return best


def _likeness(a: str, b: str) -> float:
    return SequenceMatcher(None, a, b, autojunk=False).ratio()
