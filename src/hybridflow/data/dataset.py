"""The prompt dataset: parquet files in, prompt batches out. The loader decides the order."""

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from hybridflow.config.sections.data import OverlongName
from hybridflow.data.chat_prompts import PromptEncoder, read_messages
from hybridflow.data.data_rows import PLAIN, fingerprint, read_data_rows
from hybridflow.data.example_dataset import check_indices
from hybridflow.data.layout import pad_left
from hybridflow.data.parquet_rows import Row, shorten
from hybridflow.data.row_forms import RowForm
from hybridflow.data.tokenizer import pad_token_id
from hybridflow.errors import DataConfigError, DataError
from hybridflow.protocol import DataProto
from hybridflow.runtime.observe import get_logger

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = get_logger(__name__)

OVERLONG: tuple[str, ...] = get_args(OverlongName)


class RLHFDataset:
    """Prompts of one or several files, of parquet with columns `prompt`, `data_source`, `reward_model`, `extra_info`.

    Files of other columns, and .jsonl, .json and .csv files, are read by their `form`.

    `prompt` holds chat messages, rendered by the tokenizer's chat template if it has one and `chat_template` is true,
    otherwise joined by newlines. `overlong` is the treatment of prompts of more than `max_prompt_length` tokens.
    `max_samples` > 0 uses only the first rows (before any is dropped). `order_by` names a column, or an entry of
    `extra_info`, with a number for each row. `extra_info` may be absent. Rows are tokenized once, on construction.
    Raises DataError, naming file, row and column, for a malformed file.
    """

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        tokenizer: "PreTrainedTokenizerBase",
        max_prompt_length: int,
        overlong: OverlongName = "drop",
        chat_template: bool = True,
        max_samples: int = 0,
        order_by: str = "",
        form: RowForm = PLAIN,
    ) -> None:
        if overlong not in OVERLONG:
            raise DataConfigError(f"overlong={overlong!r} is not one of {', '.join(OVERLONG)}.")
        if max_prompt_length < 1 or max_samples < 0:
            raise DataConfigError(
                f"max_prompt_length={max_prompt_length} must be at least 1 and max_samples={max_samples} at least 0."
            )
        self._pad_id = pad_token_id(tokenizer)
        rows = read_data_rows(files, "prompts", form, order_by, max_samples)
        self._records = [_read_record(row) for row in rows]
        self.numbers = [row.number(order_by) for row in rows] if order_by else None
        """Number of each prompt in the column `order_by`; None without `order_by`."""

        encoder = PromptEncoder(tokenizer, chat_template)
        texts = [
            encoder.text(record["raw_prompts"], row.place) for row, record in zip(rows, self._records, strict=True)
        ]
        self._tokenizer = tokenizer
        self._prompt_ids = encoder.encode(texts, [row.place for row in rows])
        for record, text in zip(self._records, texts, strict=True):
            record["prompt_texts"] = text
        for row, ids in zip(rows, self._prompt_ids, strict=True):
            if not ids:
                raise DataError(f"{row.place}: the prompt has no tokens; its text is {shorten(row.values['prompt'])}.")
            unknown, bos = tokenizer.unk_token_id, tokenizer.bos_token_id
            if unknown in ids and all(token in (unknown, bos) for token in ids):
                raise DataError(
                    f"{row.place}: the tokenizer knows no part of the prompt, all of whose tokens are "
                    f"{tokenizer.unk_token!r}; its text is {shorten(row.values['prompt'])}. Use the tokenizer of the "
                    "model, or another model."
                )
        self.num_dropped = self._limit_length(rows, max_prompt_length, overlong)
        self.longest_prompt = max(map(len, self._prompt_ids))
        """Length of the longest prompt in tokens."""
        self.fingerprint = fingerprint(
            [ids, record["data_sources"], record["ground_truths"], record["extra_infos"]]
            for ids, record in zip(self._prompt_ids, self._records, strict=True)
        )
        """Hash of the prompts' tokens, data sources, ground truths and extra infos, in order."""

    def __len__(self) -> int:
        """Return the number of prompts, without the dropped ones."""
        return len(self._prompt_ids)

    @property
    def data_sources(self) -> list[str]:
        """Distinct data sources of the prompts, sorted."""
        return sorted({record["data_sources"] for record in self._records})

    def samples(self) -> Iterator[dict[str, Any]]:
        """Yield what a reward function gets of each prompt."""
        for record in self._records:
            names = ("data_source", "ground_truth", "extra_info")
            yield {name: record[f"{name}s"] for name in names}

    def weigh_sources(self, weights: Mapping[str, float]) -> None:
        """Let `numbers` be weights with which each data source gets its share of the prompts drawn."""
        counts = Counter(record["data_sources"] for record in self._records)
        sources = [record["data_sources"] for record in self._records]
        self.numbers = [weights[source] / counts[source] for source in sources]

    def prompt_ids(self, index: int) -> list[int]:
        """Return the token ids of one prompt, without padding."""
        return list(self._prompt_ids[index])

    def collate(self, indices: Sequence[int]) -> DataProto:
        """Return the rows at `indices` as a batch.

        Tensors, (batch, longest of these prompts), padded on the left: `prompts` int64, `prompt_mask` bool.
        Non-tensors: `raw_prompts` (chat messages), `prompt_texts` (as the model reads them), `data_sources`,
        `ground_truths`, `extra_infos`; the batch owns its copies. `meta_info["pad_token_id"]` is the padding value.
        """
        check_indices(indices, len(self))
        prompts, mask = pad_left([self._prompt_ids[i] for i in indices], self._pad_id)
        tensors = {"prompts": prompts, "prompt_mask": mask.bool()}
        non_tensors = {name: np.empty(len(indices), dtype=object) for name in _RECORD_COLUMNS}
        for name, column in non_tensors.items():
            for position, i in enumerate(indices):
                column[position] = copy.deepcopy(self._records[i][name])
        return DataProto.from_dict(tensors=tensors, non_tensors=non_tensors, meta_info={"pad_token_id": self._pad_id})

    def _limit_length(self, rows: list[Row], max_prompt_length: int, overlong: OverlongName) -> int:
        """Apply the limit to the prompts; return how many were dropped."""
        too_long = [i for i, ids in enumerate(self._prompt_ids) if len(ids) > max_prompt_length]
        if not too_long:
            return 0
        first = f"{rows[too_long[0]].place}: {len(self._prompt_ids[too_long[0]])} tokens"
        if overlong == "error":
            raise DataError(
                f"{first}, but max_prompt_length={max_prompt_length} "
                f"({len(too_long)} of {len(rows)} prompts are longer); raise the limit, or drop or truncate them with "
                "data.overlong_prompts."
            )
        if overlong == "drop":
            dropped = set(too_long)
            self._prompt_ids = [ids for i, ids in enumerate(self._prompt_ids) if i not in dropped]
            self._records = [record for i, record in enumerate(self._records) if i not in dropped]
            if self.numbers is not None:
                self.numbers = [number for i, number in enumerate(self.numbers) if i not in dropped]
            if not self._prompt_ids:
                raise DataConfigError(
                    f"all {len(rows)} prompts are longer than max_prompt_length={max_prompt_length} (the first is "
                    f"{first}); raise the limit."
                )
        else:
            for i in too_long:
                self._prompt_ids[i] = truncate(self._prompt_ids[i], max_prompt_length, overlong)
                self._records[i]["prompt_texts"] = self._tokenizer.decode(self._prompt_ids[i])
        logger.warning(
            "%s %d of %d prompts longer than max_prompt_length=%d tokens (the first is %s).",
            "Dropped" if overlong == "drop" else "Truncated",
            len(too_long),
            len(rows),
            max_prompt_length,
            first,
        )
        return len(too_long) if overlong == "drop" else 0


_RECORD_COLUMNS = ("raw_prompts", "prompt_texts", "data_sources", "ground_truths", "extra_infos")


def _read_record(row: Row) -> dict[str, Any]:
    reward_model, extra_info = row.values["reward_model"], row.values["extra_info"]
    if extra_info is not None and not isinstance(extra_info, dict):
        raise DataError(f"{row.place}: column 'extra_info' must hold named values, got {shorten(extra_info)}.")
    return {
        "raw_prompts": read_messages(row),
        "data_sources": row.text("data_source"),
        "ground_truths": reward_model["ground_truth"],
        "extra_infos": extra_info or {},
    }


def truncate(ids: list[int], max_length: int, side: str) -> list[int]:
    """Cut ids to `max_length` tokens.

    "truncate-left" removes from the start, "truncate-right" from the end, "truncate-middle" keeps half of the limit at
    the start and the rest at the end.
    """
    if len(ids) <= max_length:
        return ids
    if side == "truncate-left":
        return ids[len(ids) - max_length :]
    if side == "truncate-right":
        return ids[:max_length]
    num_start = max_length // 2
    return ids[:num_start] + ids[len(ids) - (max_length - num_start) :]
