"""The Python environment of each side. Peers have their own environments, built by the benchmark's make target."""

import secrets
import sys
from pathlib import Path

from support.errors import BenchmarkError

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"

ENVIRONMENTS = {
    "trl": ".bench/trl",
    "transformers": ".bench/trl",
    "verl": ".bench/verl",
    "vllm": ".venv-vllm",
    "hybridflow_vllm": ".venv-vllm",
}
"""Side -> environment. TRL's includes `transformers`; our vLLM backend runs in vLLM's."""

_VLLM = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),  # otherwise Ray writes one into the home directory
}
VARIABLES = {
    "vllm": _VLLM,
    "hybridflow_vllm": _VLLM,
    "verl": RAY,
}
"""Side -> environment variables that it requires."""


def python_of(system: str, make_target: str) -> Path:
    """Return the interpreter of a side; this one for "hybridflow". Raises BenchmarkError if it is missing."""
    if system == "hybridflow":
        return Path(sys.executable)
    python = ROOT / ENVIRONMENTS[system] / "bin" / "python"
    if not python.exists():
        raise BenchmarkError(
            f"the environment of {system} is missing: {python.relative_to(ROOT)} does not exist; "
            f"run `make {make_target}`, which creates it, or use --smoke."
        )
    return python
