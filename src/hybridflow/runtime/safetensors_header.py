"""The header of a safetensors file: its length (8 bytes, little-endian), then JSON, padded with spaces."""

import json
from pathlib import Path


def sort_metadata(path: str | Path) -> None:
    """Sort the metadata in the header of a safetensors file, in place.

    The library writes it in the order of a hash map, which differs from one file to the next: files with equal contents
    would differ. The length of the header does not change.
    """
    with open(path, "r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(length)
        assert len(text) == length, f"the header of '{path}' has {length} bytes and would have {len(text)}"
        file.seek(8)
        file.write(text)
