"""How the controller reads the contents of a batch."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from hybridflow.protocol import DataProto, DataProtoFuture

Batch = DataProto | DataProtoFuture


def read(batch: Batch, columns: Iterable[str]) -> DataProto:
    """Return the named columns; the controller reads the contents of a batch only through this function."""
    return DataProtoFuture.of(batch).get(tuple(columns))


def row_lengths(batch: Batch) -> Tensor:
    """Return the number of tokens (batch,) of each row."""
    if "row_lengths" in (DataProtoFuture.of(batch).columns or ()):  # not all tokens after a prompt are generated
        return read(batch, ["row_lengths"]).batch["row_lengths"]
    columns = read(batch, ("prompt_mask", "response_mask")).batch
    return columns["prompt_mask"].sum(-1) + columns["response_mask"].sum(-1)


@dataclass(frozen=True)
class Lengths:
    """Prompt and response tokens of each row, and its group if rows share prompts."""

    prompt_lens: list[int]
    response_lens: list[int]
    group_ids: list[int] | None = None

    @property
    def sequence_lens(self) -> list[int]:
        """The number of tokens of each row."""
        return [prompt + response for prompt, response in zip(self.prompt_lens, self.response_lens, strict=True)]
