import json

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hybridflow.runtime import sort_metadata

METADATA = {name: name.upper() for name in "hgfedcba"} | {"unusual": 'é "quoted" \\ \x7f\u2028\n'}
"""Nine entries: the library writes them in one of 362,880 orders."""


def test_files_of_equal_contents_are_equal_after_sorting(tmp_path):
    tensors = {'a/"b"': torch.arange(4.0), "ü": torch.zeros(0, 2, dtype=torch.int8)}
    contents = set()
    for number in range(20):
        file = tmp_path / f"{number}"
        save_file(tensors, file, metadata=METADATA)
        sort_metadata(file)
        contents.add(file.read_bytes())
    (data,) = contents
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert list(header["__metadata__"]) == sorted(METADATA)
    assert load_file(file).keys() == tensors.keys()
    assert all(torch.equal(load_file(file)[name], tensor) for name, tensor in tensors.items())
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == METADATA
