import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from hybridflow.errors import BatchError
from hybridflow.protocol import DataProto


def out_of_band(data: DataProto) -> tuple[bytes, list[pickle.PickleBuffer]]:
    buffers: list[pickle.PickleBuffer] = []
    return pickle.dumps(data, protocol=5, buffer_callback=buffers.append), buffers


def mixed() -> DataProto:
    return DataProto.from_dict(
        {
            "ids": torch.arange(6).reshape(3, 2),
            "mask": torch.tensor([True, False, True]),
            "half": torch.tensor([1.5, -2.0, float("inf")], dtype=torch.bfloat16),
            "turned": torch.arange(12.0).reshape(4, 3).T,
            "wide": torch.tensor([[7]]).expand(3, 5),
        },
        {"o": ["text", {"a": [1]}, None], "n": np.arange(6.0).reshape(3, 2)[:, ::-1], "s": np.array(["a", "bb", ""])},
        {"k": {"deep": [1, 2]}},
        auto_padding=True,
    )


def assert_equal(first: DataProto, second: DataProto) -> None:
    first.union(second)
    assert first.get_data_info() == second.get_data_info()
    assert first.auto_padding == second.auto_padding


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_batch_round_trips_through_every_pickle_protocol(protocol):
    assert_equal(mixed(), pickle.loads(pickle.dumps(mixed(), protocol=protocol)))


def test_batch_round_trips_through_out_of_band_pickling():
    stream, buffers = out_of_band(mixed())
    assert_equal(mixed(), pickle.loads(stream, buffers=buffers))


def test_batches_without_tensors_or_columns_can_be_pickled():
    for data in (DataProto(), DataProto.from_dict(non_tensors={"o": ["a"]}), mixed().select([], [])):
        assert_equal(data, pickle.loads(pickle.dumps(data)))
        assert len(pickle.loads(pickle.dumps(data))) == len(data)


def test_each_tensor_is_one_out_of_band_buffer_without_a_copy():
    data = DataProto.from_dict({"x": torch.arange(1000), "y": torch.zeros(1000, 10)}, {"n": np.zeros(1000)})
    stream, buffers = out_of_band(data)
    assert [buffer.raw().nbytes for buffer in buffers] == [8000, 40000, 8000]
    assert len(stream) < 1500
    data.batch["x"][0] = 77
    assert pickle.loads(stream, buffers=buffers).batch["x"][0] == 77


def test_view_sends_only_its_rows():
    data = DataProto.from_dict({"x": torch.arange(1000)}, {"n": np.zeros(1000), "o": ["word"] * 1000})
    stream, buffers = out_of_band(data.chunk(10)[3])
    assert [buffer.raw().nbytes for buffer in buffers] == [800, 800]
    assert len(stream) < 2500
    assert len(pickle.dumps(data[5:6])) < 1500
    assert pickle.loads(stream, buffers=buffers).batch["x"].tolist() == list(range(300, 400))


def test_strided_columns_are_out_of_band_buffers_too():
    data = DataProto.from_dict({"x": torch.zeros(100, 100)[:, ::2]}, {"n": np.zeros((100, 100))[:, ::2]})
    stream, buffers = out_of_band(data)
    assert [buffer.raw().nbytes for buffer in buffers] == [100 * 50 * 4, 100 * 50 * 8]
    assert len(stream) < 1500


def test_batch_in_read_only_memory_loads_as_a_writable_copy():
    stream, buffers = out_of_band(DataProto.from_dict({"x": torch.arange(3)}, {"n": np.arange(3)}))
    frozen = [bytes(buffer.raw()) for buffer in buffers]
    for _ in range(2):
        loaded = pickle.loads(stream, buffers=frozen)
        assert loaded.batch["x"].tolist() == loaded.non_tensor_batch["n"].tolist() == [0, 1, 2]
        loaded.batch["x"][0] = 5
        loaded.non_tensor_batch["n"][0] = 5


def test_batch_in_the_pickle_stream_loads_writable():
    loaded = pickle.loads(pickle.dumps(DataProto.from_dict({"x": torch.arange(3)}, {"n": np.arange(3)})))
    loaded.batch["x"] += 1
    loaded.non_tensor_batch["n"] += 1
    assert loaded.batch["x"].tolist() == loaded.non_tensor_batch["n"].tolist() == [1, 2, 3]


def test_tensors_that_require_gradients_are_sent_detached():
    loaded = pickle.loads(pickle.dumps(DataProto.from_dict({"x": torch.ones(2, requires_grad=True) * 2})))
    assert not loaded.batch["x"].requires_grad


def test_a_batch_with_a_device_arrives_on_the_cpu():
    data = DataProto(TensorDict({"x": torch.zeros(2)}, [2], device="cpu"))
    assert pickle.loads(pickle.dumps(data)).batch.device == torch.device("cpu")


def test_inconsistent_batch_is_not_pickled():
    data = mixed()
    data.non_tensor_batch["o"] = np.zeros(7)
    with pytest.raises(BatchError, match="same number of rows"):
        pickle.dumps(data)
