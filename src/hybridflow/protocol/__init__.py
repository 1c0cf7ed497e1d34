"""`DataProto`, the typed batch that controller and workers exchange, its future, and the glossary of its columns."""

import hybridflow.runtime.quick_imports  # isort: skip  # noqa: F401 (it makes the imports below quicker)
from hybridflow.protocol.data_proto import DataProto, DataProtoItem, pad_dataproto_to_divisor, unpad_dataproto
from hybridflow.protocol.fields import FIELDS, Field
from hybridflow.protocol.future import DataProtoFuture
from hybridflow.protocol.gather import all_gather_data_proto
from hybridflow.protocol.handle import Handle, HeldBatch
from hybridflow.protocol.padding import DataProtoConfig

__all__ = [
    "FIELDS",
    "DataProto",
    "DataProtoConfig",
    "DataProtoFuture",
    "DataProtoItem",
    "Field",
    "Handle",
    "HeldBatch",
    "all_gather_data_proto",
    "pad_dataproto_to_divisor",
    "unpad_dataproto",
]
