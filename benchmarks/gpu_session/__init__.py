"""A quarter of an hour on one GPU: parts in the order of their importance, each in processes of its own."""

import os

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # a library that asks for GPUs does not start CUDA
