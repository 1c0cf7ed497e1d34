"""Batches of a dataset, epoch after epoch, from a position that can be saved and restored exactly."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from hybridflow.data.fingerprint import fingerprint
from hybridflow.data.sampler import EpochSampler
from hybridflow.errors import DataConfigError, DataError
from hybridflow.observability import get_logger
from hybridflow.protocol import DataProto

logger = get_logger(__name__)


class Dataset(Protocol):
    """What the loader needs of a dataset; `RLHFDataset` and `SFTDataset` have it."""

    def __len__(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def numbers(self) -> Sequence[float] | None: ...

    def collate(self, indices: Sequence[int]) -> DataProto: ...


class BatchLoader:
    """Visits a dataset in batches, without end: after the last batch of an epoch comes the first of the next.

    `drop_last` leaves out the rows of an epoch that do not fill a batch (reported once; shuffled, they are others each
    epoch); without it they come as a shorter batch. `epoch` and `batch_in_epoch` say which batch is next.
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
        """Batches in one epoch."""
        num_full, remainder = divmod(self._sampler.num_rows, self._batch_size)
        return num_full if self._drop_last or not remainder else num_full + 1

    def __iter__(self) -> Iterator[DataProto]:
        """The batches left in the current epoch: all of them, or the rest after a restored position."""
        epoch = self.epoch
        while self.epoch == epoch:
            yield self.next_batch()

    def next_batch(self) -> DataProto:
        """The next batch; moves the position by one batch."""
        if self._order is None:
            self._order = self._sampler.order(self.epoch)
        start = self.batch_in_epoch * self._batch_size
        batch = self._dataset.collate(self._order[start : start + self._batch_size])
        self.batch_in_epoch += 1
        if self.batch_in_epoch == len(self):
            self.epoch, self.batch_in_epoch, self._order = self.epoch + 1, 0, None
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position and what it is a position in, as plain values that JSON can hold."""
        return {"epoch": self.epoch, "batch_in_epoch": self.batch_in_epoch, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position: the next batch is the one that would have followed.

        Raises `DataError` for a state of other data or of another seed, order or batch size, and changes nothing then.
        """
        identity = self._identity()
        missing = [key for key in ("epoch", "batch_in_epoch", *identity) if key not in state]
        if missing:
            raise DataError(f"the saved data position lacks {', '.join(missing)}; it is not a state of this loader.")
        different = [
            f"{key} was {state[key]!r} and is {value!r}" for key, value in identity.items() if state[key] != value
        ]
        if different:
            raise DataConfigError(
                f"the saved data position belongs to other data or settings: {'; '.join(different)}. "
                f"Use the same files, tokenizer, limits, seed and batch size, or start a new run."
            )
        epoch, batch_in_epoch = state["epoch"], state["batch_in_epoch"]
        whole = isinstance(epoch, int) and isinstance(batch_in_epoch, int)
        if not whole or epoch < 0 or not 0 <= batch_in_epoch < len(self):
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
