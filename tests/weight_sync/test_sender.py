"""The sender of a weight sync, with an engine that has weights and computes nothing."""

import pytest
import torch

from hybridflow.config import load_config
from hybridflow.errors import WeightSyncError
from hybridflow.runtime import progress
from hybridflow.runtime.partial_tensor import PartialTensor, contents_of
from hybridflow.weight_sync import InProcess, WeightReceiver, WeightSender, WeightSpec, fingerprint, hand_over
from hybridflow.weight_sync.buckets import Bucket, corrupt
from hybridflow.weight_sync.fingerprint import Fingerprints


class Engine:
    """Three tensors; the log-probs of the probe are all -1."""

    num_updates, vocabulary_size = 7, 50

    def __init__(self):
        self.tensors = {name: torch.full((4,), float(i)) for i, name in enumerate("abc")}
        self.gathered = []

    def weight_shapes(self):
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def weights(self):
        for name, tensor in self.tensors.items():
            self.gathered.append(name)
            yield name, tensor

    def forward(self, rows):
        return {"log_probs": -torch.ones(rows.batch["response_mask"].shape)}


class Loads:
    """A rollout engine that stores the loaded weights."""

    def __init__(self):
        self.loaded, self.version = {}, None

    def start_loading(self, shapes):
        self.loaded = {}

    def load(self, weights):
        self.loaded |= dict(weights)

    def finish_loading(self, version):
        self.version = version

    def abandon_loading(self):
        self.version = None

    def log_probs(self, sequences):
        return [[-1.0] * (len(sequence) - 1) for sequence in sequences]


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def config():
    return load_config(None, ["rollout.sync_bucket_bytes=32", "data.max_prompt_length=4", "data.max_response_length=5"])


def test_announcement_has_specs_and_number_of_buckets(engine, config):
    announced = WeightSender(engine, config, InProcess).announce()
    assert announced.specs == [WeightSpec(name, (4,), "float32") for name in "abc"]
    assert (announced.num_buckets, announced.version, announced.num_bytes, announced.store) == (2, 7, 48, "")
    assert engine.gathered == []


def test_bucket_is_gathered_on_send_with_fingerprints_and_version(engine, config):
    sender = WeightSender(engine, config, InProcess)
    sender.announce()
    sent, contents = sender.send()
    assert engine.gathered == ["a", "b"]
    assert list(contents) == ["a", "b"]
    assert sent.fingerprints == {name: fingerprint(engine.tensors[name]) for name in "ab"}
    assert sent.version == 7


def test_rank_without_transport_gathers_but_does_not_send(engine, config):
    sender = WeightSender(engine, config, None)
    announced = sender.announce()
    sender.join(2)
    assert [sender.send()[1] for _ in range(announced.num_buckets)] == [None, None]
    assert engine.gathered == ["a", "b", "c"]
    sender.finish()


def test_probe_fits_vocabulary_and_positions_of_model(engine, config):
    probe = WeightSender(engine, config, InProcess).compute_probe()
    assert [len(sequence) for sequence in probe.sequences] == [8] * 4
    assert all(0 <= token < 50 for sequence in probe.sequences for token in sequence)
    assert probe.log_probs == [[-1.0] * 7] * 4


def test_sync_in_one_process_loads_and_checks_all_weights(engine, config):
    rollout = Loads()
    sender, receiver = WeightSender(engine, config, InProcess), WeightReceiver(rollout, "float32", InProcess())
    before, num_buckets = progress(), 2
    assert hand_over(sender, receiver) == 48
    assert progress() - before == 2 * num_buckets  # sent and received
    assert all(rollout.loaded[name] is tensor for name, tensor in engine.tensors.items())
    assert rollout.version == 7
    assert receiver.check(sender.compute_probe()) == {
        "weight_sync/probe_diff_mean": 0.0,
        "weight_sync/probe_diff_max": 0.0,
    }


