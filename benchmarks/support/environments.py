"""Where the Python of each system is. Peers have environments of their own, made by the benchmark's make target."""

import sys
from pathlib import Path

from support.errors import BenchmarkError

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"

ENVIRONMENTS = {
    "trl": ".bench/trl",
    "transformers": ".bench/trl",
    "vllm": ".venv-vllm",
    "hybridflow_vllm": ".venv-vllm",
}
"""Side -> its environment; TRL's has the transformers that it is measured with, and our vLLM backend is beside vLLM."""

OF_VLLM = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
VARIABLES = {"vllm": OF_VLLM, "hybridflow_vllm": OF_VLLM}
"""Environment variables that a system needs."""


def python_of(system: str, make_target: str) -> Path:
    """The interpreter that has `system`, "hybridflow" being this one. Raises BenchmarkError if it is missing."""
    if system == "hybridflow":
        return Path(sys.executable)
    python = ROOT / ENVIRONMENTS[system] / "bin" / "python"
    if not python.exists():
        raise BenchmarkError(
            f"{system} has no environment, {python.relative_to(ROOT)} is missing; `make {make_target}` makes it."
        )
    return python
