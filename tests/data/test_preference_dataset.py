import logging

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridflow.data import PreferenceDataset, write_preference_file
from hybridflow.errors import DataError

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def test_chosen_response_comes_first_and_pairs_are_numbered(char_tokenizer, tmp_path):
    file = write_preference_file(tmp_path / "p.parquet", [("ab", "c", "de"), ("a", "b", "c")])
    batch = PreferenceDataset(file, char_tokenizer(), 4, 4).collate([0, 1])
    # "a" is 4 ... "e" is 8; EOS is 1; padding is 0.
    assert batch.batch["prompts"].tolist() == [[4, 5], [4, 5], [0, 4], [0, 4]]
    assert batch.batch["responses"].tolist() == [[6, 1, 0], [7, 8, 1], [5, 1, 0], [6, 1, 0]]
    assert batch.batch["response_mask"].sum(-1).tolist() == [2, 3, 2, 2]
    assert batch.batch["group_ids"].tolist() == [0, 0, 1, 1]


def test_reward_model_layout_is_whole_conversations_scored_at_the_end(char_tokenizer, tmp_path):
    file = write_preference_file(tmp_path / "p.parquet", [("a", "b", "cd")])
    tokenizer = char_tokenizer(chat_template=TEMPLATE)
    batch = PreferenceDataset(file, tokenizer, 8, 8, layout="reward_model").collate([0])
    texts = [
        tokenizer.decode(ids[mask.bool()][:-1])
        for ids, mask in zip(batch.batch["input_ids"], batch.batch["attention_mask"], strict=True)
    ]
    assert texts == ["u:a\na:b\n", "u:a\na:cd\n"]
    assert batch.batch["response_mask"].tolist() == [[True], [True]]


def test_pair_with_one_long_response_is_dropped(char_tokenizer, tmp_path, caplog):
    file = write_preference_file(tmp_path / "p.parquet", [("a", "b", "cdef"), ("a", "b", "c")])
    with caplog.at_level(logging.WARNING):
        dataset = PreferenceDataset(file, char_tokenizer(), 4, 4)
    assert (len(dataset), dataset.num_dropped, dataset.longest) == (1, 1, 3)
    assert "dropped 1 of 2 pairs longer than max_prompt_length=4 or max_response_length=4" in caplog.text


def test_pair_of_equal_responses_is_an_error(char_tokenizer, tmp_path):
    file = write_preference_file(tmp_path / "p.parquet", [("a", "b", "c"), ("a", "b", "b")])
    with pytest.raises(DataError, match=r"row 1: 'chosen' and 'rejected' are the same text"):
        PreferenceDataset(file, char_tokenizer(), 4, 4)
    file = write_preference_file(tmp_path / "q.parquet", [("a", "b", "b<eos>")])
    with pytest.raises(DataError, match=r"row 0: 'chosen' and 'rejected' have the same tokens"):
        PreferenceDataset(file, char_tokenizer(), 4, 4)


def test_missing_column_and_non_text_response_are_errors(char_tokenizer, tmp_path):
    message = [{"role": "user", "content": "a"}]
    pq.write_table(pa.Table.from_pylist([{"prompt": message, "chosen": "b"}]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="column 'rejected' is missing"):
        PreferenceDataset(tmp_path / "a.parquet", char_tokenizer(), 4, 4)
    pq.write_table(pa.Table.from_pylist([{"prompt": message, "chosen": 1, "rejected": "b"}]), tmp_path / "b.parquet")
    with pytest.raises(DataError, match="row 0: column 'chosen' must be a text, got 1"):
        PreferenceDataset(tmp_path / "b.parquet", char_tokenizer(), 4, 4)
