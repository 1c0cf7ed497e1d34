import json

import pytest

from hybridflow.data.data_rows import read_data_rows
from hybridflow.data.row_forms import RowForm
from hybridflow.errors import DataConfigError, DataError

ROWS = [{"prompt": "one", "answer": "1", "level": 3}, {"prompt": "two", "answer": "2", "level": 4}]


@pytest.fixture
def folder(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved", num_shards=2)
    return tmp_path / "saved"


def test_a_saved_data_set_is_read_like_a_file_of_its_rows(folder, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    ours, theirs = (read_data_rows(path, "prompts") for path in (folder, tmp_path / "rows.jsonl"))
    assert [row.values["prompt"] for row in ours] == [row.values["prompt"] for row in theirs]
    assert [row.values["reward_model"] for row in ours] == [row.values["reward_model"] for row in theirs]
    assert [row.place for row in ours] == [f"{folder}: row 0", f"{folder}: row 1"]


def test_columns_of_a_saved_data_set_are_named(folder):
    form = RowForm({"prompt": "answer", "answer": "prompt"})
    assert [row.values["prompt"][0]["content"] for row in read_data_rows(folder, "prompts", form)] == ["1", "2"]


def test_shuffled_and_selected_rows_are_those_that_were_saved(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).select([1]).save_to_disk(tmp_path / "saved")
    rows = read_data_rows(tmp_path / "saved", "prompts")
    assert [row.values["prompt"][0]["content"] for row in rows] == ["two"]


def test_a_folder_of_several_splits_asks_for_one(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataConfigError, match=r"holds the splits train; name one of them, as in '.*/saved/train'"):
        read_data_rows(tmp_path / "saved", "prompts")
    assert len(read_data_rows(tmp_path / "saved" / "train", "prompts")) == 2


def test_another_folder_is_an_error_that_names_its_files(tmp_path):
    with pytest.raises(DataConfigError, match=r"is not a folder of `Dataset\.save_to_disk`.*; name a file\."):
        read_data_rows(tmp_path, "prompts")
    (tmp_path / "train.jsonl").write_text("")
    with pytest.raises(DataConfigError, match=r"name its files: train\.jsonl\."):
        read_data_rows(tmp_path, "prompts")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ('{"_data_files": [{"filename": "../data.arrow"}]}', r"names '\.\./data\.arrow', which is not a file of"),
        ('{"_data_files": [{"filename": "absent.arrow"}]}', r"absent\.arrow: is not an Arrow file of"),
    ],
)
def test_a_damaged_folder_is_an_error_that_names_the_file(tmp_path, state, message):
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(DataError, match=message):
        read_data_rows(tmp_path, "prompts")


def test_a_cut_arrow_file_is_an_error_that_names_it(folder):
    file = next(iter(sorted(folder.glob("*.arrow"))))
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(DataError, match=r"\.arrow: is not an Arrow file of"):
        read_data_rows(folder, "prompts")
