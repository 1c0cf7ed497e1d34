"""All rows of an episode as one: estimators, rewards and metrics count episodes."""

from collections.abc import Mapping

from torch import Tensor

from hybridflow.protocol import DataProtoFuture
from hybridflow.trainers.read_columns import Batch, read


class EpisodeRows:
    """The rows of each episode in a batch; in a batch without episodes, each row stands alone.

    The rows of an episode are as many for each, and follow each other in the order of `row_ids`, without these in that
    of the batch.
    """

    def __init__(self, batch: Batch) -> None:
        present = DataProtoFuture.of(batch).columns or ()
        self.size, self._order = 1, None
        if "episode_ids" in present:
            names = [name for name in ("episode_ids", "row_ids") if name in present]
            columns = read(batch, names).batch
            self.size = len(batch) // len(columns["episode_ids"].unique())
            if self.size > 1 and "row_ids" in columns:
                self._order = columns["row_ids"].argsort()

    def joined(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return columns with one row for each episode: its tokens side by side, other values of its first row.

        columns: (batch, ...), of which those as wide as `response_mask` are of tokens.
        """
        if self.size == 1:
            return dict(columns)
        width = columns["response_mask"].shape[1] if "response_mask" in columns else None

        def joined(column: Tensor) -> Tensor:
            ordered = column if self._order is None else column[self._order]
            if width is None or column.ndim < 2 or column.shape[1] != width:
                return ordered[:: self.size]
            return ordered.reshape(-1, self.size * width, *column.shape[2:])

        return {name: joined(column) for name, column in columns.items()}

    def split(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return columns of episodes for their rows: tokens of each row, other values for every row of an episode.

        columns: (episodes, size * response_len), (episodes, 1) or (episodes,).
        """
        if self.size == 1:
            return dict(columns)

        def split(column: Tensor) -> Tensor:
            if column.ndim == 1 or column.shape[1] == 1:
                rows = column.repeat_interleave(self.size, 0)
            else:
                rows = column.reshape(len(column) * self.size, -1)
            return rows if self._order is None else rows[self._order.argsort()]

        return {name: split(column) for name, column in columns.items()}
