import pickle
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save

from hybridflow.errors import BatchError
from hybridflow.protocol import DataProto

NAN = float("nan")


def saved_and_loaded(data: DataProto, path: Path) -> DataProto:
    data.save_to_disk(path)
    return DataProto.load_from_disk(path)


def test_batch_round_trips_through_disk(tmp_path):
    data = DataProto.from_dict(
        {
            "ids": torch.arange(6).reshape(3, 2),
            "mask": torch.tensor([True, False, True]),
            "half": torch.tensor([1.5, NAN, float("inf")], dtype=torch.bfloat16),
            "turned": torch.arange(12.0).reshape(4, 3).T,
        },
        {"o": ["text", {"a": [1]}, None], "n": np.arange(3, dtype=np.float16)[::-1], "s": np.array(["a", "bb", "ü"])},
        {"k": {"deep": [1, 2]}, "metrics": {"loss": NAN}},
        auto_padding=True,
    )
    loaded = saved_and_loaded(data, tmp_path / "batch")
    data.union(loaded)
    assert loaded.get_data_info() == data.get_data_info()
    assert loaded.auto_padding


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, -(10**30), 1.5, NAN, float("-inf"), "text \ud800 \x00", b"\x00\xff"),
        *([1, [2, [None]]], (1, ("a",)), {1, 2}, {}, {"a": {"b": (1,)}}, {"$tuple": [1], "x": 2}),
        {1: "int key", (2, 3): "tuple key", None: 0},
        *(datetime(2024, 1, 2, 3, 4, 5, 6, UTC), datetime(2024, 1, 2), date(2024, 1, 2), time(3, 4), Decimal("1.50")),
        *(np.float32(1.5), np.int64(7), np.bool_(True), np.str_("s"), np.array(["a", "bb"]), np.zeros((0, 3))),
        *(np.arange(6, dtype=np.uint16).reshape(2, 3)[:, 1:], np.array([{"a": 1}, [2]], dtype=object)),
    ],
)
def test_plain_values_keep_type_and_contents(value, tmp_path):
    data = DataProto.from_dict(non_tensors={"o": [value]}, meta_info={"m": value})
    loaded = saved_and_loaded(data, tmp_path / "batch")
    data.union(loaded)
    assert type(loaded.non_tensor_batch["o"][0]) is type(value)
    assert type(loaded.meta_info["m"]) is type(value)


def test_byte_order_tensors_in_objects_and_absent_columns(tmp_path):
    loaded = saved_and_loaded(DataProto.from_dict(non_tensors={"n": np.array([1.0, 2.0], dtype=">f8")}), tmp_path / "a")
    assert (loaded.non_tensor_batch["n"].tolist(), loaded.non_tensor_batch["n"].dtype) == ([1.0, 2.0], np.float64)
    data = DataProto.from_dict(non_tensors={"o": [{"pixels": torch.arange(3)}]}, meta_info={"t": torch.tensor(1.5)})
    loaded = saved_and_loaded(data, tmp_path / "a")
    assert loaded.non_tensor_batch["o"][0]["pixels"].tolist() == [0, 1, 2]
    assert loaded.meta_info["t"].item() == 1.5
    for data in (DataProto(), DataProto(meta_info={"k": 1}), DataProto.from_dict(non_tensors={"o": ["a"]})):
        assert saved_and_loaded(data, tmp_path / "a").get_data_info() == data.get_data_info()
    assert len(saved_and_loaded(DataProto.from_dict({"x": torch.zeros(3)}).select([]), tmp_path / "a")) == 3


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0), (3, 0, 2)])
def test_batches_of_zero_rows_or_elements_keep_shape_and_dtype(shape, tmp_path):
    dtypes = (torch.int64, torch.float32, torch.bfloat16, torch.bool)
    tensors = {str(dtype): torch.zeros(shape, dtype=dtype) for dtype in dtypes}
    data = DataProto.from_dict(tensors, {"o": [None] * shape[0], "n": np.zeros(shape)})
    for loaded in (saved_and_loaded(data, tmp_path / "batch"), pickle.loads(pickle.dumps(data))):
        assert {name: (str(column.dtype), column.shape) for name, column in loaded.batch.items()} == {
            name: (name, shape) for name in tensors
        }
        assert (loaded.non_tensor_batch["o"].shape, loaded.non_tensor_batch["n"].shape) == (shape[:1], shape)


