"""A packed batch returns any of its columns and rows in private memory of the reader; pickling a batch packs it."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.values import canonical
from hybridflow.errors import BatchError, FieldError
from hybridflow.protocol import DataProto
from hybridflow.protocol.batch import tensors_of
from hybridflow.protocol.packed_batch import COMPRESS_FROM_BYTES, PackedBatch, PackedColumn, batch_bytes

RECORD = np.dtype([("a", "i2"), ("b", "f8"), ("c", "U3"), ("d", "i1", (2,))])
ALIGNED_RECORD = np.dtype([("a", "i1"), ("b", "f8")], align=True)

TENSORS = {
    "bf16": torch.tensor([1.5, -2.0, 0.0, float("inf"), 3.0], dtype=torch.bfloat16),
    "float8": torch.tensor([1.0, 2.0, -0.5, 0.0, 4.0]).to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False, False, True, True]),
    "complex64": torch.tensor([1 + 2j, 0, -1j, 3, 4j], dtype=torch.complex64),
    "complex128": torch.tensor([[1 + 2j], [0], [-1j], [3], [4j]], dtype=torch.complex128),
    "float64": torch.arange(10, dtype=torch.float64).reshape(5, 2) / 3,
    "int8": torch.tensor([-128, 127, 0, 1, -1], dtype=torch.int8),
    "uint8": torch.tensor([0, 255, 1, 2, 3], dtype=torch.uint8),
    "int64": torch.tensor([2**62, -(2**62), 0, 1, 2]),
    "no_width": torch.zeros(5, 0),
    "three_axes": torch.arange(40, dtype=torch.float32).reshape(5, 2, 4),
    "transposed": torch.arange(10).reshape(2, 5).T,
    "strided": torch.arange(30).reshape(5, 6)[:, 1::2],
    "every_other_row": torch.arange(20).reshape(10, 2)[::2],
    "expanded": torch.tensor([[1, 2, 3]]).expand(5, 3),
    "expanded_rows": torch.tensor(7.5).expand(5),
    "with_offset": torch.arange(20)[3:8],
}
ARRAYS = {
    "float32": np.array([0.5, np.nan, -0.0, np.inf, 1.0], dtype=np.float32),
    "float16": np.array([[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]], dtype=np.float16),
    "big_endian": np.array([1, 2, 3, 4, 5], dtype=">i4"),
    "complex": np.array([1j, 2, 3, 4, 5j]),
    "bools": np.array([True, False, True, False, True]),
    "text": np.array(["", "a", "abc", "ü", "日本"]),
    "bytes": np.array([b"a", b"", b"bc", b"d", b"e"]),
    "days": np.array(["2024-02-29", "NaT", "1969-12-31", "2000-01-01", "2001-01-01"], dtype="M8[D]"),
    "spans": np.array([1, -1, 0, 5, 7], dtype="m8[ns]"),
    "records": np.array([(row, row / 4, "x" * row, (row, -row)) for row in range(5)], dtype=RECORD),
    "aligned": np.array([(1, 0.5), (2, 1.5), (3, 2.5), (4, 3.5), (5, 4.5)], dtype=ALIGNED_RECORD),
    "fortran": np.asfortranarray(np.arange(15).reshape(5, 3)),
    "backwards": np.arange(5)[::-1],
    "broadcast": np.broadcast_to(np.array([1, 2]), (5, 2)),
    "empty": np.zeros((5, 0), dtype="U4"),
    "objects": np.array([{"a": 1}, None, [1, (2,)], "text", np.arange(3)], dtype=object),
    "object_table": np.array([[1, "a"], [None, 2.5], [{}, []], [b"", "b"], [3, 4]], dtype=object),
    "object_records": np.array([({"a": row}, row) for row in range(5)], dtype=[("o", object), ("n", "i4")]),
}


def everything() -> DataProto:
    meta_info = {"step": 3, "nested": {"list": [1, 2]}, "metrics": {"loss": [0.5]}, "array": np.arange(3)}
    return DataProto.from_dict(dict(TENSORS), dict(ARRAYS), meta_info, auto_padding=True)


def out_of_band(value: Any) -> tuple[bytes, list[memoryview]]:
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return stream, [buffer.raw() for buffer in buffers]


def arrived(value: Any) -> Any:
    """Return a packed batch, or a batch, after a round trip through a store, with read-only buffers."""
    stream, buffers = out_of_band(value)
    return pickle.loads(stream, buffers=[bytes(buffer) for buffer in buffers])


def assert_same_batch(found: DataProto, expected: DataProto) -> None:
    assert canonical(found) == canonical(expected)


class OwnBatch(DataProto):
    pass


# Round trips


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("dumps", [pickle.dumps, None])
@pytest.mark.parametrize("protocol", range(6))
def test_every_kind_of_column_round_trips_in_every_pickle_protocol(protocol, dumps, compress):
    packed = PackedBatch.pack(everything(), dumps, compress)
    for read in (packed.read(), pickle.loads(pickle.dumps(packed, protocol)).read(), arrived(packed).read()):
        assert_same_batch(read, everything())
    assert_same_batch(pickle.loads(pickle.dumps(everything(), protocol)), everything())


@pytest.mark.parametrize(
    "data",
    [
        DataProto(),
        DataProto(meta_info={"k": 1}, auto_padding=True),
        DataProto.from_dict(non_tensors={"o": ["a", "b"]}),
        DataProto.from_dict({"x": torch.zeros(3)}).select([]),
        everything()[0:0],
        OwnBatch(meta_info={"k": 1}),
    ],
)
def test_batches_without_tensors_rows_or_columns_round_trip(data):
    for read in (PackedBatch.pack(data).read(), arrived(PackedBatch.pack(data, pickle.dumps)).read(), arrived(data)):
        assert_same_batch(read, data)
        assert (type(read), read.batch is None) == (type(data), data.batch is None)


@pytest.mark.parametrize(
    "value",
    [
        *(torch.tensor(3, dtype=torch.int8), torch.tensor(1.5, dtype=torch.bfloat16), torch.tensor(True)),
        *(torch.tensor(1 - 1j), torch.tensor(2.0, requires_grad=True), np.array(5, np.int8), np.array("abc")),
        *(np.array("2024-02-29", "M8[s]"), np.array((1, 2.0), "i4,f8"), np.array({"a": 1}, dtype=object)),
    ],
    ids=repr,
)
def test_0_dimensional_column_round_trips(value):
    is_tensor = isinstance(value, torch.Tensor)
    column = PackedColumn.of_tensor(value) if is_tensor else PackedColumn.of_array("value", value, pickle.dumps)
    for protocol in range(6):
        read = pickle.loads(pickle.dumps(column, protocol)).read(None)
        assert canonical(read) == canonical(value.detach() if is_tensor else value)


def test_lazy_views_and_an_expanded_row_are_packed():
    waves, negated = torch.tensor([1 + 2j, 3 - 1j]).conj(), torch._neg_view(torch.tensor([1.0, 2.0]))
    expanded = torch.tensor(7.5).expand(4)
    for tensor in (waves, negated, expanded, expanded[3:4]):
        assert canonical(PackedColumn.of_tensor(tensor).read(None)) == canonical(tensor.resolve_neg().clone())


def test_the_device_of_the_batch_is_kept():
    for device in ("cpu", None):
        data = DataProto.from_dict({"x": torch.zeros(1)})
        data = data.to(device) if device else data
        assert arrived(data).batch.device == PackedBatch.pack(data).read().batch.device == data.batch.device


# Columns and rows

INDICES = st.one_of(
    st.none(),
    st.tuples(st.integers(0, 5), st.integers(0, 5)).map(lambda edges: slice(*sorted(edges))),
    st.lists(st.integers(-5, 4), max_size=6).map(lambda rows: np.array(rows, dtype=np.int64)),
)
NAMES = [*TENSORS, *(name for name in ARRAYS if name != "aligned")]


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.one_of(st.none(), st.lists(st.sampled_from(NAMES), unique=True)), INDICES, st.booleans(), st.booleans())
def test_read_returns_private_columns_and_rows_of_the_batch(columns, rows, compress, shared):
    data, packed = everything(), STORED[compress]
    expected = data if rows is None else data[rows] if isinstance(rows, slice) else data.select_idxs(rows)
    if columns is not None:
        tensors = [name for name in columns if name in TENSORS]
        expected = expected.select(tensors, [name for name in columns if name in ARRAYS])
    if shared and columns is None:
        columns = NAMES  # a shared read of records loses their alignment
        expected.non_tensor_batch.pop("aligned")
    read = packed.read(columns, rows, shared)
    assert len(read) == len(expected)
    assert canonical(tensors_of(read.batch)) == canonical(tensors_of(expected.batch))
    arrays, expected_arrays = (dict(sorted(each.non_tensor_batch.items())) for each in (read, expected))
    assert canonical(arrays) == canonical(expected_arrays)
    if not shared:
        for tensor in tensors_of(read.batch).values():
            tensor.zero_()
        for name, array in read.non_tensor_batch.items():
            if name == "objects" and len(array) and isinstance(array[0], dict):
                array[0]["a"] = "written"
            if not array.dtype.fields:
                array[...] = None if array.dtype.hasobject else np.zeros((), array.dtype)
        read.meta_info["nested"]["list"].append("written")
        read.meta_info["array"][:] = 9
        again = packed.read(columns, rows)
        assert canonical(tensors_of(again.batch)) == canonical(tensors_of(expected.batch))
        assert canonical(again.meta_info) == canonical(everything().meta_info)


STORED = [arrived(PackedBatch.pack(everything(), pickle.dumps, compress)) for compress in (False, True)]


def test_shared_reads_of_records_keep_dtypes_and_of_objects_are_private():
    assert STORED[0].read(["aligned"], shared=True).non_tensor_batch["aligned"].dtype == ARRAYS["aligned"].dtype
    STORED[0].read(["objects"], shared=True).non_tensor_batch["objects"][0]["a"] = "written"
    assert STORED[0].read(["objects"], shared=True).non_tensor_batch["objects"][0] == {"a": 1}
    packed = PackedBatch.pack(DataProto.from_dict(non_tensors={"o": ["a", "b"]}))
    packed.read().non_tensor_batch["o"][0] = "written"
    assert packed.read().non_tensor_batch["o"].tolist() == ["a", "b"]


def test_reading_no_columns_keeps_the_number_of_rows():
    packed = PackedBatch.pack(everything())
    assert [len(packed.read([], rows)) for rows in (None, slice(1, 3), np.array([0, 0, 4, 4]))] == [5, 2, 4]
    assert packed.read([]).meta_info["step"] == 3
    assert len(packed) == 5
    with pytest.raises(FieldError, match="the batch has no 'z'; it has 'bf16'"):
        packed.read(["bf16", "z"])


# Memory and bytes


def test_shared_read_returns_views_of_the_store():
    columns = {"n": np.arange(3), "t": np.array(["a", "b", "c"])}
    data = DataProto.from_dict({"x": torch.arange(6).reshape(3, 2)}, columns)
    stream, buffers = out_of_band(PackedBatch.pack(data, pickle.dumps))
    store = [bytearray(buffer) for buffer in buffers]
    packed = pickle.loads(stream, buffers=[memoryview(memory).toreadonly() for memory in store])
    whole, part = packed.read(shared=True), packed.read(rows=slice(1, 3), shared=True)
    picked, own = packed.read(rows=np.array([1, 2]), shared=True), packed.read(rows=slice(1, 3))
    store[0][16:24] = (77).to_bytes(8, "little")  # x[1, 0]
    store[1][8:16] = (88).to_bytes(8, "little")  # n[1]
    assert whole.batch["x"].tolist() == [[0, 1], [77, 3], [4, 5]]
    assert part.batch["x"].tolist() == [[77, 3], [4, 5]]
    assert part.non_tensor_batch["n"].tolist() == [88, 2]
    assert picked.batch["x"].tolist() == own.batch["x"].tolist() == [[2, 3], [4, 5]]
    assert own.non_tensor_batch["n"].tolist() == [1, 2]
    del packed
    assert whole.batch["x"].sum().item() == 0 + 1 + 77 + 3 + 4 + 5


def test_packing_copies_no_column_and_sends_only_the_rows_of_a_view():
    data = DataProto.from_dict({"x": torch.arange(1000), "wide": torch.zeros(1000, 10)}, {"n": np.arange(1000)})
    for value in (PackedBatch.pack(data, pickle.dumps), PackedBatch.pack(data), data):
        stream, buffers = out_of_band(value)
        assert [buffer.nbytes for buffer in buffers] == [8000, 40_000, 8000]
        assert len(stream) < 1500
        data.batch["x"][0], data.non_tensor_batch["n"][0] = 77, 88
        assert buffers[0].cast("b").cast("q")[0] == 77
        read = pickle.loads(stream, buffers=buffers)
        read = read if value is data else read.read()
        assert (read.batch["x"][0].item(), read.non_tensor_batch["n"][0]) == (77, 88)
    stream, buffers = out_of_band(data.chunk(10)[3])
    assert [buffer.nbytes for buffer in buffers] == [800, 4000, 800]
    assert pickle.loads(stream, buffers=buffers).batch["x"].tolist() == list(range(300, 400))
    strided = DataProto.from_dict({"x": torch.zeros(100, 100)[:, ::2]}, {"n": np.zeros((100, 100))[:, ::2]})
    assert [buffer.nbytes for buffer in out_of_band(strided)[1]] == [100 * 50 * 4, 100 * 50 * 8]


def test_a_batch_in_read_only_memory_or_in_the_stream_loads_writable():
    data = DataProto.from_dict({"x": torch.arange(3)}, {"n": np.arange(3)})
    for loaded in (arrived(data), pickle.loads(pickle.dumps(data)), copy.copy(arrived(data))):
        loaded.batch["x"] += 1
        loaded.non_tensor_batch["n"] += 1
        assert loaded.batch["x"].tolist() == loaded.non_tensor_batch["n"].tolist() == [1, 2, 3]


def test_num_bytes_is_the_size_of_the_columns():
    columns = {"bf16": torch.zeros(5, 3, dtype=torch.bfloat16), "bool": torch.zeros(5, dtype=torch.bool)}
    arrays = {"text": np.array(["abc"] * 5), "objects": ["some", "objects", None, 1, 2]}
    data = DataProto.from_dict(columns, arrays)
    packed, num_pickled = PackedBatch.pack(data, pickle.dumps), len(pickle.dumps(data.non_tensor_batch["objects"]))
    assert [packed.num_bytes([name]) for name in packed.columns] == [30, 5, 60, num_pickled]
    assert (packed.num_bytes(), packed.num_bytes([])) == (95 + num_pickled, 0)
    with_meta_info = PackedBatch.pack(DataProto(meta_info={"k": 1}), pickle.dumps)
    assert with_meta_info.num_bytes() == len(pickle.dumps({"k": 1}))
    assert PackedColumn.of_tensor(torch.zeros(0, 7)).num_bytes == 0
    assert PackedColumn.of_tensor(torch.zeros(1).expand(4)).num_bytes == 16
    assert batch_bytes([data, (data, 3)]) == 2 * 95


# Compression


def test_compression_shrinks_large_columns():
    data = DataProto.from_dict(
        {"zeros": torch.zeros(1000, 100, dtype=torch.bfloat16), "ids": torch.arange(10_000).reshape(1000, 10)},
        {"text": np.array(["the same text"] * 1000), "objects": [{"a": 1}] * 1000},
    )
    plain, small = (PackedBatch.pack(data, pickle.dumps, compress) for compress in (False, True))
    for name in ("zeros", "ids", "text"):
        assert small.columns[name].is_compressed
        assert small.num_bytes([name]) < plain.num_bytes([name]) / 3
    assert small.num_bytes(["zeros"]) < 1000
    assert sum(buffer.nbytes for buffer in out_of_band(small)[1]) == small.num_bytes(["zeros", "ids", "text"])
    assert_same_batch(arrived(small).read(["ids"], np.array([7, 999])), data[[7, 999]].select(["ids"], []))
    noise = np.random.default_rng(0).integers(0, 256, COMPRESS_FROM_BYTES * 4, dtype=np.uint8)
    assert not PackedColumn.of_array("noise", noise, compress=True).is_compressed
    for size, is_compressed in ((COMPRESS_FROM_BYTES - 1, False), (COMPRESS_FROM_BYTES, True)):
        assert PackedColumn.of_tensor(torch.zeros(size, dtype=torch.uint8), True).is_compressed is is_compressed


# Objects


class Bomb:
    """An object that cannot be unpickled."""

    def __reduce__(self):
        return _explode, ()


def _explode():
    raise RuntimeError("unpickled")


def test_reading_a_column_does_not_unpickle_the_others():
    data = DataProto.from_dict({"x": torch.arange(2)}, {"bombs": [Bomb(), Bomb()], "texts": ["a", "b"]}, {"k": 1})
    packed = arrived(PackedBatch.pack(data, pickle.dumps))
    assert packed.read(["x"]).batch["x"].tolist() == [0, 1]
    assert packed.read(["texts"]).non_tensor_batch["texts"].tolist() == ["a", "b"]
    assert packed.read([], slice(0, 1)).meta_info == {"k": 1}
    for columns in (["bombs"], None):
        with pytest.raises(RuntimeError, match="unpickled"):
            packed.read(columns)


def test_meta_info_that_cannot_be_pickled_is_named():
    with pytest.raises(BatchError, match="'meta_info' cannot be sent to another process"):
        PackedBatch.pack(DataProto(meta_info={"f": lambda: 1}), pickle.dumps)
