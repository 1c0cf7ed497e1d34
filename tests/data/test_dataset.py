"""Prompts of parquet, JSON, CSV and saved data sets: how they are read, named, mapped, encoded and checked."""

import json
import logging

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from fixtures.row_files import SUFFIXES, write_rows
from hybridflow.data import RLHFDataset, prompt_row, write_prompt_file
from hybridflow.data.chat_prompts import PromptEncoder, _warn_without_generation_prompt, read_messages
from hybridflow.data.data_rows import read_data_rows
from hybridflow.data.parquet_rows import Row
from hybridflow.data.row_forms import RowForm
from hybridflow.errors import DataConfigError, DataError

CHATML = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
USER = [{"role": "user", "content": "a"}]


def texts_of(rows):
    return [row.values["prompt"][0]["content"] for row in rows]


def test_collate_pads_prompts_on_the_left(char_tokenizer, prompt_file):
    dataset = RLHFDataset(prompt_file(["ab", "c", "abcd"]), char_tokenizer(), max_prompt_length=8)
    batch = dataset.collate([1, 0])
    # "a" is 4, "b" 5, "c" 6; padding is 0.
    assert batch.batch["prompts"].tolist() == [[0, 6], [4, 5]]
    assert batch.batch["prompt_mask"].tolist() == [[False, True], [True, True]]
    assert batch.batch["prompts"].dtype == torch.int64
    assert batch.meta_info["pad_token_id"] == 0
    arrays = batch.non_tensor_batch
    assert arrays["raw_prompts"][0] == [{"role": "user", "content": "c"}]
    assert (arrays["data_sources"].tolist(), arrays["ground_truths"].tolist()) == (["copy", "copy"], ["1", "0"])
    assert arrays["extra_infos"][1] == {"split": "train", "index": 0, "answer": "", "question": ""}
    assert {array.dtype for array in arrays.values()} == {np.dtype(object)}
    arrays["extra_infos"][1]["index"], arrays["raw_prompts"][1][0]["content"] = 99, "changed"
    batch.batch["prompts"].fill_(9)
    again = dataset.collate([0])
    assert again.batch["prompts"].tolist() == [[4, 5]]
    assert again.non_tensor_batch["extra_infos"][0]["index"] == 0
    assert again.non_tensor_batch["raw_prompts"][0][0]["content"] == "ab"


def test_files_are_concatenated_and_may_have_truths_of_different_types(char_tokenizer, prompt_file, tmp_path):
    truth = {"target": 5, "numbers": [2, 3]}
    row = prompt_row(data_source="countdown", prompt="c", ground_truth=truth, split="train", index=0)
    files = [prompt_file(["a", "b"]), write_prompt_file(tmp_path / "struct.parquet", [row])]
    whole = RLHFDataset(files, char_tokenizer(), 8)
    assert [whole.prompt_ids(i) for i in range(len(whole))] == [[4], [5], [6]]
    assert whole.collate([0, 2]).non_tensor_batch["ground_truths"].tolist() == ["0", truth]
    assert [len(RLHFDataset(files, char_tokenizer(), 8, max_samples=most)) for most in (2, 9)] == [2, 3]


# Encoding


@pytest.mark.parametrize(
    ("template", "options", "expected"),
    [
        ({}, {}, "a\nb"),
        ({"template": "<bos> $A <eos>"}, {}, "<bos>a\nb"),  # an EOS is not part of a prompt
        ({"template": "<bos> $A", "chat_template": CHATML}, {}, "<bos>s:a\nu:b\na:"),
        ({"chat_template": CHATML}, {"chat_template": False}, "a\nb"),
    ],
)
def test_messages_are_joined_or_rendered_with_one_bos(char_tokenizer, tmp_path, template, options, expected):
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    row = prompt_row(data_source="x", prompt=messages, ground_truth="1", split="train", index=0)
    tokenizer = char_tokenizer(**template)
    dataset = RLHFDataset(write_prompt_file(tmp_path / "a.parquet", [row]), tokenizer, 32, **options)
    assert tokenizer.decode(dataset.prompt_ids(0)) == expected
    if not template:
        assert dataset.prompt_ids(0) == [4, 30, 5]


