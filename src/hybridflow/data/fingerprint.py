"""A short hash of a data set as the model sees it, by which a saved position recognises its data."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any


def fingerprint(rows: Iterable[Any]) -> str:
    """32 hexadecimal digits over rows of JSON-like values, their order included."""
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
        digest.update(b"\n")
    return digest.hexdigest()
