import json
import math
import struct
from collections import OrderedDict, defaultdict, namedtuple
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch

from hybridflow.checkpoint import join_state, split_state
from hybridflow.checkpoint.state import TENSOR_DTYPES
from hybridflow.errors import CheckpointError


def round_trip(state: Any) -> Any:
    """Split and join a state through JSON text, as on disk, with copies of the tensors."""
    tree, tensors = split_state(state)
    return join_state(json.loads(json.dumps(tree, allow_nan=False)), {name: t.clone() for name, t in tensors.items()})


def bits(value: float) -> bytes:
    return struct.pack(">d", value)


@pytest.mark.parametrize(
    "state",
    [
        *(None, True, False, 0, -1, 2**63, 2**64 - 1, "", "é\n\x00", "\ud800", 0.1, -0.0),
        *([], (), {}, [[]], ((),), [()], {"": {}}),
        {"list": [1, (2, [3.5, None])], "tuple": (1,), "nested": {"a": {"b": (True, "x")}}},
        *({"$tuple": [1]}, {"$tensor": "a"}, {"$dict": {"$float": "0"}}, {"a": 1, "$b": 2}, {"$": ()}),
        (1, 1.0, True, "1"),
    ],
)
def test_plain_values_keep_value_and_type(state):
    result = round_trip(state)
    assert result == state
    assert repr(result) == repr(state)


def test_integers_of_any_size_are_restored():
    state = [2**64 - 1, 2**64, -(2**63) - 1, -(10**5000)]
    assert round_trip(state) == state


FLOATS = [
    *(0.1, -0.0, 5e-324, 1.7976931348623157e308, math.pi, 1e16 + 2, math.inf, -math.inf, math.nan, -math.nan),
    struct.unpack(">d", bytes.fromhex("7ff8000000abcdef"))[0],
]


def test_floats_are_restored_bit_for_bit():
    assert [bits(value) for value in round_trip(FLOATS)] == [bits(value) for value in FLOATS]


def test_tree_is_strict_json():
    tree, _ = split_state({"loss": math.nan, "best": math.inf})
    assert (
        json.dumps(tree, allow_nan=False)
        == '{"loss": {"$float": "7ff8000000000000"}, "best": {"$float": "7ff0000000000000"}}'
    )


def test_order_of_keys_is_kept():
    assert list(round_trip({"b": 1, "a": 2, "c": 3})) == ["b", "a", "c"]


def test_dictionary_subclasses_are_restored_as_dict():
    result = round_trip({"ordered": OrderedDict(a=1), "default": defaultdict(list, b=[2])})
    assert result == {"ordered": {"a": 1}, "default": {"b": [2]}}
    assert type(result["ordered"]) is type(result["default"]) is dict


@pytest.mark.parametrize("dtype", sorted(TENSOR_DTYPES, key=str), ids=str)
def test_every_dtype_is_restored_bit_for_bit(dtype):
    raw = torch.arange(96, dtype=torch.uint8).mul(37)  # modulo 256
    if dtype == torch.bool:
        raw %= 2
    tensor = raw.view(dtype).reshape(2, -1)
    result = round_trip({"x": tensor})["x"]
    assert result.dtype == dtype
    assert result.shape == tensor.shape
    assert torch.equal(result.view(torch.uint8), tensor.view(torch.uint8))


def test_empty_and_zero_dimensional_shapes_are_kept():
    state = [
        torch.zeros(0),
        torch.zeros(3, 0, 2, dtype=torch.int64),
        torch.tensor(2.5),
        torch.zeros(0, dtype=torch.bool),
    ]
    result = round_trip(state)
    assert [(t.shape, t.dtype) for t in result] == [(t.shape, t.dtype) for t in state]
    assert result[2].item() == 2.5


def test_nan_and_infinity_in_tensors_keep_their_bits():
    tensor = torch.tensor([math.nan, -math.inf, -0.0])
    assert round_trip(tensor).view(torch.int32).tolist() == tensor.view(torch.int32).tolist()


