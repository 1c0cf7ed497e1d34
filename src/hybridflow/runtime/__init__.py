"""Process-level services: random streams, threads, stop signals, atomic files, reports. torch is imported on use."""

from hybridflow.runtime.files import require_plain_file
from hybridflow.runtime.progress import note_progress
from hybridflow.runtime.random_streams import derive_seed
from hybridflow.runtime.user_code import require_arguments
from hybridflow.runtime.user_import import Interrupts, load_user_function

__all__ = [
    "Interrupts",
    "derive_seed",
    "load_user_function",
    "note_progress",
    "require_arguments",
    "require_plain_file",
]
