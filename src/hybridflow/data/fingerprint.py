"""A short hash of a data set as the model reads it, which ties a saved position to its data."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any


def fingerprint(rows: Iterable[Any]) -> str:
    """Return 32 hexadecimal digits: a hash of rows of JSON-like values, in their order."""
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
        digest.update(b"\n")
    return digest.hexdigest()