def test_parameters_and_gradient_tensors_are_restored_as_plain_tensors():
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    result = round_trip({"p": parameter, "q": parameter * 2})
    assert type(result["p"]) is torch.Tensor
    assert not result["p"].requires_grad
    assert not result["q"].requires_grad
    assert result["q"].tolist() == [2.0, 4.0]


def test_tensor_that_occurs_twice_is_stored_once_and_shared_again():
    embedding = torch.tensor([[1.0, 2.0]])
    tree, tensors = split_state({"embed": embedding, "head": embedding})
    assert list(tensors) == ["embed"]
    result = join_state(tree, tensors)
    assert result["embed"] is result["head"]


def test_views_of_one_memory_are_stored_separately():
    base = torch.arange(6.0)
    state = {"all": base, "head": base[:2], "tail": base[4:], "grid": base.view(2, 3), "grid.t": base.view(2, 3).t()}
    _, tensors = split_state(state)
    assert len({t.untyped_storage().data_ptr() for t in tensors.values()}) == 5
    result = round_trip(state)
    assert {name: t.tolist() for name, t in result.items()} == {name: t.tolist() for name, t in state.items()}


def test_non_contiguous_tensors_keep_their_elements():
    grid = torch.arange(6).view(2, 3)
    state = {"t": grid.t(), "strided": grid[:, ::2], "expanded": torch.tensor([7]).expand(3), "flipped": grid.flip(0)}
    assert {name: t.tolist() for name, t in round_trip(state).items()} == {
        "t": [[0, 3], [1, 4], [2, 5]],
        "strided": [[0, 2], [3, 5]],
        "expanded": [7, 7, 7],
        "flipped": [[3, 4, 5], [0, 1, 2]],
    }


def test_conjugated_view_is_resolved():
    z = torch.tensor([1 + 2j])
    result = round_trip({"z": z, "conj": z.conj(), "imag": z.conj().imag})
    assert result["z"].tolist() == [1 + 2j]
    assert result["conj"].tolist() == [1 - 2j]
    assert result["imag"].tolist() == [-2.0]


def test_empty_tensors_are_not_merged():
    state = [torch.zeros(0, n) for n in range(200)]
    assert [tuple(t.shape) for t in round_trip(state)] == [(0, n) for n in range(200)]


def test_tensors_with_colliding_paths_get_different_names():
    state = {"a": {"b/c": torch.tensor(1)}, "a/b": {"c": torch.tensor(2)}, "__metadata__": torch.tensor(3)}
    result = round_trip(state)
    assert (result["a"]["b/c"].item(), result["a/b"]["c"].item(), result["__metadata__"].item()) == (1, 2, 3)


def test_tensor_names_are_their_paths():
    _, tensors = split_state({"model": {"layers.0.weight": torch.zeros(1)}, "moments": [torch.zeros(1)]})
    assert list(tensors) == ["model/layers.0.weight", "moments/0"]


def test_numpy_arrays_and_scalars_keep_type_and_bytes():
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
    }
    result = round_trip(state)
    for name, value in state.items():
        assert type(result[name]) is type(value)
        assert result[name].dtype == value.dtype
        assert result[name].shape == value.shape
        assert result[name].tobytes() == value.tobytes()
    result["words"][0] = 5  # is writable


def test_read_only_array_is_saved():
    array = np.arange(3)
    array.flags.writeable = False
    assert round_trip(array).tolist() == [0, 1, 2]


def test_saving_does_not_change_the_state():
    state = {"x": torch.arange(4.0), "y": (np.arange(3),), "z": [1, {"$a": 2.0}]}
    split_state(state)
    assert state["x"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert repr(state["z"]) == "[1, {'$a': 2.0}]"


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
        (torch.float32, r"\[1\] is a torch\.dtype"),
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
