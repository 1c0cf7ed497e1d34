"""Packing of values and errors for another process: what arrives is equal, and what cannot be sent is named."""

import asyncio
import os
import pickle
import threading
from collections import OrderedDict

import numpy as np
import pytest
import torch

from fixtures.values import canonical, rich_batch
from hybridflow.controller.ray.transport import SMALL_BYTES, Outgoing, freeze, pack_error, thaw, unpack
from hybridflow.errors import BatchError, DispatchError, FieldError, WorkerError
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.protocol.packed_batch import PackedColumn


def sent(value, **options):
    """Return the value as it arrives in another process."""
    outgoing = Outgoing(**options)
    frozen = freeze(outgoing.pack(value, "the value"), outgoing.num_bytes_in_all, outgoing.is_plain)
    return unpack(thaw(pickle.loads(pickle.dumps(frozen, protocol=5))), ())


VALUES = [
    *(None, True, -(10**40), float("nan"), "text", slice(1, None), torch.float16, torch.Size([1, 2])),
    *(b"", pickle.dumps({"not": "opened"}), bytes(range(256)) * (SMALL_BYTES // 128)),
    *({"a": [1, (2, {3})], 4: {"b": None}}, OrderedDict(b=1, a=torch.ones(2))),
    *(np.float64(0.1), np.int8(-1), np.array(5.0), np.array({"an": "object"}, dtype=object), np.array(["b", "abc"])),
    *(np.array([b"b"]), np.zeros((2, 0), dtype=np.complex64), np.ma.array([1, 2, 3], mask=[False, True, False])),
    np.array([(1, 0.5)], np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    *(torch.tensor(3, dtype=torch.int8), torch.zeros(0, 4, dtype=torch.bfloat16), torch.arange(6.0).reshape(2, 3).T),
    *(torch.tensor([1 + 2j]).conj(), torch.tensor(0.5).expand(2)),
    *(rich_batch(3), rich_batch(3000), rich_batch(5).slice(1, 3)),
    [DataProto(meta_info={"alone": 1}), {"deep": (DataProto.from_dict({"x": torch.arange(2)}), None)}],
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_arrives_unchanged_and_private(value):
    before = canonical(value)
    assert canonical(sent(value)) == before == canonical(value)
    if isinstance(value, torch.Tensor):
        sent(value).zero_()
        assert canonical(value) == before


def test_a_masked_array_keeps_its_mask():
    assert sent(np.ma.array([1, 2, 3], mask=[False, True, False])).sum() == 4


def test_tensors_arrive_detached_wherever_they_are():
    weights = torch.ones(2, requires_grad=True)
    batch = DataProto.from_dict(non_tensors={"infos": [weights, {"weights": weights}]}, meta_info={"weights": weights})
    arrived = sent([weights * 2, batch])
    infos = arrived[1].non_tensor_batch["infos"]
    found = [arrived[0], infos[0], infos[1]["weights"], arrived[1].meta_info["weights"]]
    assert [tensor.requires_grad for tensor in found] == [False] * 4


def test_compressed_batches_are_smaller_and_arrive_unchanged():
    batch = DataProto.from_dict(
        {"x": torch.arange(4).repeat_interleave(50_000).reshape(4, -1)}, {"words": list("abcd")}
    )
    outgoing = Outgoing(compress=True)
    arrived = unpack(outgoing.pack(batch, "the batch"), ())
    assert 0 < outgoing.num_bytes < batch.batch["x"].nbytes / 20
    assert canonical(arrived) == canonical(batch)
    arrived.batch["x"] += 1  # its memory is its own


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_tensor_is_a_value_but_not_a_packed_column():
    quantized = torch.quantize_per_tensor(torch.tensor([0.5, 1.0]), 0.1, 0, torch.qint8)
    assert sent(quantized).dequantize().tolist() == pytest.approx([0.5, 1.0])
    with pytest.raises(BatchError, match="dequantize"):
        PackedColumn.of_tensor(quantized)


def test_values_that_cannot_be_sent_are_named_with_their_type(tmp_path):
    generator, lock, column = (number for number in range(3)), threading.Lock(), np.empty(2, dtype=object)
    for value, kind in ((generator, "generator"), ([[lock], [1]], "lock"), ({"a": {"b": lock}}, "lock")):
        with pytest.raises(DispatchError, match=f"the value is a {kind}, which cannot be sent to another process"):
            Outgoing().pack(value, "the value")
    column[:] = [lock, lock]
    with pytest.raises(BatchError, match="the value: 'things' cannot be sent to another process, TypeError: cannot pi"):
        Outgoing().pack(DataProto.from_dict({"x": torch.arange(2)}, {"things": column}), "the value")
    for mode in "wr":
        with open(tmp_path / "file", mode) as file, pytest.raises(DispatchError, match=r"the value is a TextIOWrapper"):
            Outgoing().pack(file, "the value")


def test_a_future_of_this_process_alone_cannot_be_sent():
    with pytest.raises(DispatchError, match=r"a future that holds list cannot be sent .*pass the batch"):
        Outgoing().pack(DataProtoFuture(DataProto.concat, [[]], num_rows=1, columns=("x",), part_rows=[1]), "it")


# Errors


class NeedsTwo(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


class HasALock(Exception):
    def __init__(self):
        super().__init__("locked")
        self.lock = threading.Lock()


class HasNoText(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class OpensInItsProcess(Exception):
    def __reduce__(self):
        return _rebuild, (os.getpid(),)


closed = []


def _rebuild(pid):
    if closed:
        raise OSError(f"of process {pid}")
    return OpensInItsProcess("here")


def raised(error):
    try:
        raise error
    except BaseException as caught:
        return pack_error(caught, "Actor.update", "actor", 1, "10.0.0.1")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (NeedsTwo(1, 2), "NeedsTwo: 1 and 2"),
        (HasALock(), "HasALock: locked"),
        (HasNoText(), "HasNoText"),
        (KeyboardInterrupt("by the test"), "KeyboardInterrupt: by the test"),
        (asyncio.CancelledError("enough"), "CancelledError: enough"),
        (GeneratorExit("enough"), "GeneratorExit: enough"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_that_cannot_be_sent_arrives_as_its_text(error, text):
    arrived = raised(error).error()
    assert type(arrived) is WorkerError
    assert str(arrived).startswith(f"Actor.update failed on worker actor/1: {text}")
    assert (arrived.role, arrived.rank, arrived.node) == ("actor", 1, "10.0.0.1")
    assert "in raised" in str(arrived.__cause__)  # the traceback of the worker


def test_an_error_that_opens_only_in_the_worker_arrives_as_its_text():
    packed = raised(OpensInItsProcess("here"))
    closed.append(True)
    try:
        assert str(packed.error()).startswith("Actor.update failed on worker actor/1: OpensInItsProcess: here")
    finally:
        closed.clear()


def test_an_error_of_the_project_keeps_type_notes_and_causes():
    error = FieldError("needs 'x'")
    error.add_note("in Actor.update")
    error.__cause__ = ValueError("h" * 5_000_000)
    arrived = raised(error).error()
    assert (type(arrived), str(arrived), arrived.__notes__) == (FieldError, "needs 'x'", ["in Actor.update"])
    assert type(arrived.__cause__) is ValueError
    assert "in raised" in str(arrived.__cause__.__cause__)
