"""The bounds of a parquet file hold for what its columns expand to, and only for the columns that are read."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridflow.data import parquet_bounds
from hybridflow.data.parquet_rows import read_rows, read_table
from hybridflow.errors import DataError

TEXT = "x" * 1000


def write(path, **columns):
    pq.write_table(pa.table(columns), path, store_schema=False)
    return path


@pytest.fixture
def bounds(monkeypatch):
    monkeypatch.setattr(parquet_bounds, "MAX_ROWS", 100)
    monkeypatch.setattr(parquet_bounds, "MAX_VALUES", 200)
    monkeypatch.setattr(parquet_bounds, "MAX_BYTES", 50_000)


@pytest.mark.usefixtures("bounds")
def test_a_file_at_its_bounds_is_read(tmp_path):
    columns = {"a": [TEXT] * 50 + [""] * 50, "b": [[1, 2]] * 100, "c": [{"d": [TEXT]}] * 50 + [{"d": ["y"]}] * 50}
    table = read_table(write(tmp_path / "a.parquet", **columns | {"c": [{"d": ["y"]}] * 100}), ("a", "b", "c"))
    assert table.to_pydict() == columns | {"c": [{"d": ["y"]}] * 100}
    file = write(tmp_path / "b.parquet", a=[1] * 60, ab=[TEXT] * 60)
    assert [row.values for row in read_rows(file, ("a",))] == [{"a": 1}] * 60  # those that are not read have no bounds


@pytest.mark.usefixtures("bounds")
def test_nested_texts_of_several_row_groups_are_read(tmp_path):
    rows = [{"a": [{"b": TEXT + str(number % 20)}]} for number in range(40)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=10)
    assert [row.values for row in read_rows(tmp_path / "a.parquet", ("a",))] == rows
    pq.write_table(pa.Table.from_pylist([*rows, *rows]), tmp_path / "b.parquet", row_group_size=10)
    with pytest.raises(DataError, match=r"column 'a\.list\.element\.b' has 0\.0 GiB uncompressed"):
        read_rows(tmp_path / "b.parquet", ("a",))


@pytest.mark.usefixtures("bounds")
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1] * 101, "the file has 101 rows; at most 100"),
        ([[1] * 201], "column 'a.list.element' has 201 values; at most 200"),
        ([TEXT] * 51, "column 'a' has"),
        ([[TEXT] * 51], "column 'a.list.element' has"),
        ([{"b": [{"c": TEXT}] * 51}], "column 'a.b.list.element.c' has"),
        ([TEXT + str(number) for number in range(60)], "column 'a' has"),
        ([TEXT.encode()] * 51, "column 'a' has"),
        (pa.array([[("key", TEXT)] * 51], pa.map_(pa.string(), pa.string())), "column 'a.key_value.value' has"),
    ],
)
def test_a_column_beyond_its_bounds_is_an_error(tmp_path, values, message):
    file = write(tmp_path / "a.parquet", a=values)
    with pytest.raises(DataError) as error:
        read_rows(file, ("a",))
    assert message in str(error.value)
    assert str(error.value).endswith("Split the file, or remove what is not needed.")


def test_too_many_columns_are_an_error_before_they_are_all_read(tmp_path, monkeypatch):
    file = write(tmp_path / "a.parquet", **{f"c{number}": [1] for number in range(30)})
    monkeypatch.setattr(parquet_bounds, "MAX_COLUMNS", 29)
    with pytest.raises(DataError, match=r"the file has 30 columns; at most 29\. Split the file"):
        read_rows(file, ("c0",))
    monkeypatch.setattr(parquet_bounds, "_MAX_LIST", 30)
    with pytest.raises(DataError, match=r"not a readable parquet file \(.*Exceeded size limit"):
        read_rows(file, ("c0",))
