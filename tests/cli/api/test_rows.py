import itertools
from importlib import import_module

import pyarrow
import pytest

from hybridflow.cli.api.rows import file_of, files_of, records_of, write_rows
from hybridflow.data import RLHFDataset
from hybridflow.data.row_forms import RowForm, rows_of
from hybridflow.errors import DataConfigError, DataError

RECORDS = [{"prompt": "a b", "answer": "1", "level": 2}, {"prompt": "c", "answer": "2", "level": 3}]


def prompt_rows(records, prompt="prompt", answer="answer"):
    return rows_of(placed(records), "prompts", RowForm({"prompt": prompt, "answer": answer}), "train")


def placed(records):
    return [(f"prompts: row {i}", record) for i, record in enumerate(records)]


def dataset(records):
    """Return a dataset of `datasets`, which the environment of vLLM lacks; it imports all tests."""
    return import_module("datasets").Dataset.from_list(records)


MAKERS = {
    "list": list,
    "tuple": tuple,
    "datasets": dataset,
    "pandas": lambda records: import_module("pandas").DataFrame(records),
    "pyarrow": pyarrow.Table.from_pylist,
}


def test_files_are_known_by_their_type(tmp_path):
    assert files_of("a.parquet") == ["a.parquet"]
    assert files_of([tmp_path, "b"]) == [str(tmp_path), "b"]
    assert files_of(RECORDS) is files_of(dataset(RECORDS)) is files_of([]) is None


@pytest.mark.parametrize("kind", MAKERS)
def test_rows_of_every_kind_are_the_same(kind):
    assert records_of(MAKERS[kind](RECORDS), "prompts", 0, "") == placed(RECORDS)


def test_a_stream_gives_as_many_rows_as_the_run_takes():
    endless = ({"prompt": str(i)} for i in itertools.count())
    assert len(records_of(endless, "prompts", 5, "trainer.total_steps")) == 5
    stream = dataset(RECORDS).to_iterable_dataset()
    assert records_of(stream, "prompts", 5, "trainer.total_steps") == placed(RECORDS)
    with pytest.raises(DataConfigError, match=r"prompts is a stream, which may have no end; set trainer\.total_steps"):
        records_of(stream, "prompts", 0, "trainer.total_steps")


def test_data_without_rows_are_errors():
    for data in (7, None, {"prompt": ["a"]}):
        with pytest.raises(DataConfigError, match=f"prompts is a {type(data).__name__}; expected files, a list"):
            records_of(data, "prompts", 0, "")
    with pytest.raises(DataError, match="prompts has no rows"):
        records_of([], "prompts", 0, "")
    with pytest.raises(DataError, match="prompts: row 1 is a str"):
        records_of([{"prompt": "a"}, "b"], "prompts", 0, "")


def test_a_file_has_the_digest_of_its_rows_and_is_read_back(tmp_path, tiny_model):
    from hybridflow.data import load_tokenizer

    rows = prompt_rows([{"prompt": "w3 w4", "answer": "x"}])
    file = file_of(rows, tmp_path, "train")
    assert file == file_of(rows, tmp_path, "train") != file_of(prompt_rows(RECORDS), tmp_path, "train")
    write_rows(rows, file)
    written = file.stat()
    write_rows(rows, file)
    assert file.stat().st_mtime_ns == written.st_mtime_ns
    assert len(RLHFDataset(file, load_tokenizer(tiny_model()), 8)) == 1


def test_columns_without_a_text_as_name_and_endless_values_are_errors():
    with pytest.raises(DataError, match=r"prompts: row 1 has the column 5; the name of a column must be a text"):
        records_of([{"prompt": "a"}, {"prompt": "b", 5: 1}], "prompts", 0, "")
    endless: list = []
    endless.append(endless)
    for value, message in ((endless, "holds itself"), ({1: 2, "a": 3}, "has the key 1; keys in values must be texts")):
        with pytest.raises(DataError, match=f"prompts: row 0: column 'more' .*{message}"):
            records_of([{"prompt": "a", "answer": "b", "more": value}], "prompts", 0, "")
