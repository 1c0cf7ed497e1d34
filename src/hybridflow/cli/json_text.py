"""JSON for other programs: it has no NaN and no infinity, which become text."""

import json
import math
from collections.abc import Mapping
from typing import Any


def json_text(value: Any) -> str:
    """Return dictionaries, lists, texts and numbers as indented JSON."""
    return json.dumps(_finite(value), indent=1, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
