import json
import logging

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hybridflow.data import RLHFDataset, prompt_row, write_prompt_file
from hybridflow.errors import DataError

CHATML = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def test_collate_pads_prompts_on_the_left(char_tokenizer, prompt_file):
    dataset = RLHFDataset(prompt_file(["ab", "c", "abcd"]), char_tokenizer(), max_prompt_length=8)
    batch = dataset.collate([1, 0])
    # "a" is 4, "b" 5, "c" 6; padding is 0.
    assert batch.batch["prompts"].tolist() == [[0, 6], [4, 5]]
    assert batch.batch["prompt_mask"].tolist() == [[False, True], [True, True]]
    assert batch.batch["prompts"].dtype == torch.int64
    assert batch.meta_info["pad_token_id"] == 0
    assert batch.non_tensor_batch["raw_prompts"][0] == [{"role": "user", "content": "c"}]
    assert batch.non_tensor_batch["data_sources"].tolist() == ["copy", "copy"]
    assert batch.non_tensor_batch["ground_truths"].tolist() == ["1", "0"]
    assert batch.non_tensor_batch["extra_infos"][1] == {"split": "train", "index": 0, "answer": "", "question": ""}
    assert {array.dtype for array in batch.non_tensor_batch.values()} == {np.dtype(object)}


def test_files_are_concatenated_and_max_samples_keeps_the_first_rows(char_tokenizer, prompt_file):
    files = [prompt_file(["a", "b"], "1.parquet"), prompt_file(["c", "d"], "2.parquet")]
    whole = RLHFDataset(files, char_tokenizer(), 8)
    assert [whole.prompt_ids(i) for i in range(len(whole))] == [[4], [5], [6], [7]]
    assert len(RLHFDataset(files, char_tokenizer(), 8, max_samples=3)) == 3
    assert len(RLHFDataset(files, char_tokenizer(), 8, max_samples=9)) == 4


def test_files_may_have_ground_truths_of_different_types(char_tokenizer, prompt_file, tmp_path):
    row = prompt_row(
        data_source="countdown", prompt="a", ground_truth={"target": 5, "numbers": [2, 3]}, split="train", index=0
    )
    files = [prompt_file(["a"]), write_prompt_file(tmp_path / "struct.parquet", [row])]
    truths = RLHFDataset(files, char_tokenizer(), 8).collate([0, 1]).non_tensor_batch["ground_truths"]
    assert truths.tolist() == ["0", {"target": 5, "numbers": [2, 3]}]


def test_changing_a_batch_does_not_change_the_dataset(char_tokenizer, prompt_file):
    dataset = RLHFDataset(prompt_file(["a"]), char_tokenizer(), 8)
    first = dataset.collate([0])
    first.non_tensor_batch["extra_infos"][0]["index"] = 99
    first.non_tensor_batch["raw_prompts"][0][0]["content"] = "changed"
    first.batch["prompts"].fill_(9)
    second = dataset.collate([0])
    assert second.non_tensor_batch["extra_infos"][0]["index"] == 0
    assert second.non_tensor_batch["raw_prompts"][0][0]["content"] == "a"
    assert second.batch["prompts"].tolist() == [[4]]


def test_chat_template_adds_the_generation_prompt_and_one_bos(char_tokenizer, prompt_file):
    tokenizer = char_tokenizer(template="<bos> $A", chat_template=CHATML)
    dataset = RLHFDataset(prompt_file(["b"]), tokenizer, 32)
    assert tokenizer.decode(dataset.prompt_ids(0)) == "<bos>u:b\na:"
    assert dataset.prompt_ids(0).count(2) == 1


def test_without_template_messages_are_joined_by_newlines_after_one_bos(char_tokenizer, tmp_path):
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    row = prompt_row(data_source="x", prompt=messages, ground_truth="1", split="train", index=0)
    file = write_prompt_file(tmp_path / "a.parquet", [row])
    plain = RLHFDataset(file, char_tokenizer(), 32)
    assert plain.prompt_ids(0) == [4, 30, 5]
    with_bos = RLHFDataset(file, char_tokenizer(template="<bos> $A <eos>"), 32)
    assert with_bos.prompt_ids(0) == [2, 4, 30, 5]  # the EOS that the tokenizer would add is not part of a prompt
    switched_off = RLHFDataset(file, char_tokenizer(chat_template=CHATML), 32, chat_template=False)
    assert switched_off.prompt_ids(0) == [4, 30, 5]


def test_bos_in_the_text_is_not_doubled(char_tokenizer, prompt_file):
    dataset = RLHFDataset(prompt_file(["<bos>a", "a"]), char_tokenizer(template="<bos> $A"), 32)
    assert [dataset.prompt_ids(0), dataset.prompt_ids(1)] == [[2, 4], [2, 4]]


