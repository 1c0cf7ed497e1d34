"""Named places in the code at which a test or a benchmark injects faults into a process of a run.

The environment variable HYBRIDFLOW_FAULTS="path/to/file.py:function" names the function that each place then calls, in
the driver and in its workers. Unset, a place costs the lookup of the variable.
"""

import os
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from typing import Any

from hybridflow.errors import ConfigError
from hybridflow.runtime.user_code import load_user_function

FAULTS_VARIABLE = "HYBRIDFLOW_FAULTS"

current_worker: ContextVar[str] = ContextVar("current_worker", default="driver")
"""The worker whose constructor or method runs, as in `critic/0`; a backend sets it for the time of a call."""


def fault_point(name: str, target: Any = None) -> None:
    """Call the injected function, if there is one, with the name of this place, the current worker and the target.

    `target`: what is at hand there: the step that begins, a file that was written, or a bucket that is to be sent.
    """
    if place := os.environ.get(FAULTS_VARIABLE):
        _injected(place)(name, current_worker.get(), target)


@cache
def _injected(place: str) -> Callable[[str, str, Any], None]:
    return load_user_function(place, FAULTS_VARIABLE, ConfigError)
