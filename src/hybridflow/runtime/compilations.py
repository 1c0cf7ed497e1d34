"""Compilation by torch.compile: whether this machine can compile for its GPU, and how often the process compiled."""

import importlib.util
import os
import shutil
import sys

_counted = 0


def can_compile_for_gpu() -> bool:
    """Return whether torch.compile works for a GPU here: it needs Triton, and a C compiler for its launchers."""
    compilers = (os.environ.get("CC"), "gcc", "clang", "cc")
    has_compiler = any(shutil.which(compiler) for compiler in compilers if compiler)
    return has_compiler and importlib.util.find_spec("triton") is not None


def take_compilations() -> int:
    """Return the number of graphs that torch.compile has compiled in this process since the last call."""
    global _counted
    tracer = sys.modules.get("torch._dynamo.utils")  # importing it takes longer than torch itself
    total = tracer.counters["stats"]["unique_graphs"] if tracer else 0
    taken, _counted = total - min(_counted, total), total  # a reset of the counters starts again from 0
    return taken
