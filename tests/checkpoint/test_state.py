import json
import math
import struct
from collections import OrderedDict, defaultdict, namedtuple
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.checkpoint import first_difference, join_state, split_state, zeros_like_state
from hybridflow.checkpoint.state import TENSOR_DTYPES
from hybridflow.errors import CheckpointError


def round_trip(state: Any) -> Any:
    """Split and join a state through JSON text, as on disk, with copies of the tensors."""
    tree, tensors = split_state(state)
    return join_state(json.loads(json.dumps(tree, allow_nan=False)), {name: t.clone() for name, t in tensors.items()})


def same(ours: Any, theirs: Any) -> bool:
    """Return whether two states have equal types, keys in order, bits of floats, and bytes of tensors."""
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, dict):
        return list(ours) == list(theirs) and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(ours, float):
        return struct.pack(">d", ours) == struct.pack(">d", theirs)
    if isinstance(ours, torch.Tensor):
        bits = [torch.empty(x.numel(), dtype=x.dtype).copy_(x.flatten()).view(torch.uint8) for x in (ours, theirs)]
        return ours.dtype == theirs.dtype and ours.shape == theirs.shape and torch.equal(*bits)
    if isinstance(ours, np.ndarray | np.generic):
        return ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes()
    return ours == theirs


@st.composite
def tensors(draw):
    """Draw tensors of every dtype with any bits, also empty, without dimensions, transposed, reversed or strided."""
    dtype = draw(st.sampled_from(sorted(TENSOR_DTYPES, key=str)))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    seed = draw(st.integers(0, 99))
    size = max(1, math.prod(shape)) * torch.empty(0, dtype=dtype).element_size()
    bits = torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    tensor = (bits % 2 if dtype == torch.bool else bits).view(dtype)[: math.prod(shape)].reshape(shape)
    change = draw(st.sampled_from(["none", "transposed", "strided"]))
    if tensor.ndim and change == "transposed":
        return tensor.transpose(0, -1)
    return tensor[..., ::2] if tensor.ndim and change == "strided" else tensor


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | tensors()
KEYS = st.text(max_size=4) | st.sampled_from(["$tuple", "$tensor", "$float", "$dict", "$", "a/b", "__metadata__"])
STATES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(KEYS, inner),
    max_leaves=12,
)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(STATES)
def test_every_state_is_restored_with_its_types_and_bits(state):
    assert same(round_trip(state), state)


def test_rare_values_are_restored():
    """These are rare in random states: huge integers, a lone surrogate, bits of a NaN, and paths that collide."""
    nan = struct.unpack(">d", bytes.fromhex("7ff8000000abcdef"))[0]
    state = [2**64, -(2**63) - 1, -(10**5000), "\ud800", nan, -math.nan, -0.0, 5e-324, (1, 1.0, True, "1")]
    assert same(round_trip(state), state)
    state = {"a": {"b/c": torch.tensor(1)}, "a/b": {"c": torch.tensor(2)}, "__metadata__": torch.tensor(3)}
    assert same(round_trip(state), state)
    state = [torch.zeros(0, n) for n in range(200)]
    assert same(round_trip(state), state)


def test_tree_is_strict_json_and_tensors_are_named_by_their_paths():
    tree, tensors = split_state(
        {"model": {"layers.0.weight": torch.zeros(1)}, "moments": [torch.zeros(1)], "loss": math.nan, "best": math.inf}
    )
    assert list(tensors) == ["model/layers.0.weight", "moments/0"]
    floats = '"loss": {"$float": "7ff8000000000000"}, "best": {"$float": "7ff0000000000000"}'
    assert floats in json.dumps(tree, allow_nan=False)


def test_subclasses_of_dictionaries_and_tensors_become_plain():
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    state = {"ordered": OrderedDict(a=1), "default": defaultdict(list, b=[2]), "p": parameter, "q": parameter * 2}
    result = round_trip(state)
    plain = {"ordered": {"a": 1}, "default": {"b": [2]}, "p": torch.tensor([1.0, 2.0]), "q": torch.tensor([2.0, 4.0])}
    assert same(result, plain)
    assert [result[name].requires_grad for name in "pq"] == [False, False]


def test_a_tensor_that_occurs_twice_is_stored_once_and_shared_again():
    embedding = torch.tensor([[1.0, 2.0]])
    tree, tensors = split_state({"embed": embedding, "head": embedding})
    assert list(tensors) == ["embed"]
    result = join_state(tree, tensors)
    assert result["embed"] is result["head"]


