"""What the benchmarks share: sides in processes of their own, rounds, workloads, limits, the report."""
