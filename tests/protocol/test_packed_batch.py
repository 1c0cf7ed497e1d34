"""A packed batch returns any of its columns and rows in private memory of the reader."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from hybridflow.errors import BatchError, FieldError
from hybridflow.protocol import DataProto
from hybridflow.protocol.packed_batch import COMPRESS_FROM_BYTES, PackedBatch, PackedColumn

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
    "with_grad": torch.arange(5.0, requires_grad=True) * 2,
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
    return DataProto.from_dict(dict(TENSORS), dict(ARRAYS), meta_info)


def arrived(packed: PackedBatch, read_only: bool = True) -> PackedBatch:
    """Return the packed batch after a round trip through a store, with read-only buffers."""
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(packed, protocol=5, buffer_callback=buffers.append)
    kind = bytes if read_only else bytearray
    return pickle.loads(stream, buffers=[kind(buffer.raw()) for buffer in buffers])


def assert_equal(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert not found.requires_grad
        assert as_bytes(found) == as_bytes(expected)
    elif isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        if expected.dtype.hasobject:
            for mine, theirs in zip(found.flat, expected.flat, strict=True):
                assert_equal(mine, theirs)
        elif expected.dtype.fields:  # there may be undefined padding bytes between fields
            assert repr(found.tolist()) == repr(expected.tolist())
        else:
            assert found.tobytes() == expected.tobytes()
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_equal(found[key], value)
    else:
        assert found == expected


def as_bytes(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def assert_same_batch(found: DataProto, expected: DataProto) -> None:
    assert len(found) == len(expected)
    assert_equal(dict(found.batch.items()), dict(expected.batch.items()))
    assert_equal(found.non_tensor_batch, expected.non_tensor_batch)
    assert_equal(found.meta_info, expected.meta_info)
    assert found.auto_padding == expected.auto_padding


# One column


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("protocol", range(6))
def test_every_kind_of_column_round_trips_in_every_pickle_protocol(protocol, compress):
    packed = PackedBatch.pack(everything(), pickle.dumps, compress)
    assert_same_batch(pickle.loads(pickle.dumps(packed, protocol)).read(), everything())
    left_to_pickle = PackedBatch.pack(everything(), compress=compress)
    assert_same_batch(pickle.loads(pickle.dumps(left_to_pickle, protocol)).read(), everything())


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(3, dtype=torch.int8),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.tensor(True),
        torch.tensor(1 - 1j),
        torch.tensor(2.0, requires_grad=True),
    ],
)
def test_0_dimensional_tensor_round_trips(value):
    column = PackedColumn.of_tensor(value)
    for protocol in range(6):
        read = pickle.loads(pickle.dumps(column, protocol)).read(None)
        assert_equal(read, value.detach())
        assert read.shape == ()
        read.zero_()
    assert column.read(None).item() == value.item()


@pytest.mark.parametrize(
    "value",
    [np.array(5, np.int8), np.array("abc"), np.array("2024-02-29", "M8[s]"), np.array((1, 2.0), "i4,f8")],
    ids=["int8", "text", "time", "record"],
)
def test_0_dimensional_array_round_trips(value):
    read = pickle.loads(pickle.dumps(PackedColumn.of_array("value", value), 5)).read(None)
    assert_equal(read, value)


def test_0_dimensional_object_array_round_trips():
    value = np.array({"a": 1}, dtype=object)
    column = pickle.loads(pickle.dumps(PackedColumn.of_array("value", value, pickle.dumps), 5))
    assert column.read(None).shape == ()
    assert column.read(None).item() == {"a": 1}


def test_packing_does_not_copy_contiguous_columns():
    tensor, array = torch.arange(4), np.arange(4)
    data = DataProto.from_dict({"tensor": tensor}, {"array": array})
    packed = PackedBatch.pack(data, pickle.dumps)
    tensor[0], array[0] = 9, 8
    assert packed.read().batch["tensor"].tolist() == [9, 1, 2, 3]
    assert packed.read().non_tensor_batch["array"].tolist() == [8, 1, 2, 3]


# Columns and rows

CHOICES: list[Any] = [
    None,
    slice(0, 5),
    slice(0, 2),
    slice(1, 4),
    slice(4, 5),
    slice(2, 2),
    slice(5, 5),
    np.array([4, 0, 2]),
    np.array([1, 1, 1, 3]),
    np.array([], dtype=np.int64),
    np.array([-1, 0]),
]


@pytest.mark.parametrize("rows", CHOICES, ids=str)
def test_read_returns_the_rows_of_the_batch(rows):
    data, packed = everything(), arrived(PackedBatch.pack(everything(), pickle.dumps))
    expected: Any = data if rows is None else data[rows] if isinstance(rows, slice) else data.select_idxs(rows)
    assert_same_batch(packed.read(None, rows), expected)
    names = ["bf16", "no_width", "records", "objects", "empty"]
    expected = expected.select(names[:2], names[2:])
    assert_same_batch(packed.read(names, rows), expected)
    for name in TENSORS:
        assert_equal(packed.read([name], rows).batch[name], (data if rows is None else data[rows]).batch[name].detach())


@pytest.mark.parametrize("name", [name for name in ARRAYS if name != "aligned"])
@pytest.mark.parametrize("rows", CHOICES, ids=str)
def test_shared_read_of_an_array_is_equal(name, rows):
    packed = arrived(PackedBatch.pack(everything(), pickle.dumps))
    expected = ARRAYS[name] if rows is None else ARRAYS[name][rows]
    assert_equal(packed.read([name], rows, shared=True).non_tensor_batch[name], expected)


@pytest.mark.parametrize("rows", CHOICES, ids=str)
def test_shared_read_of_a_tensor_is_equal(rows):
    packed = arrived(PackedBatch.pack(everything(), pickle.dumps))
    for name, tensor in TENSORS.items():
        expected = DataProto.from_dict({name: tensor.detach()})
        expected = expected if rows is None else expected[rows]
        assert_equal(packed.read([name], rows, shared=True).batch[name], expected.batch[name])


def test_shared_read_of_an_aligned_record_keeps_its_dtype():
    packed = arrived(PackedBatch.pack(everything(), pickle.dumps))
    assert packed.read(["aligned"], shared=True).non_tensor_batch["aligned"].dtype == ARRAYS["aligned"].dtype


def test_batch_of_no_rows_keeps_shapes_and_dtypes():
    data = everything()[0:0]
    packed = arrived(PackedBatch.pack(data, pickle.dumps))
    assert len(packed) == packed.num_rows == 0
    assert_same_batch(packed.read(), data)
    assert_same_batch(packed.read(None, slice(0, 0)), data)
    assert_same_batch(packed.read(shared=True), data)


def test_view_is_packed_with_only_its_rows():
    large = DataProto.from_dict({"x": torch.zeros(1000)}, {"n": np.zeros(1000)})
    assert PackedBatch.pack(large[10:12]).num_bytes() == 2 * 4 + 2 * 8


def test_packed_batches_without_tensors_or_columns_round_trip():
    objects = arrived(PackedBatch.pack(DataProto.from_dict(non_tensors={"o": ["a", "b"]}), pickle.dumps)).read()
    assert objects.batch is None
    assert objects.non_tensor_batch["o"].tolist() == ["a", "b"]
    alone = arrived(PackedBatch.pack(DataProto(meta_info={"k": 1}, auto_padding=True), pickle.dumps)).read()
    assert alone.batch is None
    assert alone.meta_info == {"k": 1}
    assert alone.auto_padding
    rows = DataProto.from_dict({"x": torch.zeros(3)}).select([])
    assert len(arrived(PackedBatch.pack(rows)).read()) == 3


def test_reading_no_columns_keeps_the_number_of_rows():
    packed = PackedBatch.pack(everything())
    assert len(packed.read([])) == 5
    assert len(packed.read([], slice(1, 3))) == 2
    assert len(packed.read([], np.array([0, 0, 4, 4]))) == 4
    assert packed.read([]).meta_info["step"] == 3


def test_an_unknown_column_is_an_error():
    with pytest.raises(FieldError, match="the batch has no 'z'; it has 'x'"):
        PackedBatch.pack(DataProto.from_dict({"x": torch.zeros(1)})).read(["x", "z"])


def test_subclass_is_kept():
    assert type(pickle.loads(pickle.dumps(PackedBatch.pack(OwnBatch(meta_info={"k": 1})))).read()) is OwnBatch


class OwnBatch(DataProto):
    pass


def test_the_device_of_the_batch_is_kept():
    packed = PackedBatch.pack(DataProto.from_dict({"x": torch.zeros(1)}).to("cpu"))
    assert packed.read().batch.device == torch.device("cpu")
    assert PackedBatch.pack(DataProto.from_dict({"x": torch.zeros(1)})).read().batch.device is None


def test_the_repr_names_the_columns():
    data = DataProto.from_dict({"x": torch.zeros(2)}, {"o": ["a", "b"]})
    assert repr(PackedBatch.pack(data)) == "PackedBatch of 2 rows: x, o"
    assert repr(PackedBatch.pack(DataProto())) == "PackedBatch of 0 rows: no columns"


# Memory


@pytest.mark.parametrize("rows", [None, slice(1, 4), np.array([0, 2])], ids=str)
@pytest.mark.parametrize("compress", [False, True])
def test_read_columns_are_writable_private_copies(rows, compress):
    packed = arrived(PackedBatch.pack(everything(), pickle.dumps, compress))
    first = packed.read(None, rows)
    for column in first.batch.values():
        column.zero_()
    for name, column in first.non_tensor_batch.items():
        assert column.flags.writeable
        if not column.dtype.hasobject:
            column[...] = np.zeros((), column.dtype)
        elif name == "objects":
            if isinstance(column[0], dict):
                column[0]["a"] = "written"
            column[:] = "written"
    first.meta_info["nested"]["list"].append("written")
    first.meta_info["array"][:] = 9
    expected = everything() if rows is None else everything()[rows]
    assert_same_batch(packed.read(None, rows), expected)


def test_columns_of_one_read_do_not_share_memory():
    packed = arrived(PackedBatch.pack(everything(), pickle.dumps))
    first, second = packed.read(["int64"]), packed.read(["int64"])
    first.batch["int64"][0] = 0
    assert second.batch["int64"][0] == 2**62


def test_shared_read_returns_views_of_the_store():
    buffers: list[pickle.PickleBuffer] = []
    data = DataProto.from_dict(
        {"x": torch.arange(6).reshape(3, 2)}, {"n": np.arange(3), "t": np.array(["a", "b", "c"])}
    )
    stream = pickle.dumps(PackedBatch.pack(data, pickle.dumps), protocol=5, buffer_callback=buffers.append)
    store = [bytearray(buffer.raw()) for buffer in buffers]
    read_only = [memoryview(memory).toreadonly() for memory in store]
    packed = pickle.loads(stream, buffers=read_only)
    whole, part = packed.read(shared=True), packed.read(rows=slice(1, 3), shared=True)
    picked = packed.read(rows=np.array([1, 2]), shared=True)
    own = packed.read(rows=slice(1, 3))
    store[0][16:24] = (77).to_bytes(8, "little")  # x[1, 0]
    store[1][8:16] = (88).to_bytes(8, "little")  # n[1]
    assert whole.batch["x"].tolist() == [[0, 1], [77, 3], [4, 5]]
    assert part.batch["x"].tolist() == [[77, 3], [4, 5]]
    assert part.non_tensor_batch["n"].tolist() == [88, 2]
    assert picked.batch["x"].tolist() == own.batch["x"].tolist() == [[2, 3], [4, 5]]
    assert own.non_tensor_batch["n"].tolist() == [1, 2]


def test_shared_read_of_objects_is_private():
    packed = arrived(PackedBatch.pack(everything(), pickle.dumps))
    packed.read(["objects"], shared=True).non_tensor_batch["objects"][0]["a"] = "written"
    assert packed.read(["objects"], shared=True).non_tensor_batch["objects"][0] == {"a": 1}


def test_shared_memory_outlives_the_packed_batch():
    data = DataProto.from_dict({"x": torch.arange(100_000)})
    packed = arrived(PackedBatch.pack(data))
    shared = packed.read(shared=True).batch["x"]
    del packed
    bytearray(800_000)
    assert shared.sum().item() == 4_999_950_000


# Bytes


def test_num_bytes_is_the_size_of_the_columns():
    data = DataProto.from_dict(
        {"bf16": torch.zeros(5, 3, dtype=torch.bfloat16), "bool": torch.zeros(5, dtype=torch.bool)},
        {"text": np.array(["abc"] * 5), "objects": ["some", "objects", None, 1, 2]},
    )
    packed = PackedBatch.pack(data, pickle.dumps)
    num_pickled = len(pickle.dumps(data.non_tensor_batch["objects"]))
    assert [packed.num_bytes([name]) for name in packed.columns] == [30, 5, 60, num_pickled]
    assert packed.num_bytes() == 95 + num_pickled
    assert packed.num_bytes([]) == 0
    assert PackedColumn.of_tensor(torch.zeros(0, 7)).num_bytes == 0
    assert PackedColumn.of_tensor(torch.zeros(1).expand(4)).num_bytes == 16


def test_buffers_are_out_of_band_and_the_stream_is_small():
    data = DataProto.from_dict(
        {"x": torch.zeros(1000, 10), "y": torch.zeros(1000, dtype=torch.bool)}, {"n": np.zeros(1000)}
    )
    for packed in (PackedBatch.pack(data, pickle.dumps), PackedBatch.pack(data)):
        buffers: list[pickle.PickleBuffer] = []
        stream = pickle.dumps(packed, protocol=5, buffer_callback=buffers.append)
        assert [buffer.raw().nbytes for buffer in buffers] == [40_000, 1000, 8000]
        assert len(stream) < 1500


def test_out_of_band_buffers_are_the_memory_of_the_batch():
    x = torch.arange(3)
    buffers: list[pickle.PickleBuffer] = []
    pickle.dumps(PackedBatch.pack(DataProto.from_dict({"x": x})), protocol=5, buffer_callback=buffers.append)
    x[0] = 5
    assert list(buffers[0].raw().cast("b").cast("q")) == [5, 1, 2]


# Compression


def test_compression_shrinks_and_round_trips():
    data = DataProto.from_dict(
        {"zeros": torch.zeros(1000, 100, dtype=torch.bfloat16), "ids": torch.arange(10_000).reshape(1000, 10)},
        {"text": np.array(["the same text"] * 1000), "objects": [{"a": 1}] * 1000},
        {"k": 1},
    )
    plain, small = (PackedBatch.pack(data, pickle.dumps, compress) for compress in (False, True))
    for name in ("zeros", "ids", "text"):
        assert small.columns[name].is_compressed
        assert small.num_bytes([name]) < plain.num_bytes([name]) / 3
    assert small.num_bytes(["zeros"]) < 1000
    for packed in (small, arrived(small), pickle.loads(pickle.dumps(small, 2))):
        assert_same_batch(packed.read(), data)
        assert_same_batch(packed.read(shared=True), data)
        assert_same_batch(packed.read(["ids", "text"], slice(3, 5)), data[3:5].select(["ids"], ["text"]))
        rows = np.array([7, 7, 999])
        assert_same_batch(packed.read(["ids"], rows), data.select_idxs(rows).select(["ids"], []))


def test_small_or_incompressible_columns_are_not_compressed():
    noise = np.random.default_rng(0).integers(0, 256, COMPRESS_FROM_BYTES * 4, dtype=np.uint8)
    assert not PackedColumn.of_array("noise", noise, compress=True).is_compressed
    assert not PackedColumn.of_tensor(torch.zeros(COMPRESS_FROM_BYTES - 1, dtype=torch.uint8), True).is_compressed
    assert PackedColumn.of_tensor(torch.zeros(COMPRESS_FROM_BYTES, dtype=torch.uint8), True).is_compressed


def test_compressed_buffers_are_out_of_band():
    buffers: list[pickle.PickleBuffer] = []
    packed = PackedBatch.pack(DataProto.from_dict({"x": torch.zeros(10_000)}), compress=True)
    pickle.dumps(packed, protocol=5, buffer_callback=buffers.append)
    assert [buffer.raw().nbytes for buffer in buffers] == [packed.num_bytes()]
    assert packed.num_bytes() < 1000


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


def test_column_that_cannot_be_pickled_is_named_in_the_error():
    with pytest.raises(BatchError, match="'locals' cannot be sent to another process"):
        PackedBatch.pack(DataProto.from_dict(non_tensors={"locals": [lambda: 1]}), pickle.dumps)
    with pytest.raises(BatchError, match="'meta_info' cannot be sent to another process"):
        PackedBatch.pack(DataProto(meta_info={"f": lambda: 1}), pickle.dumps)


# Regressions


@pytest.mark.parametrize("name", ["conjugated", "negated"])
def test_lazy_conjugate_or_negative_view_is_packed(name):
    waves = torch.tensor([1 + 2j, 3 - 1j])
    tensor = {"conjugated": waves.conj(), "negated": torch._neg_view(torch.tensor([1.0, 2.0]))}[name]
    assert_equal(PackedColumn.of_tensor(tensor).read(None), tensor.resolve_conj().resolve_neg())


def test_one_row_of_an_expanded_column_is_packed():
    column = torch.tensor(7.5).expand(4)
    assert_equal(PackedColumn.of_tensor(column).read(None), torch.full((4,), 7.5))
    part = DataProto.from_dict({"temperatures": column})[3:4]
    assert pickle.loads(pickle.dumps(part)).batch["temperatures"].tolist() == [7.5]


def test_masked_array_is_rejected():
    with pytest.raises(FieldError, match="masked array"):
        DataProto.from_dict(non_tensors={"n": np.ma.array([1, 2, 3], mask=[False, True, False])})


def test_objects_packed_without_dumps_are_read_into_a_new_array():
    packed = PackedBatch.pack(DataProto.from_dict(non_tensors={"o": ["a", "b"]}))
    packed.read().non_tensor_batch["o"][0] = "written"
    assert packed.read().non_tensor_batch["o"].tolist() == ["a", "b"]