def test_overlong_prompts_are_dropped_and_logged(char_tokenizer, prompt_file, caplog):
    with caplog.at_level(logging.WARNING):
        dataset = RLHFDataset(prompt_file(["abc", "abcd", "d"]), char_tokenizer(), 3)
    assert (len(dataset), dataset.num_dropped) == (2, 1)
    assert dataset.collate([0, 1]).non_tensor_batch["ground_truths"].tolist() == ["0", "2"]
    assert "Dropped 1 of 3 prompts longer than max_prompt_length=3" in caplog.text
    assert "prompts.parquet: row 1: 4 tokens" in caplog.text


@pytest.mark.parametrize(
    ("overlong", "expected"),
    [
        ("truncate-left", [6, 7, 8]),
        ("truncate-right", [4, 5, 6]),
        ("truncate-middle", [4, 7, 8]),
    ],
)
def test_overlong_prompts_are_truncated(char_tokenizer, prompt_file, overlong, expected):
    dataset = RLHFDataset(prompt_file(["abcde", "a"]), char_tokenizer(), 3, overlong=overlong)
    assert [dataset.prompt_ids(0), dataset.prompt_ids(1)] == [expected, [4]]
    assert dataset.num_dropped == 0


def test_overlong_error_names_the_first_long_prompt(char_tokenizer, prompt_file):
    with pytest.raises(DataError, match=r"prompts.parquet: row 1: 4 tokens, but max_prompt_length=3 \(1 of 2"):
        RLHFDataset(prompt_file(["a", "abcd"]), char_tokenizer(), 3, overlong="error")
    with pytest.raises(DataError, match="all 1 prompts are longer than max_prompt_length=3"):
        RLHFDataset(prompt_file(["abcd"]), char_tokenizer(), 3)


def test_fingerprint_depends_on_order_ground_truth_and_tokens(char_tokenizer, prompt_file):
    tokenizer = char_tokenizer()
    first = RLHFDataset(prompt_file(["a", "b"]), tokenizer, 8)
    assert first.fingerprint == RLHFDataset(prompt_file(["a", "b"], "copy.parquet"), tokenizer, 8).fingerprint
    assert first.fingerprint != RLHFDataset(prompt_file(["b", "a"]), tokenizer, 8).fingerprint
    assert first.fingerprint != RLHFDataset(prompt_file(["a", "b"]), char_tokenizer(template="<bos> $A"), 8).fingerprint


def good_row() -> dict:
    return {
        "prompt": [{"role": "user", "content": "a"}],
        "data_source": "x",
        "reward_model": {"style": "rule", "ground_truth": "1"},
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": "a"}, "column 'prompt' must be a list of chat messages"),
        ({"prompt": None}, "column 'prompt' has no value (null)"),
        ({"prompt": 3}, "column 'prompt' must be a list of chat messages"),
        ({"prompt": []}, "has no messages"),
        ({"prompt": [{"content": "a"}]}, "message 0 of 'prompt' needs a role"),
        ({"prompt": [{"role": "user", "content": None}]}, "content of message 0 of 'prompt' must be a text, got None"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            "a part that is not a text: {'type': 'image'}",
        ),
        ({"prompt": [{"role": "user", "content": ""}]}, "the prompt has no tokens"),
        ({"data_source": 3}, "column 'data_source' must be a text, got 3"),
        ({"data_source": None}, "column 'data_source' has no value (null)"),
        ({"reward_model": "72"}, "column 'reward_model' must hold style and ground_truth"),
        ({"reward_model": {"style": "rule"}}, "column 'reward_model' must hold style and ground_truth"),
        ({"extra_info": "x"}, "column 'extra_info' must hold named values, got 'x'"),
        ({"images": [b"png"]}, "column 'images' holds data"),
        ({"audios": ["a.wav"]}, "images, audio or video are not supported yet"),
    ],
)
def test_malformed_row_is_an_error_with_file_row_and_column(char_tokenizer, tmp_path, changes, message):
    file = tmp_path / "bad.parquet"
    pq.write_table(pa.Table.from_pylist([{**good_row(), **changes}]), file)
    with pytest.raises(DataError) as error:
        RLHFDataset(file, char_tokenizer(), 8)
    assert message in str(error.value)
    assert f"{file}: row 0" in str(error.value)


def test_malformed_row_is_counted_within_its_file(char_tokenizer, prompt_file, tmp_path):
    bad = tmp_path / "bad.parquet"
    pq.write_table(pa.Table.from_pylist([good_row(), {**good_row(), "data_source": None}]), bad)
    with pytest.raises(DataError, match=r"bad.parquet: row 1: column 'data_source'"):
        RLHFDataset([prompt_file(["a", "b"]), bad], char_tokenizer(), 8)


