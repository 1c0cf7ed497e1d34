import numpy as np
import pytest

from hybridflow.errors import CheckpointError
from hybridflow.runtime.alike import require_alike
from hybridflow.runtime.random_state import capture_random_state, restore_random_state

WANTED = {"step": 0, "gauss": 0.5, "words": np.zeros(3, np.int64), "inner": {"name": "a"}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": "1"}, r"S\['step'\] is a str, but a int is expected"),
        ({"inner": []}, r"S\['inner'\] is a list, but a dict is expected"),
        ({"inner": {}}, r"S\['inner'\] has no 'name'; hybridflow did not write it"),
        (
            {"words": np.zeros(4, np.int64)},
            r"S\['words'\] is a tensor of shape \(4,\) and int64, .* \(3,\) and int64 is",
        ),
        (
            {"words": np.zeros(3, np.int32)},
            r"shape \(3,\) and int32, but a tensor of shape \(3,\) and int64 is expected",
        ),
    ],
)
def test_a_state_of_other_shapes_is_an_error_that_names_both(changes, message):
    require_alike(WANTED | {"gauss": None, "more": 1}, WANTED, "S")
    with pytest.raises(CheckpointError, match=message):
        require_alike(WANTED | changes, WANTED, "S")


def test_a_random_state_that_does_not_fit_restores_nothing():
    state = capture_random_state()
    for part, value, message in (
        ("torch", state["torch"][:-1], r"S\['torch'\] is a tensor of shape \(5055,\)"),
        ("python", {**state["python"], "version": 9}, "S cannot be restored: state with version 9"),
        ("numpy", {}, r"S\['numpy'\] has no 'key'"),
    ):
        with pytest.raises(CheckpointError, match=message):
            restore_random_state({**state, part: value}, "S")
    restore_random_state(state)