def test_columns_that_share_memory_are_saved_separately(tmp_path):
    x = torch.arange(4.0)
    loaded = saved_and_loaded(DataProto.from_dict({"a": x, "b": x, "c": x.view(4, 1)}), tmp_path / "batch")
    assert loaded.batch["a"].tolist() == loaded.batch["b"].tolist() == loaded.batch["c"][:, 0].tolist() == [0, 1, 2, 3]


def test_view_saves_only_its_rows(tmp_path):
    DataProto.from_dict({"x": torch.zeros(100_000)}).chunk(100)[5].save_to_disk(tmp_path / "batch")
    assert (tmp_path / "batch").stat().st_size < 6000


def test_loaded_batch_outlives_its_file_and_is_writable(tmp_path):
    path = tmp_path / "batch"
    loaded = saved_and_loaded(DataProto.from_dict({"x": torch.arange(3)}, {"n": np.arange(3)}), path)
    path.write_bytes(b"")
    loaded.batch["x"] += 1
    loaded.non_tensor_batch["n"] += 1
    assert loaded.batch["x"].tolist() == loaded.non_tensor_batch["n"].tolist() == [1, 2, 3]


class Unknown:
    pass


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DataProto.from_dict(non_tensors={"o": [1, {"k": Unknown()}]}), r"non_tensor_batch\['o'\]\[1\]\['k'\] is a"),
        (DataProto(meta_info={"f": print}), r"meta_info\['f'\]"),
        (DataProto.from_dict({"x": torch.zeros(1, dtype=torch.complex64)}), r"batch\['x'\] is torch.complex64"),
        (DataProto.from_dict(non_tensors={"d": np.array(["2020-01-01"], dtype="M8[D]")}), "datetime64"),
    ],
)
def test_unsavable_value_is_named_and_the_old_file_kept(data, message, tmp_path):
    path = tmp_path / "batch"
    DataProto.from_dict({"x": torch.arange(3)}).save_to_disk(path)
    with pytest.raises(BatchError, match=message):
        data.save_to_disk(path)
    assert DataProto.load_from_disk(path).batch["x"].tolist() == load_file(path)["0"].tolist() == [0, 1, 2]
    assert [file.name for file in tmp_path.iterdir()] == ["batch"]
    with pytest.raises(BatchError, match="could not be written"):
        DataProto().save_to_disk(tmp_path / "missing" / "batch")


class Exploding:
    def __reduce__(self):
        return (pytest.fail, ("code was executed on load",))


def structure(text: bytes, version: str = "1", kind: str = "hybridflow.DataProto") -> bytes:
    tensor = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return save({"structure": tensor}, {"format": kind, "version": version})


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (None, "batch: not a readable batch"),
        (b"", "not a readable batch"),
        (structure(b"{}")[:-1], "not a readable batch"),
        (pickle.dumps(Exploding()), "not a readable batch"),
        (save({"weight": torch.zeros(2)}), "not a saved DataProto"),
        (structure(b"{}", version="9"), "format version 9; this release reads version 1"),
        (structure(b"{}", kind="other"), "not a saved DataProto"),
        *(
            (structure(text), "damaged")
            for text in (b"{", b"{}", b"[]", b'{"num_rows": 2, "batch": [["x", "9"]], "non_tensor_batch": []}')
        ),
    ],
)
def test_missing_damaged_and_foreign_files_are_errors(contents, message, tmp_path):
    if contents is not None:
        (tmp_path / "batch").write_bytes(contents)
    with pytest.raises(BatchError, match=message):
        DataProto.load_from_disk(tmp_path / "batch")
    with pytest.raises(BatchError, match="not a readable batch"):
        DataProto.load_from_disk(tmp_path)
