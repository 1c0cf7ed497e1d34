"""Keys that recipes of earlier versions may have, and what to use instead."""

REMOVED = {
    "faults.delay_s": "faults are injected by benchmarks/support/faults.py, see docs/recovery.md",
    "faults.plan": "faults are injected by benchmarks/support/faults.py, see docs/recovery.md",
    "faults.random": "faults are injected by benchmarks/support/faults.py, see docs/recovery.md",
    "faults.seed": "faults are injected by benchmarks/support/faults.py, see docs/recovery.md",
}
