"""Checks of a machine before a run: devices, versions, memory, file systems, network, and small real programs.

`run_checks` starts each check in a process of its own with a time limit, so that a library that cannot be imported or
hangs is one finding. Nothing that is imported before that needs another package.
"""

from hybridflow.doctor.finding import Finding
from hybridflow.doctor.run_checks import run_checks

__all__ = ["Finding", "run_checks"]