def test_bos_in_the_text_is_not_doubled(char_tokenizer, prompt_file):
    dataset = RLHFDataset(prompt_file(["<bos>a", "a"]), char_tokenizer(template="<bos> $A"), 32)
    assert [dataset.prompt_ids(0), dataset.prompt_ids(1)] == [[2, 4], [2, 4]]


def test_prompt_texts_are_what_the_model_reads(char_tokenizer, prompt_file):
    tokenizer = char_tokenizer(chat_template=CHATML)
    for text, length, expected in (("b", 32, "<bos>u:b\na:"), ("bcd", 3, "\na:")):
        dataset = RLHFDataset(prompt_file([text]), tokenizer, length, overlong="truncate-left")
        assert dataset.collate([0]).non_tensor_batch["prompt_texts"].tolist() == [expected]


@pytest.mark.parametrize(
    ("overlong", "expected"),
    [("drop", [[4]]), ("truncate-left", [[6, 7, 8], [4]]), ("truncate-right", [[4, 5, 6], [4]]),
     ("truncate-middle", [[4, 7, 8], [4]])],
)  # fmt: skip
def test_overlong_prompts_are_dropped_or_truncated(char_tokenizer, prompt_file, overlong, expected):
    dataset = RLHFDataset(prompt_file(["abcde", "a"]), char_tokenizer(), 3, overlong=overlong)
    assert [dataset.prompt_ids(i) for i in range(len(dataset))] == expected
    assert dataset.num_dropped == 2 - len(expected)
    assert dataset.collate([len(expected) - 1]).non_tensor_batch["ground_truths"].tolist() == ["1"]


def test_fingerprint_depends_on_order_ground_truth_and_tokens(char_tokenizer, prompt_file):
    tokenizer = char_tokenizer()
    first = RLHFDataset(prompt_file(["a", "b"]), tokenizer, 8)
    assert first.fingerprint == RLHFDataset(prompt_file(["a", "b"], "copy.parquet"), tokenizer, 8).fingerprint
    assert first.fingerprint != RLHFDataset(prompt_file(["b", "a"]), tokenizer, 8).fingerprint
    assert first.fingerprint != RLHFDataset(prompt_file(["a", "b"]), char_tokenizer(template="<bos> $A"), 8).fingerprint


NO_PROMPT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "warns"),
    [
        (NO_PROMPT, True),
        (NO_PROMPT + "{% if add_generation_prompt %}<assistant>{% endif %}", False),
        ("{% for m in messages %}{{ '[' if m['role'] == 'user' }}{{ m['content'] }}{% endfor %}", False),
        ("{{ raise_exception('one message') if messages[1:] else 'a' }}", False),
        (None, False),
    ],
)
def test_a_chat_template_without_generation_prompt_warns_once(char_tokenizer, caplog, template, warns):
    _warn_without_generation_prompt.cache_clear()
    encoder = PromptEncoder(char_tokenizer(chat_template=template), chat_template=True)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            encoder.text(USER, "row 0")
    assert len(caplog.records) == warns
    if warns:
        assert "renders the same text with and without add_generation_prompt" in caplog.text
        assert "prompts end before '<assistant>'" in caplog.text


def test_text_parts_of_a_message_are_one_text():
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    row = Row("file: row 0", {"prompt": [{"role": "user", "content": parts}]})
    assert read_messages(row) == [{"role": "user", "content": "a b"}]


# Forms of rows

