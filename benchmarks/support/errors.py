"""The one error of the benchmarks."""


class BenchmarkError(RuntimeError):
    """Something is missing, or a side did not do what was measured; the message names the fix."""