def test_views_of_one_memory_are_stored_separately():
    base, z = torch.arange(6.0), torch.tensor([1 + 2j])
    state = {"all": base, "head": base[:2], "tail": base[4:], "grid": base.view(2, 3), "grid.t": base.view(2, 3).t()}
    _, tensors = split_state(state)
    assert len({t.untyped_storage().data_ptr() for t in tensors.values()}) == 5
    state |= {"expanded": torch.tensor([7]).expand(3), "flipped": base.flip(0)}
    assert same(round_trip(state), state)
    assert [round_trip(x).tolist() for x in (z, z.conj(), z.conj().imag)] == [[1 + 2j], [1 - 2j], [-2.0]]


def test_numpy_arrays_and_scalars_keep_type_and_bytes():
    read_only = np.arange(3)
    read_only.flags.writeable = False
    state = {
        "words": np.array([1, 2**32 - 1], dtype=np.uint32),
        "grid": np.arange(6, dtype=np.int16).reshape(2, 3).T,
        "reversed": np.arange(3)[::-1],
        "mask": np.array([True, False]),
        "half": np.array(1.5, dtype=np.float16),
        "empty": np.zeros((0, 2)),
        "position": np.int64(7),
        "rate": np.float64("nan"),
        "flag": np.bool_(True),
        "read only": read_only,
    }
    result = round_trip(state)
    assert same(result, state)
    result["words"][0] = 5  # is writable


class Color(IntEnum):
    RED = 1


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (len, r"state\['a'\]\[1\] is a builtin_function_or_method, which cannot be saved; use dict, list"),
        ({1, 2}, r"\[1\] is a set"),
        (b"raw", r"\[1\] is a bytes"),
        (1j, r"\[1\] is a complex"),
        (Color.RED, r"\[1\] is a .*Color, which cannot be saved; convert it with int\(\)"),
        (Pair(1, 2), r"\[1\] is a .*Pair, which cannot be saved; convert it with tuple\(\)"),
        (torch.Size([1]), r"\[1\] is a torch\.Size, which cannot be saved; convert it with tuple\(\)"),
        ({"b": {0: 1}}, r"state\['a'\]\[1\]\['b'\] has the key 0 of type int; keys must be str"),
        (torch.zeros(2, device="meta"), r"\[1\] is a torch\.strided tensor of torch\.float32 on meta"),
        (torch.eye(2).to_sparse(), r"\[1\] is a torch\.sparse_coo tensor"),
        (torch.zeros(1, dtype=torch.complex128), r"\[1\] is a .*complex128.*; only dense tensors .*bfloat16"),
        (np.array(["text"]), r"\[1\] holds numpy's dtype\('<U4'\)"),
        (np.array([object()]), r"\[1\] holds numpy's dtype\('O'\)"),
        (np.zeros(1, dtype=">f4"), r"native byte order"),
        (np.zeros(1, dtype=np.longdouble), r"longdouble|float128"),
    ],
)
def test_unsupported_value_error_names_its_path(value, message):
    with pytest.raises(CheckpointError, match=message):
        split_state({"a": [0, value]})


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"$tensor": "gone"}, "the tensor 'gone' is missing"),
        ({"$code": "print(1)"}, r"'\$code' with a str is not a known tag; valid tags: \$tensor"),
        ({"$tuple": "abc"}, r"'\$tuple' with a str is not a known tag"),
        ({"$float": "00"}, r"'\$float' with a str is not a known tag"),
    ],
)
def test_tree_not_made_by_split_state_is_an_error(tree, message):
    with pytest.raises(CheckpointError, match=message):
        join_state({"a": [tree]}, {})


def state(**changes):
    return {"model": {"a": torch.tensor([1.0, math.nan]), "b": torch.tensor(2.0)}, "num_updates": 3, **changes}


A, B = torch.tensor([1.0, math.nan]), torch.tensor(2.0)


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({}, ""),  # although a NaN is not equal to itself
        ({"model": {"a": A, "b": torch.tensor(2.5)}}, "tensor 'model/b'"),
        ({"model": {"a": A.double(), "b": B}}, "tensor 'model/a'"),
        ({"model": {"a": A}}, "its structure"),
        ({"num_updates": 4}, "its structure"),
        ({"model": {"a": A, "b": B, "c": torch.tensor(-0.0)}}, "tensor 'model/c'"),
    ],
)
def test_the_first_difference_is_named(changes, difference):
    zero = {"model": {"a": A, "b": B, "c": torch.tensor(0.0)}} if difference.endswith("c'") else {}
    assert first_difference(state(**zero), state(**changes)) == difference


def test_zeros_have_the_shapes_and_other_values_are_kept():
    zeros = zeros_like_state(state())
    assert zeros["num_updates"] == 3
    assert zeros["model"]["a"].tolist() == [0.0, 0.0]
