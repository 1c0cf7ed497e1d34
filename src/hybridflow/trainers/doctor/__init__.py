"""Checks of a machine before a run: devices, versions, memory, file systems, network, and small real programs."""

from hybridflow.trainers.doctor.checks import run_checks
from hybridflow.trainers.doctor.finding import Finding

__all__ = ["Finding", "run_checks"]
