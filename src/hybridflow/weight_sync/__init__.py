"""The way of weights from a trainer to rollout engines: bucket by bucket, versioned, and checked at the other end."""

from hybridflow.weight_sync.broadcast import ByBroadcast
from hybridflow.weight_sync.buckets import Bucket, WeightSpec, fill_buckets, plan_buckets, spec_of
from hybridflow.weight_sync.disk import ThroughDisk
from hybridflow.weight_sync.fingerprint import fingerprint
from hybridflow.weight_sync.in_process import InProcess
from hybridflow.weight_sync.object_store import ThroughObjectStore
from hybridflow.weight_sync.probe import Probe, probe_sequences
from hybridflow.weight_sync.receiver import CheckedReceiver, LoadsWeights
from hybridflow.weight_sync.ways import Sent, WeightWay

__all__ = [
    "Bucket",
    "ByBroadcast",
    "CheckedReceiver",
    "InProcess",
    "LoadsWeights",
    "Probe",
    "Sent",
    "ThroughDisk",
    "ThroughObjectStore",
    "WeightSpec",
    "WeightWay",
    "fill_buckets",
    "fingerprint",
    "plan_buckets",
    "probe_sequences",
    "spec_of",
]
