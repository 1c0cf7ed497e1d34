from pathlib import Path

import pytest
import torch

from hybridflow.controller import (
    DISPATCH_MODES,
    Dispatch,
    DispatchMode,
    Mesh,
    make_nd_compute_dataproto_dispatch_fn,
    register_dispatch_mode,
)
from hybridflow.controller.dispatch import find_dispatch_mode
from hybridflow.errors import DispatchError
from hybridflow.protocol import DataProto


class Ranks:
    """A minimal group: a number of ranks and a mesh."""

    def __init__(self, **axes):
        self._mesh = Mesh(axes)

    @property
    def world_size(self):
        return self._mesh.size

    def mesh(self, name="default"):
        return self._mesh


MODES_OF_THE_PACKAGE = {name: mode for name, mode in vars(Dispatch).items() if isinstance(mode, DispatchMode)}


def batch_of(*values):
    return DataProto.from_dict(tensors={"x": torch.tensor(values)})


def values_of(parts):
    return [part.batch["x"].tolist() for part in parts]


def test_all_to_all_sends_each_rank_one_element_of_a_list():
    args, kwargs = Dispatch.ALL_TO_ALL.dispatch_fn(Ranks(data=2), [1, 2], "all", key=(3, 4))
    assert args == ([1, 2], ["all", "all"])
    assert kwargs == {"key": [3, 4]}


@pytest.mark.parametrize("mode", ["ALL_TO_ALL", "DP_COMPUTE", "MEGATRON_COMPUTE"])
def test_a_list_must_have_one_element_for_each_rank(mode):
    with pytest.raises(DispatchError, match=r"a list of 3 elements cannot be split over 2 .*use Dispatch\.ONE_TO_ALL"):
        DISPATCH_MODES[mode].dispatch_fn(Ranks(data=2), [1, 2, 3])


@pytest.mark.parametrize("mode", ["DP_COMPUTE_PROTO", "DP_COMPUTE_METRIC", "TP_FORWARD", "MEGATRON_COMPUTE_PROTO"])
def test_proto_modes_require_a_batch(mode):
    with pytest.raises(DispatchError, match=r"the arguments are dict, int; use DataProto\.from_dict"):
        DISPATCH_MODES[mode].dispatch_fn(Ranks(data=2), {"x": 1}, n=3)


def test_the_with_func_mode_requires_a_function_as_first_argument():
    mode = Dispatch.DP_COMPUTE_PROTO_WITH_FUNC
    args, _ = mode.dispatch_fn(Ranks(data=2), max, batch_of(1, 2))
    assert args[0] == [max, max]
    assert values_of(args[1]) == [[1], [2]]
    with pytest.raises(DispatchError, match="WITH_FUNC must be a function, got DataProto"):
        mode.dispatch_fn(Ranks(data=2), batch_of(1, 2))


def test_megatron_compute_sends_each_data_rank_one_element_of_a_list():
    args, _ = Dispatch.MEGATRON_COMPUTE.dispatch_fn(Ranks(tensor=2, data=2), ["a", "b"])
    assert args == (["a", "b", "a", "b"],)


def test_a_mesh_mode_splits_along_the_given_axes():
    mode = make_nd_compute_dataproto_dispatch_fn(mesh_name="train", split_axes=("replicate", "shard"))
    group = Ranks(replicate=2, shard=1, sequence=2)
    assert mode.num_parts is not None
    assert mode.collected_ranks is not None
    assert mode.num_parts(group) == 2
    assert mode.collected_ranks(group) == [0, 2]
    args, _ = mode.dispatch_fn(group, batch_of(1, 2))
    assert values_of(args[0]) == [[1], [1], [2], [2]]


def test_a_batch_from_one_rank_and_none_from_another_is_an_error():
    with pytest.raises(DispatchError, match=r"output 1 of 2 is NoneType.*DP_COMPUTE_METRIC"):
        Dispatch.DP_COMPUTE_PROTO.collect_fn(Ranks(data=2), [batch_of(1), None])


@pytest.fixture
def own_mode():
    mode = register_dispatch_mode(
        "LAST_RANK_FIRST", lambda group, x: ([x[::-1]], {}), lambda group, outputs: outputs[::-1]
    )
    yield mode
    del DISPATCH_MODES["LAST_RANK_FIRST"]


def test_a_registered_mode_is_found_by_its_name(own_mode):
    assert Dispatch.LAST_RANK_FIRST is own_mode
    assert find_dispatch_mode("LAST_RANK_FIRST") is own_mode
    assert repr(own_mode) == "Dispatch.LAST_RANK_FIRST"


@pytest.mark.parametrize("name", ["LAST_RANK_FIRST", "DP_COMPUTE"])
def test_a_registered_name_cannot_be_reused(own_mode, name):
    with pytest.raises(DispatchError, match=f"'{name}' is already registered"):
        register_dispatch_mode(name, max, max)


def test_a_mode_requires_a_name_and_two_functions():
    with pytest.raises(DispatchError, match="must be an identifier"):
        register_dispatch_mode("by length", max, max)
    with pytest.raises(DispatchError, match="collect_fn must be a function, got 3"):
        register_dispatch_mode("BY_LENGTH", max, 3)  # pyright: ignore[reportArgumentType]


def test_a_mapping_of_the_two_functions_is_a_mode():
    mode = find_dispatch_mode({"dispatch_fn": max, "collect_fn": min})
    assert isinstance(mode, DispatchMode)
    assert (mode.dispatch_fn, mode.collect_fn) == (max, min)


def test_an_unknown_mode_lists_the_known_ones():
    with pytest.raises(AttributeError, match="'DP' is not a dispatch mode; modes: RANK_ZERO, ONE_TO_ALL"):
        _ = Dispatch.DP


def test_the_documentation_describes_every_built_in_mode():
    rows = [f"| `{mode.name}` | {mode.description} |" for mode in MODES_OF_THE_PACKAGE.values()]
    table = "\n".join(["", "| mode | what it does |", "|---|---|", *rows, "", ""])
    assert table in (Path(__file__).parents[2] / "docs" / "controller.md").read_text(encoding="utf-8"), table
