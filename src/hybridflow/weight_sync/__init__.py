"""Weight sync from a trainer to rollout engines: in buckets, with versions, verified by the receiver."""

from hybridflow.weight_sync.base import IN_FLIGHT, Announcement, Sent, WeightTransport
from hybridflow.weight_sync.broadcast import Broadcast
from hybridflow.weight_sync.buckets import Bucket, WeightSpec, fill_buckets, plan_buckets, spec_of
from hybridflow.weight_sync.disk import Disk
from hybridflow.weight_sync.fingerprint import fingerprint
from hybridflow.weight_sync.in_process import InProcess, hand_over
from hybridflow.weight_sync.ipc import Ipc
from hybridflow.weight_sync.object_store import ObjectStore
from hybridflow.weight_sync.probe import Probe, probe_sequences
from hybridflow.weight_sync.receiver import LoadsWeights, WeightReceiver
from hybridflow.weight_sync.sender import HasWeights, WeightSender
from hybridflow.weight_sync.transports import TRANSPORTS, build_sending_transport, build_transport

__all__ = [
    "IN_FLIGHT",
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