RECORDS = [
    {"question": "w3 w4", "gold": {"value": "1"}, "level": 2},
    {"question": "w5", "gold": {"value": "2"}, "level": 1},
]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_columns_are_named_and_others_become_extra_info(tmp_path, char_tokenizer, suffix):
    form = RowForm({"prompt": "question", "answer": "gold.value"})
    file = write_rows(tmp_path / f"train{suffix}", RECORDS)
    dataset = RLHFDataset(file, char_tokenizer(), 8, order_by="level", form=form)
    arrays = dataset.collate([0, 1]).non_tensor_batch
    assert arrays["ground_truths"].tolist() == ["1", "2"]
    assert arrays["raw_prompts"][0] == [{"role": "user", "content": "w3 w4"}]
    assert arrays["extra_infos"][1] == {"split": "train", "index": 1, "level": 1}
    assert dataset.numbers == [2, 1]


def test_the_same_records_as_json_or_csv_are_the_same_data(tmp_path, char_tokenizer):
    records = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    files = [write_rows(tmp_path / f"train{suffix}", records) for suffix in SUFFIXES[:3]]
    assert len({RLHFDataset(file, char_tokenizer(), 8).fingerprint for file in files}) == 1


def test_a_file_with_our_columns_is_read_as_it_is_beside_others(tmp_path, prompt_file):
    plain = prompt_file(["a"])
    (alone,) = read_data_rows(plain, "prompts")
    first, second = read_data_rows([plain, write_rows(tmp_path / "b.jsonl", [{"prompt": "w4"}])], "prompts")
    assert alone.values.items() <= first.values.items()
    assert (second.place, second.values["reward_model"]["ground_truth"]) == (f"{tmp_path}/b.jsonl: line 1", "")


def test_a_function_maps_and_drops_records(tmp_path):
    (tmp_path / "own.py").write_text(
        "def form(record):\n"
        "    if record['level'] < 2:\n        return None\n"
        "    return {'prompt': record['question'].upper(), 'answer': record['gold']['value']}\n"
        "def fails(record):\n    return record['none']\n"
        "def wrong(record):\n    return 'text'\n"
    )
    file = write_rows(tmp_path / "train.jsonl", RECORDS)
    assert texts_of(read_data_rows(file, "prompts", RowForm(map=f"{tmp_path}/own.py:form"))) == ["W3 W4"]
    for name, problem in (
        ("fails", r"line 1: data\.map='.*own\.py:fails' failed: KeyError: 'none'"),
        ("wrong", r"returned a str; expected a dict, or None"),
        ("missing", r"has no function 'missing'"),
    ):
        with pytest.raises(DataError, match=problem):
            read_data_rows(file, "prompts", RowForm(map=f"{tmp_path}/own.py:{name}"))


# Folders that `datasets` saved

ROWS = [{"prompt": "one", "answer": "1", "level": 3}, {"prompt": "two", "answer": "2", "level": 4}]


def test_a_saved_data_set_is_read_like_a_file_of_its_rows(tmp_path):
    datasets = pytest.importorskip("datasets")
    saved, folder = datasets.Dataset.from_list(ROWS), tmp_path / "saved"
    saved.save_to_disk(folder, num_shards=2)
    ours, theirs = (read_data_rows(path, "prompts") for path in (folder, write_rows(tmp_path / "rows.jsonl", ROWS)))
    assert texts_of(ours) == texts_of(theirs) == ["one", "two"]
    assert [row.values["reward_model"] for row in ours] == [row.values["reward_model"] for row in theirs]
    assert [row.place for row in ours] == [f"{folder}: row 0", f"{folder}: row 1"]
    assert texts_of(read_data_rows(folder, "prompts", RowForm({"prompt": "answer", "answer": "prompt"}))) == ["1", "2"]
    saved.select([1]).save_to_disk(tmp_path / "selected")
    assert texts_of(read_data_rows(tmp_path / "selected", "prompts")) == ["two"]
    datasets.DatasetDict({"train": saved}).save_to_disk(tmp_path / "splits")
    with pytest.raises(DataConfigError, match=r"holds the splits train; name one of them, as in '.*/splits/train'"):
        read_data_rows(tmp_path / "splits", "prompts")
    assert len(read_data_rows(tmp_path / "splits" / "train", "prompts")) == 2
    file = next(iter(sorted(folder.glob("*.arrow"))))
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(DataError, match=r"\.arrow: is not an Arrow file of"):
        read_data_rows(folder, "prompts")


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        (None, "", DataConfigError, r"is not a folder of `Dataset\.save_to_disk`.*; name a file\."),
        ("train.jsonl", "", DataConfigError, r"name its files: train\.jsonl\."),
        ("state.json", "{", DataError, "is damaged"),
        ("state.json", "[]", DataError, "is damaged"),
        ("state.json", '{"_data_files": [{"filename": "../a.arrow"}]}', DataError, r"'\.\./a\.arrow', which is not a"),
        ("state.json", '{"_data_files": [{"filename": "no.arrow"}]}', DataError, r"no\.arrow: is not an Arrow file of"),
    ],
)
def test_another_or_damaged_folder_is_an_error_that_names_its_files(tmp_path, name, content, error, message):
    if name:
        (tmp_path / name).write_text(content)
    with pytest.raises(error, match=message):
        read_data_rows(tmp_path, "prompts")


