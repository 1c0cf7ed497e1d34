"""The one error class of the benchmarks."""


class BenchmarkError(RuntimeError):
    """An environment is missing, or a side did not do the measured work; the message names the fix."""
