import json

import pytest

from hybridflow.data import PreferenceDataset, RLHFDataset, SFTDataset, load_tokenizer, prompt_row, write_prompt_file
from hybridflow.data.data_rows import read_data_rows
from hybridflow.data.prepare.prompt_file import write_parquet
from hybridflow.data.row_forms import RowForm
from hybridflow.errors import DataError

RECORDS = [
    {"question": "w3 w4", "gold": {"value": "1"}, "level": 2},
    {"question": "w5", "gold": {"value": "2"}, "level": 1},
]
FORM = RowForm({"prompt": "question", "answer": "gold.value"})


def write(path, records):
    """Write records in the format of the file's suffix."""
    if path.suffix == ".jsonl":
        path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    elif path.suffix == ".json":
        path.write_text(json.dumps(records))
    elif path.suffix == ".csv":
        lines = [",".join(records[0]), *(",".join(map(str, record.values())) for record in records)]
        path.write_text("\n".join(lines) + "\n")
    else:
        write_parquet(path, records)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_columns_are_named_and_others_become_extra_info(tmp_path, tiny_model, suffix):
    file = write(tmp_path / f"train{suffix}", RECORDS)
    dataset = RLHFDataset(file, load_tokenizer(tiny_model()), 8, order_by="level", form=FORM)
    batch = dataset.collate([0, 1]).non_tensor_batch
    assert batch["ground_truths"].tolist() == ["1", "2"]
    assert batch["raw_prompts"][0] == [{"role": "user", "content": "w3 w4"}]
    assert batch["extra_infos"][1] == {"split": "train", "index": 1, "level": 1}
    assert dataset.numbers == [2, 1]


def test_a_csv_file_and_its_json_lines_are_the_same_data(tmp_path, tiny_model):
    records = [{"prompt": "w3", "answer": "1"}, {"prompt": "w4", "answer": "2"}]
    files = [write(tmp_path / name, records) for name in ("train.csv", "train.jsonl")]
    found = [RLHFDataset(file, load_tokenizer(tiny_model()), 8).fingerprint for file in files]
    assert found[0] == found[1]


def test_a_file_with_our_columns_is_read_as_it_is_beside_others(tmp_path):
    plain = write_prompt_file(
        tmp_path / "plain.parquet",
        [prompt_row(data_source="a", prompt="w3", ground_truth="1", split="train", index=0)],
    )
    (alone,) = read_data_rows(plain, "prompts", optional=("extra_info",))
    first, second = read_data_rows([plain, write(tmp_path / "b.jsonl", [{"prompt": "w4"}])], "prompts")
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
    file = write(tmp_path / "train.jsonl", RECORDS)
    (row,) = read_data_rows(file, "prompts", RowForm(map=f"{tmp_path}/own.py:form"))
    assert row.values["prompt"] == [{"role": "user", "content": "W3 W4"}]
    for name, problem in (
        ("fails", r"line 1: data\.map='.*own\.py:fails' failed: KeyError: 'none'"),
        ("wrong", r"returned a str; expected a dict, or None"),
        ("missing", r"has no function 'missing'"),
    ):
        with pytest.raises(DataError, match=problem):
            read_data_rows(file, "prompts", RowForm(map=f"{tmp_path}/own.py:{name}"))


def test_examples_and_pairs_are_read_from_json_lines(tmp_path, tiny_model):
    tokenizer = load_tokenizer(tiny_model())
    examples = write(tmp_path / "sft.jsonl", [{"q": "w3", "a": "w4 w5", "hard": 2}])
    form = RowForm({"prompt": "q", "response": "a"})
    assert SFTDataset(examples, tokenizer, 4, 4, order_by="hard", form=form).numbers == [2]
    talk = [{"role": "user", "content": "w3"}, {"role": "assistant", "content": "w4"}]
    assert len(SFTDataset(write(tmp_path / "talk.jsonl", [{"messages": talk}]), tokenizer, 4, 4)) == 1
    pairs = write(tmp_path / "pairs.json", [{"prompt": "w3", "chosen": "w4", "rejected": "w5"}])
    assert len(PreferenceDataset(pairs, tokenizer, 4, 4)) == 1


@pytest.mark.parametrize("messages", [[1], [{"role": "user"}], 5, [{"role": "user", "content": 7}]])
def test_a_malformed_conversation_is_named(tmp_path, messages):
    file = write(tmp_path / "talk.jsonl", [{"messages": messages}])
    with pytest.raises(DataError, match=r"talk\.jsonl: line 1: .*messages"):
        read_data_rows(file, "examples")


@pytest.mark.parametrize(
    ("records", "problem"),
    [
        ([], "the file has no rows"),
        ([{"question": "w3"}], "line 1: 'prompt' is missing; the row has question"),
        ([{"prompt": "w3"}, {"prompt": " "}], "line 2: 'prompt' is empty"),
        ([{"prompt": "w3", "answer": 1}, {"prompt": "w4"}], "line 2: 'answer' is missing"),
        ([{"prompt": "w3", "images": ["a.png"]}], "line 1: column 'images' holds data"),
    ],
)
def test_a_malformed_record_is_named(tmp_path, records, problem):
    with pytest.raises(DataError, match=problem):
        read_data_rows(write(tmp_path / "a.jsonl", records), "prompts")
