"""The library of compiled kernels: built once per processor into the user's cache, loaded once per process.

It does not know what the kernels compute, except the checksum of words. A missing compiler is not an error if the
library is in the cache; else PyTorch computes, slower and with other rounding.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from hybridflow.errors import ModelError
from hybridflow.runtime.observe import get_logger

SOURCES = [Path(__file__).parent / name for name in ("kernels.c", "kernels_of_type.h", "decoder_of_type.h")]
FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC")
X86_FLAGS = ("-march=native", "-mprefer-vector-width=512")
OTHER_FLAGS = ("-mcpu=native",)
BUILD_TIMEOUT_S = 120
DIGEST_SIZE = hashlib.sha256().digest_size

COMPUTED = (torch.float32, torch.bfloat16)
_SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int64: "int64"}
_enabled = True
_build = ""
_functions: dict[tuple[str, torch.dtype], Callable[..., int]] = {}
logger = get_logger(__name__)


def use_kernels(enabled: bool) -> None:
    """Enable the compiled kernels, which is the default, or compute with PyTorch only."""
    global _enabled
    _enabled = enabled


def kernel_facts() -> dict[str, str]:
    """Return what computes on the CPU: the compiled kernels, with a hash of their library, or PyTorch."""
    return {"kernels": "compiled C", "build": _build} if serves(torch.empty(0)) else {"kernels": "PyTorch"}


def serves(x: Tensor) -> bool:
    """Whether compiled kernels support tensors like `x`: float32 or bfloat16 on a CPU, with a compiler available."""
    if torch.compiler.is_compiling():  # torch.compile needs PyTorch's operations
        return False
    return _enabled and x.device.type == "cpu" and x.dtype in COMPUTED and _library() is not None


def serves_words(x: Tensor) -> bool:
    """Whether compiled kernels support integers like `x`: int64 on a CPU, with a compiler available."""
    return x.device.type == "cpu" and x.dtype == torch.int64 and _library() is not None


def call(name: str, dtype: torch.dtype, *arguments: Tensor | int | float | None) -> int:
    """Call a kernel for this element type, and return its integer result, if it has one.

    Tensors are passed as pointers, so the caller must ensure shapes and contiguity. Every call must have arguments of
    the same types as the first one, except that None is a null pointer.
    """
    function = _functions.get((name, dtype)) or _function(name, dtype, arguments)
    return function(*[argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments])


def _function(name: str, dtype: torch.dtype, arguments: tuple[Tensor | int | float | None, ...]) -> Callable[..., int]:
    """Load a kernel, and set its argument types."""
    if _library() is None:
        raise ModelError(f"{name} requires compiled kernels, which this machine does not have; check `serves` first.")
    function = getattr(_library(), f"{name}_{_SUFFIXES[dtype]}")
    types = {int: ctypes.c_int64, float: ctypes.c_float}
    function.argtypes = [types.get(type(argument), ctypes.c_void_p) for argument in arguments]
    function.restype = ctypes.c_int64
    _functions[name, dtype] = function
    return function


@cache
def _library() -> ctypes.CDLL | None:
    """Load the kernels, compiled if they are not in the cache; None, with one warning, if they cannot be compiled."""
    try:
        try:
            library = _from_cache()
        except (OSError, subprocess.SubprocessError):  # for example a full disk, or one mounted noexec
            library = None
        return library or _from_temporary_directory()
    except (OSError, subprocess.SubprocessError, ValueError) as error:  # ValueError: CC has unbalanced quotes
        output = getattr(error, "stderr", None) or str(error)
        logger.warning(
            "no compiled CPU kernels (%s): PyTorch's operations are used, which are slower and round differently. "
            "Install a C compiler with OpenMP, such as gcc, or set CC to one.",
            " ".join(output.split())[:200],
        )
        return None


def _from_temporary_directory() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as directory:
        return _load(_compile(Path(directory) / "kernels.so"))


def _from_cache() -> ctypes.CDLL | None:
    """Load the library from the user's cache, built if missing or damaged; None if other users can write the cache.

    A library stays when the compiler changes or is not found, so that results keep their bits.
    """
    directory = user_cache()
    if directory is None:
        return None
    path = directory / f"kernels-{_fingerprint()}.so"
    if path.exists() and not _is_private(path):
        return None
    if not (path.exists() and _is_whole(path)):
        with tempfile.TemporaryDirectory(dir=directory) as temporary:
            built = _compile(Path(temporary) / "kernels.so")
            with built.open("r+b") as file:  # append the digest, which the loader ignores
                digest = hashlib.sha256(file.read()).digest()
                file.write(digest)
                file.flush()
                os.fsync(file.fileno())
            os.replace(built, path)
    return _load(path)


def user_cache() -> Path | None:
    """Return this user's cache directory, made if missing; None if there is none, or if other users can write it.

    Raises OSError if it cannot be made.
    """
    try:
        directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hybridflow"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except RuntimeError:  # there is no home directory
        return None
    return directory if _is_private(directory) else None


def _load(path: Path) -> ctypes.CDLL:
    global _build
    _build = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    return ctypes.CDLL(str(path))


def _is_whole(path: Path) -> bool:
    """Whether a library ends with its digest; loading a truncated file would crash the process."""
    content = path.read_bytes()
    return hashlib.sha256(content[:-DIGEST_SIZE]).digest() == content[-DIGEST_SIZE:]


def _is_private(path: Path) -> bool:
    """Whether only this user can write the path: the library's code runs with this user's rights."""
    status = path.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


def _compile(output: Path) -> Path:
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or shutil.which("gcc") or "cc"]
    logger.info("compiling the CPU kernels (takes a few seconds)")
    command = [*compiler, *_flags(), str(SOURCES[0]), "-o", str(output), "-lm"]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
    output.chmod(0o700)  # in spite of the umask: a file that others can write is not trusted
    return output


def _flags() -> tuple[str, ...]:
    return (*FLAGS, *(X86_FLAGS if platform.machine() in ("x86_64", "AMD64") else OTHER_FLAGS))


def _fingerprint() -> str:
    """Return a hash of the sources, the options and the processor, for which `native` code is built."""
    digest = hashlib.sha256()
    for part in (*(source.read_bytes() for source in SOURCES), repr(_flags()).encode(), _processor()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def _processor() -> bytes:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor().encode()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)})).encode()


def sum_words(words: Tensor, constants: Tensor) -> int:
    """Return a checksum modulo 2**64 of words (n,) int64, for which `serves_words` must be true.

    In blocks of `width` words, each word is mixed with a constant of `constants` (width,) int64 and added; the block
    sums are mixed with odd numbers of SplitMix64 and added.
    """
    return call("sum_words", words.dtype, words, constants, len(words), len(constants)) % 2**64