def test_failed_load_leaves_no_weights_and_no_gathered_bucket(engine, config, monkeypatch):
    rollout = Loads()
    sender, receiver = WeightSender(engine, config, InProcess), WeightReceiver(rollout, "float32", InProcess())
    hand_over(sender, receiver)

    def failing(weights):
        raise WeightSyncError("no memory")

    monkeypatch.setattr(rollout, "load", failing)
    with pytest.raises(WeightSyncError, match="no memory"):
        hand_over(sender, receiver)
    assert rollout.version is None
    with pytest.raises(StopIteration):
        sender.send()


def test_only_the_sending_rank_computes_fingerprints(engine, config, monkeypatch):
    computed = []
    monkeypatch.setattr(Fingerprints, "add", lambda self, name, tensor: computed.append(tensor))
    for build, count in ((None, 0), (InProcess, 3)):
        sender = WeightSender(engine, config, build)
        for _ in range(sender.announce().num_buckets):
            sender.send()
        assert len(computed) == count
    assert engine.gathered == ["a", "b", "c"] * 2


def test_out_of_memory_in_a_gather_names_the_bucket_size(engine, config, monkeypatch):
    def weights():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        yield

    monkeypatch.setattr(engine, "weights", weights)
    sender = WeightSender(engine, config, InProcess)
    sender.announce()
    with pytest.raises(WeightSyncError, match=r"in a weight sync: CUDA .*; set a smaller rollout\.sync_bucket_bytes"):
        sender.send()


def test_out_of_memory_in_a_transport_names_the_bucket_size(engine, config, monkeypatch):
    def send(self, bucket):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(InProcess, "send", send)
    sender = WeightSender(engine, config, InProcess)
    sender.announce()
    with pytest.raises(WeightSyncError, match=r"in a weight sync: CUDA .*; set a smaller rollout\.sync_bucket_bytes"):
        sender.send()


class Sharded(Engine):
    """An engine that gives slices."""

    def weights(self, boxes=None):
        for name, tensor in super().weights():
            box = (boxes or {}).get(name)
            yield name, tensor if box is None else PartialTensor(tensor.shape, tensor.dtype, name, box, tensor[:2])


def test_slices_are_sent_where_the_receiver_loads_slices(config):
    engine, loads = Sharded(), Loads()
    sender = WeightSender(engine, config, InProcess, {"b": ((0, 2),)})
    hand_over(sender, WeightReceiver(loads, "float32", InProcess()))
    assert [type(tensor) is PartialTensor for tensor in loads.loaded.values()] == [False, True, False]
    assert torch.equal(contents_of(loads.loaded["b"]), torch.ones(2))


def test_slice_that_changes_in_transit_is_an_error(config):
    engine, loads = Sharded(), Loads()
    sender = WeightSender(engine, config, InProcess, {"b": ((0, 2),)})
    receiver = WeightReceiver(loads, "float32", InProcess())
    receiver.start(sender.announce())
    sent, contents = sender.send()
    contents["b"].contents[1] = 7.0
    with pytest.raises(WeightSyncError, match="weight 'b' changed in transit"):
        receiver.receive((sent, contents))


def test_a_bit_flipped_in_a_bucket_is_detected_and_is_not_the_trainers(engine, config, monkeypatch):
    def flip(phase, flip_bit):
        assert phase == "sync_send"
        flip_bit()

    monkeypatch.setattr("hybridflow.weight_sync.sender.fault_point", flip)
    before = {name: tensor.clone() for name, tensor in engine.tensors.items()}
    receiver = WeightReceiver(Loads(), "float32", InProcess())
    with pytest.raises(WeightSyncError, match="weight 'a' changed in transit"):
        hand_over(WeightSender(engine, config, InProcess), receiver)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.tensors.items())


def test_a_bit_is_flipped_in_the_part_of_a_weight_that_is_in_memory():
    whole = torch.arange(6.0).view(3, 2)
    part = PartialTensor(whole.shape, whole.dtype, "a", ((0, 1), (0, 2)), whole[:1])
    bucket = Bucket({"a": part}, {})
    corrupt(bucket)
    assert isinstance(bucket.weights["a"], PartialTensor)
    assert (contents_of(bucket.weights["a"]) != whole[:1]).sum() == 1
    assert torch.equal(whole, torch.arange(6.0).view(3, 2))
