"""Finished sequences whose keys and values are kept for requests whose prompts begin with their tokens.

It compares tokens and counts what is reused. It does not know how keys and values are stored.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

Storage = TypeVar("Storage")


@dataclass(frozen=True, eq=False)
class KeptSequence(Generic[Storage]):
    """The tokens of a sequence, encoded, and where their keys and values are; `len` is the number of tokens.

    `routes`: their routes, if these are recorded, see `Completion`.
    """

    tokens: bytes
    storage: Storage
    free: Callable[[], None]
    routes: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens) // array("i").itemsize


class KeptSequences(Generic[Storage]):
    """The kept sequences of an engine, in the order in which they were added.

    `prompt_tokens` counts the prompt tokens of requests that have started, once for each group, and again if a request
    restarts; `reused_tokens` counts those of them whose keys and values were kept.
    """

    def __init__(self) -> None:
        self._kept: dict[int, KeptSequence[Storage]] = {}
        self._sorted: list[tuple[bytes, int]] = []  # their tokens and numbers
        self._num_added = 0
        self.prompt_tokens = self.reused_tokens = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def storages(self) -> list[Storage]:
        """The storages of the kept keys and values."""
        return [kept.storage for kept in self._kept.values()]

    def add(
        self,
        tokens: Sequence[int],
        storage: Storage,
        free: Callable[[], None] = lambda: None,
        routes: Tensor | None = None,
    ) -> None:
        """Keep a sequence; `free` is called when it is dropped, but not when it is taken."""
        kept = self._kept[self._num_added] = KeptSequence(_encoded(tokens), storage, free, routes)
        insort(self._sorted, (kept.tokens, self._num_added))
        self._num_added += 1

    def find(self, prompt: Sequence[int]) -> KeptSequence[Storage] | None:
        """Return the longest sequence with which a prompt begins, shorter than the prompt; None if there is none."""
        number = self._find(prompt)
        return None if number is None else self._kept[number]

    def take(self, prompt: Sequence[int]) -> KeptSequence[Storage] | None:
        """Remove and return what `find` returns, for a request that starts."""
        number = self._find(prompt)
        taken = None if number is None else self._pop(number)
        self.prompt_tokens += len(prompt)
        self.reused_tokens += len(taken) if taken else 0
        return taken

    def drop_oldest(self, *, but: KeptSequence[Storage] | None = None) -> bool:
        """Free the oldest sequence except `but`; return whether there was one."""
        number = next((number for number, kept in self._kept.items() if kept is not but), None)
        if number is None:
            return False
        self._pop(number).free()
        return True

    def clear(self) -> None:
        """Free all sequences."""
        while self.drop_oldest():
            pass

    def discard(self) -> None:
        """Forget all sequences without freeing them, because what holds their keys and values is dropped as a whole."""
        self._kept.clear()
        self._sorted.clear()

    def _pop(self, number: int) -> KeptSequence[Storage]:
        kept = self._kept.pop(number)
        del self._sorted[bisect_left(self._sorted, (kept.tokens, number))]
        return kept

    def _find(self, prompt: Sequence[int]) -> int | None:
        """Return the number of the longest sequence with which a prompt begins, the oldest of those.

        In sorted order the beginnings of a prompt are before it, the longest one last. What stands between them and the
        prompt differs from it somewhere, and the longest beginning is not longer than what they have in common.
        """
        limit = _encoded(prompt[:-1]) if self._kept else b""
        while place := bisect_left(self._sorted, (limit, self._num_added)):
            before = self._sorted[place - 1][0]
            if limit.startswith(before):
                return self._sorted[bisect_left(self._sorted, (before, 0))][1]
            limit = limit[: _num_common(limit, before)]
        return None


def _num_common(first: bytes, second: bytes) -> int:
    """Return the number of bytes at the beginning that two encoded sequences have in common, of whole tokens."""
    low, high, size = 0, min(len(first), len(second)), array("i").itemsize
    while low < high:
        middle = (low + high + 1) // 2
        if first[:middle] == second[:middle]:
            low = middle
        else:
            high = middle - 1
    return low - low % size


def _encoded(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()
