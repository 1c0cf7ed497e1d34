from collections import OrderedDict, defaultdict

import numpy as np
import pytest

from hybridflow.errors import BatchError
from hybridflow.protocol import DataProto


def concat(*meta_infos: dict) -> dict:
    return DataProto.concat([DataProto(meta_info=meta_info) for meta_info in meta_infos]).meta_info


def test_metrics_become_one_list_per_name_in_part_order():
    merged = concat({"metrics": {"loss": 1.0, "kl": [1, 2]}}, {"metrics": {"kl": 3, "loss": 2.0}})
    assert merged == {"metrics": {"loss": [1.0, 2.0], "kl": [1, 2, 3]}}


def test_metrics_of_a_single_part_become_lists_too():
    assert concat({"metrics": {"loss": 1.0}}) == {"metrics": {"loss": [1.0]}}


def test_metrics_aggregate_the_same_in_one_step_or_two():
    a, b, c = ({"metrics": {"loss": float(n)}} for n in (1, 2, 3))
    assert concat(concat(a, b), c) == concat(a, b, c) == {"metrics": {"loss": [1.0, 2.0, 3.0]}}


def test_concat_without_metrics_adds_none():
    assert concat({"k": 1}, {}) == {"k": 1}
    assert concat({"metrics": None}, {}) == {}
    assert concat({"metrics": {}}, {}) == {"metrics": {}}


def test_metrics_must_be_a_dict():
    with pytest.raises(BatchError, match="of part 1 is a float"):
        concat({"metrics": {"loss": 1.0}}, {"metrics": 2.0})


def test_equal_values_merge_and_different_ones_are_an_error():
    assert concat({"a": 1, "b": np.array([1, 2])}, {"a": 1, "b": np.array([1, 2]), "c": 3})["c"] == 3
    with pytest.raises(BatchError, match="concat: 'a' is 1 in one batch and 2 in another"):
        concat({"a": 1}, {"a": 2})
    with pytest.raises(BatchError, match="'a'"):
        concat({"a": [1, 2]}, {"a": [1, 3]})


def test_copy_structure_keeps_dict_types_and_shares_other_values():
    counts, array = defaultdict(list, {"x": [1]}), np.zeros(3)
    data = DataProto(meta_info={"counts": counts, "ordered": OrderedDict(a=1), "array": array, "set": {1}})
    assert isinstance(data.meta_info["counts"], defaultdict)
    assert isinstance(data.meta_info["ordered"], OrderedDict)
    assert data.meta_info["array"] is array
    data.meta_info["counts"]["x"].append(2)
    data.meta_info["set"].add(2)
    assert counts == {"x": [1]}
