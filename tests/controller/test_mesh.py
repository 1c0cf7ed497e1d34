import pytest

from hybridflow.controller import Mesh
from hybridflow.errors import DispatchError


def test_collected_ranks_follow_the_order_of_the_parts():
    mesh = Mesh({"a": 2, "b": 2})
    assert mesh.part_of_rank(("b", "a")) == [0, 2, 1, 3]
    assert mesh.collected_ranks(("b", "a")) == [0, 2, 1, 3]


def test_error_names_an_unknown_axis():
    with pytest.raises(DispatchError, match=r"\['data'\].*'default' are \{'tensor': 2\}"):
        Mesh({"tensor": 2}).num_parts(("data",))


@pytest.mark.parametrize("axes", [{}, {"data": 0}, {"data": 1.5}])
def test_a_mesh_without_ranks_is_an_error(axes):
    with pytest.raises(DispatchError, match="each with an integer size of 1 or more"):
        Mesh(axes)
