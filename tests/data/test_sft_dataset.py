import logging

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hybridflow.data import BatchLoader, SFTDataset, write_sft_file
from hybridflow.errors import DataError


def test_sft_batch_has_the_layout_of_rl_batches(char_tokenizer, tmp_path):
    file = write_sft_file(tmp_path / "sft.parquet", [("ab", "c"), ("a", "bcd")])
    batch = SFTDataset(file, char_tokenizer(), max_prompt_length=4, max_response_length=4).collate([0, 1])
    # "a" is 4 ... "d" is 7; EOS is 1; padding is 0.
    assert batch.batch["prompts"].tolist() == [[4, 5], [0, 4]]
    assert batch.batch["responses"].tolist() == [[6, 1, 0, 0], [5, 6, 7, 1]]
    assert batch.batch["response_mask"].tolist() == [[True, True, False, False], [True] * 4]
    assert batch.batch["input_ids"].tolist() == [[4, 5, 6, 1, 0, 0], [0, 4, 5, 6, 7, 1]]
    assert batch.batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]]
    assert batch.batch["position_ids"].tolist() == [[0, 1, 2, 3, 3, 3], [0, 0, 1, 2, 3, 4]]
    assert batch.batch["response_mask"].dtype == torch.bool
    assert batch.meta_info["pad_token_id"] == 0


def test_each_response_ends_in_exactly_one_eos(char_tokenizer, tmp_path):
    file = write_sft_file(tmp_path / "sft.parquet", [("a", "b<eos>"), ("a", "")])
    responses = SFTDataset(file, char_tokenizer(), 4, 4).collate([0, 1]).batch["responses"]
    assert responses.tolist() == [[5, 1], [1, 0]]


def test_response_gets_no_bos(char_tokenizer, tmp_path):
    file = write_sft_file(tmp_path / "sft.parquet", [("a", "b")])
    batch = SFTDataset(file, char_tokenizer(template="<bos> $A <eos>"), 4, 4).collate([0])
    assert batch.batch["input_ids"].tolist() == [[2, 4, 5, 1]]


def test_long_examples_are_dropped_and_logged(char_tokenizer, tmp_path, caplog):
    file = write_sft_file(tmp_path / "sft.parquet", [("abc", "b"), ("a", "bcd"), ("a", "bc")])
    with caplog.at_level(logging.WARNING):
        dataset = SFTDataset(file, char_tokenizer(), max_prompt_length=2, max_response_length=3)
    assert (len(dataset), dataset.num_dropped) == (1, 2)
    assert "dropped 2 of 3 examples longer than max_prompt_length=2 or max_response_length=3" in caplog.text
    assert "row 0: prompt 3, response 2 tokens" in caplog.text
    with pytest.raises(DataError, match="no examples are left"):
        SFTDataset(file, char_tokenizer(), 2, 2)


def test_loader_accepts_sft_data_and_fingerprints_differ_by_response(char_tokenizer, tmp_path):
    tokenizer = char_tokenizer()
    dataset = SFTDataset(write_sft_file(tmp_path / "1.parquet", [("a", "b"), ("b", "c")]), tokenizer, 4, 4)
    other = SFTDataset(write_sft_file(tmp_path / "2.parquet", [("a", "b"), ("b", "d")]), tokenizer, 4, 4)
    assert dataset.fingerprint != other.fingerprint
    assert len(BatchLoader(dataset, 2).next_batch()) == 2


def test_malformed_files_and_invalid_limits_are_errors(char_tokenizer, tmp_path):
    tokenizer = char_tokenizer()
    message = [{"role": "user", "content": "a"}]
    pq.write_table(pa.Table.from_pylist([{"prompt": message}]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="column 'response' is missing"):
        SFTDataset(tmp_path / "a.parquet", tokenizer, 4, 4)
    pq.write_table(pa.Table.from_pylist([{"prompt": message, "response": None}]), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b.parquet: row 0: column 'response' has no value"):
        SFTDataset(tmp_path / "b.parquet", tokenizer, 4, 4)
    with pytest.raises(DataError, match="max_response_length=0"):
        SFTDataset(tmp_path / "b.parquet", tokenizer, 4, 0)