# Errors

GOOD = {"prompt": USER, "data_source": "x", "reward_model": {"style": "rule", "ground_truth": "1"}}


def prompt(content):
    return {"prompt": [{"role": "user", "content": content}]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": None}, "'prompt' is empty; give it a value"),
        ({"prompt": 3}, "column 'prompt' must be a list of chat messages"),
        ({"prompt": []}, "'prompt' is empty"),
        ({"prompt": [{"content": "a"}]}, "message 0 of 'prompt' needs a role"),
        (prompt(None), "content of message 0 of 'prompt' must be a text, got None"),
        (prompt([{"type": "image"}]), "a part that is not a text: {'type': 'image'}; images"),
        (prompt([{"type": "text", "text": 3}]), "a part that is not a text"),
        (prompt(""), "the prompt has no tokens"),
        ({"data_source": 3}, "column 'data_source' must be a text, got 3"),
        ({"data_source": None}, "column 'data_source' must be a text, got None"),
        ({"reward_model": "72"}, "column 'reward_model' must hold style and ground_truth"),
        ({"reward_model": {"style": "rule"}}, "column 'reward_model' must hold style and ground_truth"),
        ({"extra_info": "x"}, "column 'extra_info' must hold named values, got 'x'"),
        ({"images": [b"png"]}, "column 'images' holds data"),
        ({"audios": ["a.wav"]}, "images, audio or video are not supported yet"),
    ],
)
def test_malformed_row_is_an_error_with_file_row_and_column(char_tokenizer, tmp_path, changes, message):
    file = tmp_path / "bad.parquet"
    pq.write_table(pa.Table.from_pylist([{**GOOD, **changes}]), file)
    with pytest.raises(DataError) as error:
        RLHFDataset(file, char_tokenizer(), 8)
    assert message in str(error.value)
    assert f"{file}: row 0" in str(error.value)


