"""Batches of a dataset, epoch after epoch, from a position that can be saved and restored."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from hybridflow.data.data_rows import fingerprint
from hybridflow.data.sampler import EpochSampler
from hybridflow.errors import DataConfigError, DataError
from hybridflow.protocol import DataProto
from hybridflow.runtime.observe import get_logger

logger = get_logger(__name__)


class Dataset(Protocol):
    """The interface that the loader requires of a dataset, such as `RLHFDataset` and `SFTDataset`."""

    def __len__(self) -> int: ...

    @property
    def fingerprint(self) -> str:
        """Hash of the rows, in order."""
        ...

    @property
    def numbers(self) -> Sequence[float] | None:
        """Number of each row, for orders that read one; None without."""
        ...

    def collate(self, indices: Sequence[int]) -> DataProto:
        """Return the rows at `indices` as a batch."""
        ...


class BatchLoader:
    """An endless sequence of batches: the last batch of an epoch is followed by the first of the next one.

    With `drop_last` the rows of an epoch that do not fill a batch are left out (logged once; a shuffled order leaves
    out different rows in each epoch); without it they form a shorter batch. `epoch` and `batch_in_epoch` are the
    position of the next batch.
    """

    def __init__(
        self, dataset: Dataset, train_batch_size: int, *, seed: int = 0, order: str = "shuffled", drop_last: bool = True
    ) -> None:
        num_rows = len(dataset)
        if train_batch_size < 1:
            raise DataConfigError(f"train_batch_size={train_batch_size} must be at least 1.")
        if drop_last and train_batch_size > num_rows:
            raise DataConfigError(
                f"train_batch_size={train_batch_size} is larger than the data set of {num_rows} rows; "
                f"use at most {num_rows}, or more data."
            )
        self._dataset, self._batch_size, self._drop_last = dataset, train_batch_size, drop_last
        self._sampler = EpochSampler(num_rows, seed=seed, order=order, numbers=dataset.numbers)
        self._order: list[int] | None = None
        self.epoch = 0
        self.batch_in_epoch = 0
        remainder = num_rows % train_batch_size
        if drop_last and remainder:
            logger.info(
                "%d of %d rows are left out of each epoch: they do not fill a batch of %d.",
                remainder,
                num_rows,
                train_batch_size,
            )

    def __len__(self) -> int:
        """Return the number of batches in one epoch."""
        num_full, remainder = divmod(self._sampler.num_rows, self._batch_size)
        return num_full if self._drop_last or not remainder else num_full + 1

    def __iter__(self) -> Iterator[DataProto]:
        """Yield the remaining batches of the current epoch."""
        epoch = self.epoch
        while self.epoch == epoch:
            yield self.next_batch()

    def next_batch(self) -> DataProto:
        """Return the next batch and advance the position by one batch."""
        if self._order is None:
            self._order = self._sampler.order(self.epoch)
        start = self.batch_in_epoch * self._batch_size
        batch = self._dataset.collate(self._order[start : start + self._batch_size])
        self.batch_in_epoch += 1
        if self.batch_in_epoch == len(self):
            self.epoch, self.batch_in_epoch, self._order = self.epoch + 1, 0, None
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the identity of the data and settings, as values that JSON can hold."""
        return {"epoch": self.epoch, "batch_in_epoch": self.batch_in_epoch, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position: the next batch is the one that would have followed.

        Raises DataError, with nothing changed, for a state of other data or of another seed, order or batch size.
        """
        identity = self._identity()
        missing = [key for key in ("epoch", "batch_in_epoch", *identity) if key not in state]
        if missing:
            raise DataError(f"the saved data position lacks {', '.join(missing)}: it is not a state of this loader.")
        different = [
            f"{key} was {state[key]!r} and is {value!r}" for key, value in identity.items() if state[key] != value
        ]
        if different:
            raise DataConfigError(
                f"the saved data position belongs to other data or settings: {'; '.join(different)}; use the same "
                "files, tokenizer, limits, seed and batch size, or start a new run."
            )
        epoch, batch_in_epoch = state["epoch"], state["batch_in_epoch"]
        are_integers = isinstance(epoch, int) and isinstance(batch_in_epoch, int)
        if not are_integers or epoch < 0 or not 0 <= batch_in_epoch < len(self):
            raise DataError(
                f"the saved data position is epoch {epoch!r}, batch {batch_in_epoch!r}, "
                f"but an epoch has batches 0 to {len(self) - 1}."
            )
        self.epoch, self.batch_in_epoch, self._order = epoch, batch_in_epoch, None

    def _identity(self) -> dict[str, Any]:
        return {
            "num_rows": self._sampler.num_rows,
            "fingerprint": self._dataset.fingerprint,
            "seed": self._sampler.seed,
            "order": self._sampler.name,
            "numbers": fingerprint([self._sampler.numbers]),
            "train_batch_size": self._batch_size,
            "drop_last": self._drop_last,
        }
