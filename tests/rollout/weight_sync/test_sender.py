"""The sender of a weight sync, with an engine that has weights and computes nothing."""

import pytest
import torch
from support.faults import flip_bit

from hybridflow.config import load_config
from hybridflow.errors import WeightSyncError
from hybridflow.rollout.weight_sync.buckets import WeightSpec
from hybridflow.rollout.weight_sync.fingerprint import Fingerprints, fingerprint
from hybridflow.rollout.weight_sync.in_process import InProcess, hand_over
from hybridflow.rollout.weight_sync.receiver import WeightReceiver
from hybridflow.rollout.weight_sync.sender import WeightSender
from hybridflow.runtime.partial_tensor import PartialTensor, contents_of
from hybridflow.runtime.progress import progress


class Engine:
    """Three tensors, and slices of them; the log-probs of the probe are all -1."""

    num_updates, vocabulary_size = 7, 50

    def __init__(self):
        self.tensors = {name: torch.full((4,), float(i)) for i, name in enumerate("abc")}
        self.gathered = []

    def weight_shapes(self):
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def weights(self, boxes=None, at_once=0):
        for name, tensor in self.tensors.items():
            self.gathered.append(name)
            box = (boxes or {}).get(name)
            yield name, tensor if box is None else PartialTensor(tensor.shape, tensor.dtype, name, box, tensor[:2])

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


@pytest.fixture
def rollout():
    return Loads()


@pytest.fixture
def receiver(rollout):
    return WeightReceiver(rollout, "float32", InProcess())


def test_bucket_is_gathered_on_send_with_fingerprints_and_version(engine, config):
    sender = WeightSender(engine, config, InProcess)
    announced = sender.announce()
    assert announced.specs == [WeightSpec(name, (4,), "float32") for name in "abc"]
    assert (announced.num_buckets, announced.version, announced.num_bytes, announced.store) == (2, 7, 48, "")
    assert engine.gathered == []
    sent, contents = sender.send()
    assert engine.gathered == list(contents) == ["a", "b"]
    assert sent.fingerprints == {name: fingerprint(engine.tensors[name]) for name in "ab"}
    assert sent.version == 7


def test_rank_without_transport_gathers_but_does_not_send(engine, config, monkeypatch):
    computed = []
    monkeypatch.setattr(Fingerprints, "add", lambda self, name, tensor: computed.append(tensor))
    sender = WeightSender(engine, config, None)
    announced = sender.announce()
    sender.join(2)
    assert [sender.send()[1] for _ in range(announced.num_buckets)] == [None, None]
    assert engine.gathered == ["a", "b", "c"]
    sender.finish()
    assert computed == []


def test_sync_in_one_process_loads_and_checks_all_weights(engine, config, rollout, receiver):
    sender, before, num_buckets = WeightSender(engine, config, InProcess), progress(), 2
    assert hand_over(sender, receiver) == 48
    assert progress() - before == 2 * num_buckets  # sent and received
    assert all(rollout.loaded[name] is tensor for name, tensor in engine.tensors.items())
    assert rollout.version == 7
    probe = sender.compute_probe()  # fits vocabulary and positions of the model
    assert [len(sequence) for sequence in probe.sequences] == [8] * 4
    assert all(0 <= token < 50 for sequence in probe.sequences for token in sequence)
    assert probe.log_probs == [[-1.0] * 7] * 4
    differences = {"weight_sync/probe_diff_mean": 0.0, "weight_sync/probe_diff_max": 0.0}
    assert receiver.check(probe) == differences


def test_failed_load_leaves_no_weights_and_no_gathered_bucket(engine, config, rollout, receiver, monkeypatch):
    sender = WeightSender(engine, config, InProcess)
    hand_over(sender, receiver)

    def failing(weights):
        raise WeightSyncError("no memory")

    monkeypatch.setattr(rollout, "load", failing)
    with pytest.raises(WeightSyncError, match="no memory"):
        hand_over(sender, receiver)
    assert rollout.version is None
    with pytest.raises(StopIteration):
        sender.send()


@pytest.mark.parametrize(("owner", "method"), [(Fingerprints, "add"), (InProcess, "send")])
def test_out_of_memory_in_a_bucket_or_transport_names_the_bucket_size(engine, config, monkeypatch, owner, method):
    def lacks_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(owner, method, lacks_memory)
    sender = WeightSender(engine, config, InProcess)
    sender.announce()
    with pytest.raises(WeightSyncError, match=r"in a weight sync: CUDA .*; set a smaller rollout\.sync_bucket_bytes"):
        sender.send()


def test_slices_are_sent_where_the_receiver_loads_slices(engine, config, rollout, receiver):
    sender = WeightSender(engine, config, InProcess, {"b": ((0, 2),)})
    hand_over(sender, receiver)
    assert [type(tensor) is PartialTensor for tensor in rollout.loaded.values()] == [False, True, False]
    assert torch.equal(contents_of(rollout.loaded["b"]), torch.ones(2))
    receiver.start(sender.announce())
    sent, contents = sender.send()
    contents["b"].contents[1] = 7.0
    with pytest.raises(WeightSyncError, match="weight 'b' changed in transit"):
        receiver.receive((sent, contents))


def test_a_bit_flipped_in_a_bucket_is_detected_and_is_not_the_trainers(engine, config, receiver, monkeypatch):
    def flip(phase, bucket):
        assert phase == "sync_send"
        flip_bit(bucket)

    monkeypatch.setattr("hybridflow.rollout.weight_sync.sender.fault_point", flip)
    before = {name: tensor.clone() for name, tensor in engine.tensors.items()}
    with pytest.raises(WeightSyncError, match="weight 'a' changed in transit"):
        hand_over(WeightSender(engine, config, InProcess), receiver)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.tensors.items())
