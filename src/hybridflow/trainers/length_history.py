"""Past response lengths of prompts, from which the lengths of their next responses are expected."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from hybridflow.errors import CheckpointError

NEWEST_SHARE = 0.5
"""Weight of the newest responses in the moving mean of a prompt's or a data source's length."""


class LengthHistory:
    """The moving mean of the response lengths of each prompt, of each data source, and of all prompts, in tokens."""

    def __init__(self) -> None:
        self._of_prompt: dict[int, float] = {}
        self._of_source: dict[str, float] = {}
        self._of_all = 0.0

    def __bool__(self) -> bool:
        """Return whether any length is known."""
        return bool(self._of_prompt)

    def expected(self, keys: Sequence[int], sources: Sequence[str]) -> np.ndarray:
        """Return the expected response length (prompts,) of each prompt: its own mean, its source's, or that of all.

        `keys`: see `prompt_keys`. Without any known length all are 0.
        """
        known, sourced = self._of_prompt, self._of_source
        columns = zip(keys, sources, strict=True)
        return np.array([known.get(key, sourced.get(source, self._of_all)) for key, source in columns])

    def note(self, keys: Sequence[int], sources: Sequence[str], lengths: Sequence[float]) -> None:
        """Record the mean response length of each prompt of a batch."""
        if not len(keys):
            return
        by_source: dict[str, list[float]] = {}
        for key, source, length in zip(keys, sources, lengths, strict=True):
            self._of_prompt[key] = _moved(self._of_prompt.get(key), length)
            by_source.setdefault(source, []).append(length)
        for source, values in by_source.items():
            self._of_source[source] = _moved(self._of_source.get(source), sum(values) / len(values))
        self._of_all = _moved(self._of_all or None, sum(lengths) / len(lengths))

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "prompts": np.array(list(self._of_prompt), dtype=np.int64),
            "lengths": np.array(list(self._of_prompt.values()), dtype=np.float64),
            "sources": dict(self._of_source),
            "all": self._of_all,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. Raises CheckpointError if it is not one of a history."""
        if missing := [name for name in self.state_dict() if name not in state]:
            raise CheckpointError(
                f"the saved response lengths lack {', '.join(missing)}; resume from another checkpoint."
            )
        self._of_prompt = dict(zip(state["prompts"].tolist(), state["lengths"].tolist(), strict=True))
        self._of_source, self._of_all = dict(state["sources"]), float(state["all"])


def prompt_keys(prompts: Tensor, prompt_mask: Tensor, sources: Sequence[str]) -> list[int]:
    """Return the identity of each prompt, a hash of its tokens and its data source, the same in every run and epoch.

    prompts, prompt_mask: (prompts, prompt_len). Padding does not count.
    """
    rows = zip(prompts, prompt_mask.bool(), sources, strict=True)
    return [_key(ids[mask].numpy().astype("<i8").tobytes() + source.encode()) for ids, mask, source in rows]


def _key(contents: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(contents, digest_size=8).digest(), "little", signed=True)


def _moved(before: float | None, newest: float) -> float:
    return newest if before is None else NEWEST_SHARE * newest + (1 - NEWEST_SHARE) * before
