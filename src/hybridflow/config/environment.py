"""Names of environment variables that a user may set for worker processes."""

import os
import re
from collections.abc import Mapping

SET_BY_BACKENDS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"),
)
"""Variables that tell a process its rank, its peers, its devices and its threads (controller.threads)."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def wrong_variable(environment: Mapping[str, str]) -> str | None:
    """Return what is wrong with the first variable that a worker process cannot get; None if all are right."""
    if not isinstance(environment, Mapping):
        return f"{environment!r:.100} is not a mapping from names of variables to texts"
    for name, value in environment.items():
        if name in SET_BY_BACKENDS:
            return f"{name} is set by the backend for each rank; leave it out"
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            return f"{name!r:.100} is not the name of a variable; expected letters, digits and _"
        if not isinstance(value, str) or "\0" in value or not _is_encodable(value):
            return f"{name}={value!r:.100} is not a text"
    return None


def _is_encodable(value: str) -> bool:
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        return False
    return True
