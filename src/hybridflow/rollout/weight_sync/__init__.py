"""Weight sync from a trainer to rollout engines: in buckets, with versions, verified by the receiver."""

from hybridflow.rollout.weight_sync.base import IN_FLIGHT, Announcement, Sent, WeightTransport
from hybridflow.rollout.weight_sync.broadcast import Broadcast
from hybridflow.rollout.weight_sync.buckets import Bucket, WeightSpec, fill_buckets, plan_buckets, spec_of
from hybridflow.rollout.weight_sync.disk import Disk
from hybridflow.rollout.weight_sync.fingerprint import fingerprint
from hybridflow.rollout.weight_sync.in_process import InProcess, hand_over
from hybridflow.rollout.weight_sync.ipc import Ipc
from hybridflow.rollout.weight_sync.object_store import ObjectStore
from hybridflow.rollout.weight_sync.probe import Probe, probe_sequences
from hybridflow.rollout.weight_sync.receiver import RECEIVING, LoadsWeights, ReceivesWeights, WeightReceiver
from hybridflow.rollout.weight_sync.sender import SENDING, HasWeights, SendsWeights, WeightSender
from hybridflow.rollout.weight_sync.transports import TRANSPORTS, build_sending_transport, build_transport

__all__ = [
    "IN_FLIGHT",
    "RECEIVING",
    "SENDING",
    "TRANSPORTS",
    "Announcement",
    "Broadcast",
    "Bucket",
    "Disk",
    "HasWeights",
    "InProcess",
    "Ipc",
    "LoadsWeights",
    "ObjectStore",
    "Probe",
    "ReceivesWeights",
    "SendsWeights",
    "Sent",
    "WeightReceiver",
    "WeightSender",
    "WeightSpec",
    "WeightTransport",
    "build_sending_transport",
    "build_transport",
    "fill_buckets",
    "fingerprint",
    "hand_over",
    "plan_buckets",
    "probe_sequences",
    "spec_of",
]