def test_rows_are_counted_within_their_file_and_empty_columns_accepted(char_tokenizer, prompt_file, tmp_path):
    bad, good = (tmp_path / f"{name}.parquet" for name in ("bad", "good"))
    pq.write_table(pa.Table.from_pylist([GOOD, {**GOOD, "data_source": None}]), bad)
    with pytest.raises(DataError, match=r"bad.parquet: row 1: column 'data_source'"):
        RLHFDataset([prompt_file(["a", "b"]), bad], char_tokenizer(), 8)
    pq.write_table(pa.Table.from_pylist([{**GOOD, "images": None}, {**GOOD, "images": []}]), good)
    assert RLHFDataset(good, char_tokenizer(), 8).collate([1]).non_tensor_batch["extra_infos"][0] == {}


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("a.parquet", None, "a.parquet: no such file"),
        ("a.parquet", "", "a.parquet: not a readable parquet file"),
        ("a.parquet", pa.Table.from_pylist([GOOD]).slice(0, 0), "a.parquet: the file has no rows"),
        ("a.jsonl", [{"prompt": 7}], "line 1: 'prompt' must be a text or a list of chat messages, got 7"),
        ("a.jsonl", [{"text": "a"}], r"'prompt' is missing; .* Name the columns in data\.columns, as in {prompt"),
        ("a.jsonl", [{"prompt": "w3"}, {"prompt": " "}], "line 2: 'prompt' is empty"),
        ("a.jsonl", [{"prompt": "w3", "answer": 1}, {"prompt": "w4"}], "line 2: 'answer' is missing"),
        ("a.jsonl", [{"prompt": "w3", "answer": 1}, {"prompt": "w4", "answer": None}], "line 2: 'answer' is empty"),
        ("a.jsonl", [{"prompt": "w3", "images": ["a.png"]}], "line 1: column 'images' holds data"),
        *(
            (f"a{suffix}", [{"question": "1 + 1", "answer": "#### 2"}],
             f"`hybridflow prepare gsm8k --train-file TRAIN{suffix} --test-file TEST{suffix}`")
            for suffix in (".jsonl", ".parquet")
        ),
    ],
)  # fmt: skip
def test_a_file_that_holds_no_prompts_is_an_error(char_tokenizer, tmp_path, name, rows, message):
    if isinstance(rows, pa.Table):
        pq.write_table(rows, tmp_path / name)
    elif isinstance(rows, list):
        write_rows(tmp_path / name, rows)
    elif rows is not None:
        (tmp_path / name).write_text(rows)
    with pytest.raises(DataError, match=message):
        RLHFDataset(tmp_path / name, char_tokenizer(), 8)


@pytest.mark.parametrize("messages", [[1], [{"role": "user"}], 5, [{"role": "user", "content": 7}]])
def test_a_malformed_conversation_is_named(tmp_path, messages):
    file = tmp_path / "talk.jsonl"
    file.write_text(json.dumps({"messages": messages}) + "\n")
    with pytest.raises(DataError, match=r"talk\.jsonl: line 1: .*messages"):
        read_data_rows(file, "examples")


@pytest.mark.parametrize(
    ("texts", "tokenizer", "options", "message"),
    [
        (["a"], {}, {"overlong": "cut"}, "overlong='cut' is not one of drop, error, truncate-left"),
        (["a"], {}, {"max_prompt_length": 0}, "max_prompt_length=0"),
        (["a", "abcd"], {}, {"overlong": "error"}, r"prompts.parquet: row 1: 4 tokens, but max_prompt_length=3 \(1"),
        (["abcd"], {}, {}, "all 1 prompts are longer than max_prompt_length=3"),
        (["a"], {"chat_template": "{{ raise_exception('no user') }}"}, {}, "prompts.parquet: row 0: .*no user"),
        (["a"], {"bos_token": "<bos>"}, {}, "no EOS token"),
        (["a"], {}, {"order_by": "hard"}, r"row 0: data.order_by='hard' has the value None; expected a finite number"),
    ],
)
def test_options_that_do_not_fit_the_data_are_errors(char_tokenizer, prompt_file, texts, tokenizer, options, message):
    with pytest.raises(DataError, match=message):
        RLHFDataset(prompt_file(texts), char_tokenizer(**tokenizer), **{"max_prompt_length": 3, **options})
    with pytest.raises(DataError, match="no data files were given"):
        RLHFDataset([], char_tokenizer(), 8)
    with pytest.raises(DataError, match="index=1 is out of range: the data set has rows 0 to 0"):
        RLHFDataset(prompt_file(["a"]), char_tokenizer(), 8).collate([0, 1])


def test_eos_replaces_a_missing_padding_token(char_tokenizer, prompt_file):
    dataset = RLHFDataset(prompt_file(["ab", "a"]), char_tokenizer(eos_token="<eos>"), 8)
    assert dataset.collate([0, 1]).batch["prompts"].tolist() == [[4, 5], [1, 4]]
