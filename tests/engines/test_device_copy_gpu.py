import pytest
import torch

from hybridflow.engines.device_copy import to_device

pytestmark = pytest.mark.gpu


def test_a_pinned_copy_has_the_contents_though_its_source_is_changed(gpu):
    expected, copies = [], []
    for index in range(20):
        source = torch.full((1 << 16,), index)
        expected.append(index)
        copies.append(to_device(source.clone() if gpu.type == "cpu" else source, gpu))
        source.fill_(-1)  # the copy is made from pinned memory of its own
    assert [int(copy.unique()) for copy in copies] == expected


def test_an_expanded_tensor_arrives_with_its_contents(gpu):
    assert to_device(torch.arange(3).expand(2, 3), gpu).tolist() == [[0, 1, 2], [0, 1, 2]]
