"""What decides how the results of a process are rounded, and so which bits they have."""

import torch

from hybridflow.models.kernels.library import kernel_facts
from hybridflow.models.kernels.triton_support import has_triton
from hybridflow.runtime.device import can_compile_for_gpu, own_device
from hybridflow.runtime.observe.run_info import cpu_model


def arithmetic() -> dict[str, str]:
    """Return the facts of this process by name; equal facts, inputs and layouts give equal bits."""
    device = own_device()
    facts = {"device": device.type, "torch": torch.__version__, "threads": str(torch.get_num_threads())}
    if device.type == "cpu":
        instructions = torch.backends.cpu.get_cpu_capability()
        return {**facts, "processor": cpu_model(), "instructions": instructions, **kernel_facts()}
    return {
        **facts,
        "processor": torch.cuda.get_device_name(device),
        "kernels": "Triton" if has_triton() else "PyTorch",
        "layers": "compilable" if can_compile_for_gpu() else "not compilable",
    }
