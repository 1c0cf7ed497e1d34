import pytest

from hybridflow.controller import Mesh
from hybridflow.errors import DispatchError


def test_the_last_axis_is_the_fastest():
    mesh = Mesh({"data": 2, "tensor": 3})
    assert mesh.size == 6
    assert [mesh.coordinates(rank) for rank in (0, 1, 3, 5)] == [
        {"tensor": 0, "data": 0},
        {"tensor": 1, "data": 0},
        {"tensor": 0, "data": 1},
        {"tensor": 2, "data": 1},
    ]


def test_the_last_stage_of_a_pipeline_is_collected():
    mesh = Mesh({"pipeline": 2, "data": 2, "tensor": 2})
    assert mesh.collected_ranks(("data",)) == [4, 6]
    assert [mesh.part_of(rank, ("data",)) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_several_axes_can_be_split_together():
    mesh = Mesh({"replicate": 2, "shard": 2, "sequence": 2})
    assert mesh.num_parts(("replicate", "shard")) == 4
    assert [mesh.part_of(rank, ("replicate", "shard")) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert mesh.collected_ranks(("replicate", "shard")) == [0, 2, 4, 6]


def test_collected_ranks_follow_the_order_of_the_parts():
    mesh = Mesh({"a": 2, "b": 2})
    assert [mesh.part_of(rank, ("b", "a")) for rank in range(4)] == [0, 2, 1, 3]
    assert mesh.collected_ranks(("b", "a")) == [0, 2, 1, 3]


def test_error_names_an_unknown_axis():
    with pytest.raises(DispatchError, match=r"\['data'\].*'default' are \{'tensor': 2\}"):
        Mesh({"tensor": 2}).num_parts(("data",))


@pytest.mark.parametrize("axes", [{}, {"data": 0}, {"data": 1.5}])
def test_a_mesh_without_ranks_is_an_error(axes):
    with pytest.raises(DispatchError, match="each with an integer size of 1 or more"):
        Mesh(axes)