def test_empty_media_columns_and_missing_extra_info_are_accepted(char_tokenizer, tmp_path):
    file = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([{**good_row(), "images": None}, {**good_row(), "images": []}]), file)
    assert RLHFDataset(file, char_tokenizer(), 8).collate([1]).non_tensor_batch["extra_infos"][0] == {}


def test_missing_empty_and_unreadable_files_are_errors(char_tokenizer, tmp_path):
    tokenizer = char_tokenizer()
    with pytest.raises(DataError, match="no data files were given"):
        RLHFDataset([], tokenizer, 8)
    with pytest.raises(DataError, match=r"nowhere.parquet: no such file"):
        RLHFDataset(tmp_path / "nowhere.parquet", tokenizer, 8)
    (tmp_path / "zero.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=r"zero.parquet: not a readable parquet file"):
        RLHFDataset(tmp_path / "zero.parquet", tokenizer, 8)
    pq.write_table(pa.Table.from_pylist([good_row()]).slice(0, 0), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows.parquet: the file has no rows"):
        RLHFDataset(tmp_path / "rows.parquet", tokenizer, 8)
    pq.write_table(pa.Table.from_pylist([{"prompt": [{"role": "user", "content": "a"}]}]), tmp_path / "col.parquet")
    with pytest.raises(DataError, match=r"col.parquet: column 'data_source' is missing; the file has prompt"):
        RLHFDataset(tmp_path / "col.parquet", tokenizer, 8)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_raw_question_answer_file_names_the_prepare_command(char_tokenizer, tmp_path, suffix):
    file, row = tmp_path / f"raw{suffix}", {"question": "1 + 1", "answer": "#### 2"}
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([row]), file)
    else:
        file.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match="question, answer") as error:
        RLHFDataset(file, char_tokenizer(), 8)
    assert f"`hybridflow prepare gsm8k --train-file TRAIN{suffix} --test-file TEST{suffix}`" in str(error.value)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "the file has no rows"),
        ("no json\n", "line 1: is not JSON"),
        ("[1]\n", "line 1: is a list; expected an object with prompt"),
        (
            '{"text": "a"}\n',
            r"'prompt' is missing; the row has text\. Name the columns in data\.columns, as in {prompt = 'text'}",
        ),
    ],
)
def test_other_json_lines_are_an_error(char_tokenizer, tmp_path, content, problem):
    (tmp_path / "other.jsonl").write_text(content)
    with pytest.raises(DataError, match=problem):
        RLHFDataset(tmp_path / "other.jsonl", char_tokenizer(), 8)


def test_prompt_texts_are_what_the_model_reads(char_tokenizer, prompt_file):
    tokenizer = char_tokenizer(chat_template=CHATML)
    whole = RLHFDataset(prompt_file(["b"]), tokenizer, 32).collate([0])
    assert whole.non_tensor_batch["prompt_texts"].tolist() == ["<bos>u:b\na:"]
    cut = RLHFDataset(prompt_file(["bcd"]), tokenizer, 3, overlong="truncate-left").collate([0])
    assert cut.non_tensor_batch["prompt_texts"].tolist() == ["\na:"]


def test_invalid_options_and_indices_are_errors(char_tokenizer, prompt_file):
    file, tokenizer = prompt_file(["a"]), char_tokenizer()
    with pytest.raises(DataError, match="overlong='cut' is not one of drop, error, truncate-left"):
        RLHFDataset(file, tokenizer, 8, overlong="cut")  # pyright: ignore[reportArgumentType]
    with pytest.raises(DataError, match="max_prompt_length=0"):
        RLHFDataset(file, tokenizer, 0)
    with pytest.raises(DataError, match="index=1 is out of range: the data set has rows 0 to 0"):
        RLHFDataset(file, tokenizer, 8).collate([0, 1])


def test_error_of_the_chat_template_names_the_row(char_tokenizer, prompt_file):
    tokenizer = char_tokenizer(chat_template="{{ raise_exception('no user messages') }}")
    with pytest.raises(DataError, match=r"prompts.parquet: row 0: .*no user messages"):
        RLHFDataset(prompt_file(["a"]), tokenizer, 8)


def test_eos_replaces_a_missing_padding_token(char_tokenizer, prompt_file):
    file = prompt_file(["ab", "a"])
    assert RLHFDataset(file, char_tokenizer(eos_token="<eos>"), 8).collate([0, 1]).batch["prompts"].tolist() == [
        [4, 5],
        [1, 4],
    ]
    with pytest.raises(DataError, match="no EOS token"):
        RLHFDataset(file, char_tokenizer(bos_token="<bos>"), 8)
