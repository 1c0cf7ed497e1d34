import json

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hybridflow.runtime import sort_metadata

METADATA = {name: name.upper() for name in "hgfedcba"} | {"unusual": 'é "quoted" \\ \x7f\u2028\n'}
"""Nine entries: the library writes them in one of 362,880 orders."""


def write(path):
    tensors = {'a/"b"': torch.arange(4.0), "ü": torch.zeros(0, 2, dtype=torch.int8)}
    save_file(tensors, path, metadata=METADATA)
    return tensors


def test_files_of_equal_contents_are_equal_after_sorting(tmp_path):
    contents = set()
    for number in range(20):
        write(tmp_path / f"{number}")
        sort_metadata(tmp_path / f"{number}")
        contents.add((tmp_path / f"{number}").read_bytes())
    (data,) = contents
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert list(header["__metadata__"]) == sorted(METADATA)


def test_sorting_keeps_tensors_and_metadata(tmp_path):
    tensors = write(tmp_path / "file")
    sort_metadata(tmp_path / "file")
    assert load_file(tmp_path / "file").keys() == tensors.keys()
    assert all(torch.equal(load_file(tmp_path / "file")[name], tensor) for name, tensor in tensors.items())
    with safe_open(tmp_path / "file", framework="pt") as opened:
        assert opened.metadata() == METADATA
