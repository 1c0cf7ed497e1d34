"""Recovery of a run: which failures can be mended, how, and how often. It knows no trainer and no algorithm."""

from hybridflow.fault_tolerance.decisions import ACTIONS, Action, Fault, Tries, action_for, fault_of
from hybridflow.fault_tolerance.groups import Restartable, RestartedGroups

__all__ = [
    "ACTIONS",
    "Action",
    "Fault",
    "Restartable",
    "RestartedGroups",
    "Tries",
    "action_for",
    "fault_of",
]
