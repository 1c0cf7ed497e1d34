"""Shared parts of the benchmarks: sides in their own processes, rounds, workloads, limits, the report."""
