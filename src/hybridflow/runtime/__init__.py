"""Process-level services: random streams, threads, stop signals, atomic files, reports. torch is imported on use."""

from hybridflow.runtime.allocator import (
    bound_shape_caches,
    keep_freed_memory,
    paused_collector,
    relax_garbage_collector,
)
from hybridflow.runtime.device import (
    can_compile_for_gpu,
    free_cached_memory,
    free_device_memory,
    gpu_has_bfloat16,
    own_device,
    preferred_dtype,
    require_dtype,
    require_visible_devices,
    take_compilations,
    use_own_device,
)
from hybridflow.runtime.files import (
    fsync_path,
    open_plain_file,
    require_plain_file,
    require_regular_file,
    sort_metadata,
    write_bytes_atomically,
    write_text_atomically,
)
from hybridflow.runtime.host_memory import HostMemory
from hybridflow.runtime.matmul_peak import measure_flops_now, measure_peak_flops, peak_flops
from hybridflow.runtime.memory import (
    describe_memory,
    is_out_of_memory,
    memory_limit,
    naming_out_of_memory,
    out_of_memory,
    peak_memory_of,
)
from hybridflow.runtime.progress import note_progress, progress
from hybridflow.runtime.random_state import (
    capture_random_state,
    restore_random_state,
    seed_random_state,
    unchanged_random_state,
)
from hybridflow.runtime.random_streams import derive_seed, uniform, uniform_state
from hybridflow.runtime.rendezvous import group_store, new_store_name, open_store, provide_stores
from hybridflow.runtime.side_stream import SideStream
from hybridflow.runtime.stop_signals import StopRequest
from hybridflow.runtime.threads import count_physical_cores, set_deterministic, set_num_threads, use_full_float32
from hybridflow.runtime.user_code import did_you_mean, require_arguments
from hybridflow.runtime.user_import import Interrupts, load_user_function

__all__ = [
    "HostMemory",
    "Interrupts",
    "SideStream",
    "StopRequest",
    "bound_shape_caches",
    "can_compile_for_gpu",
    "capture_random_state",
    "count_physical_cores",
    "derive_seed",
    "describe_memory",
    "did_you_mean",
    "free_cached_memory",
    "free_device_memory",
    "fsync_path",
    "gpu_has_bfloat16",
    "group_store",
    "is_out_of_memory",
    "keep_freed_memory",
    "load_user_function",
    "measure_flops_now",
    "measure_peak_flops",
    "memory_limit",
    "naming_out_of_memory",
    "new_store_name",
    "note_progress",
    "open_plain_file",
    "open_store",
    "out_of_memory",
    "own_device",
    "paused_collector",
    "peak_flops",
    "peak_memory_of",
    "preferred_dtype",
    "progress",
    "provide_stores",
    "relax_garbage_collector",
    "require_arguments",
    "require_dtype",
    "require_plain_file",
    "require_regular_file",
    "require_visible_devices",
    "restore_random_state",
    "seed_random_state",
    "set_deterministic",
    "set_num_threads",
    "sort_metadata",
    "take_compilations",
    "unchanged_random_state",
    "uniform",
    "uniform_state",
    "use_full_float32",
    "use_own_device",
    "write_bytes_atomically",
    "write_text_atomically",
]
