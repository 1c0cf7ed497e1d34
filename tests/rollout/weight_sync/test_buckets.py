"""Plans of buckets, and gathering weights by a plan."""

import pytest
import torch

from hybridflow.errors import WeightSyncError
from hybridflow.rollout.weight_sync.buckets import (
    ALIGNMENT,
    WeightSpec,
    fill_buckets,
    packed_size,
    plan_buckets,
    spec_of,
    unpack,
)

SPECS = [
    WeightSpec("a", (4, 4), "float32"),
    WeightSpec("b", (3,), "float32"),
    WeightSpec("c", (100,), "bfloat16"),
    WeightSpec("d", (), "float32"),
]


def test_buckets_are_filled_in_order_up_to_their_size():
    sizes = {1: "a b c d", 76: "ab c d", 75: "a b c d", 204: "ab cd", 999: "abcd"}
    for bucket_bytes, expected in sizes.items():
        plan = plan_buckets(SPECS, bucket_bytes)
        assert ["".join(spec.name for spec in bucket) for bucket in plan] == expected.split()


def test_weights_are_gathered_when_their_bucket_is_requested():
    gathered = []

    def weights():
        for spec in SPECS:
            gathered.append(spec.name)
            yield spec.name, torch.zeros(spec.shape, dtype=spec.torch_dtype)

    buckets = fill_buckets(plan_buckets(SPECS, 76), weights(), 0)
    assert gathered == []
    assert list(next(buckets).weights) == ["a", "b"]
    assert gathered == ["a", "b"]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([("b", torch.zeros(3))], "name='b'"),
        ([("a", torch.zeros(4, 5))], r"shape=\(4, 5\)"),
        ([("a", torch.zeros(4, 4, dtype=torch.float64))], "dtype='float64'"),
        ([], "expected .*, got no weight"),
    ],
)
def test_weights_that_differ_from_the_plan_are_an_error(weights, message):
    with pytest.raises(WeightSyncError, match=message):
        next(fill_buckets(plan_buckets(SPECS, 64), weights, 0))


def test_tensors_of_packed_bucket_are_aligned_and_share_its_memory():
    packed = torch.zeros(packed_size(SPECS), dtype=torch.uint8)
    assert len(packed) % ALIGNMENT == 0
    weights = unpack(SPECS, packed)
    for spec in SPECS:
        assert spec_of(spec.name, weights[spec.name]) == spec
        assert (weights[spec.name].data_ptr() - packed.data_ptr()) % ALIGNMENT == 0
        weights[spec.name].fill_(1.0)
    assert packed.any()
