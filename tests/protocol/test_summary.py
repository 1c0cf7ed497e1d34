import numpy as np
import torch

from hybridflow.protocol import DataProto


def test_get_data_info_has_one_line_per_field():
    data = DataProto.from_dict(
        tensors={"input_ids": torch.zeros(3, 512, dtype=torch.int64), "scores": torch.zeros(3)},
        non_tensors={"raw_prompts": ["a", "b", "c"], "rewards": np.zeros(3, dtype=np.float32)},
        meta_info={"dataset_name": "math", "max_length": 512, "metrics": {"loss": [1.0]}, "pair": (1, "a"), "none": []},
    )
    assert data.get_data_info() == (
        "batch\n"
        "  input_ids: (3, 512) (torch.int64) cpu\n"
        "  scores: (3,) (torch.float32) cpu\n"
        "non_tensor_batch\n"
        "  raw_prompts: ndarray(3,) (object)\n"
        "  rewards: ndarray(3,) (float32)\n"
        "meta_info\n"
        "  dataset_name: str\n"
        "  max_length: int\n"
        "  metrics: dict[str: list[float]]\n"
        "  pair: tuple(int, str)\n"
        "  none: list[...]"
    )


def test_get_data_info_of_an_empty_batch_has_the_headings():
    assert DataProto().get_data_info() == "batch\nnon_tensor_batch\nmeta_info"
    assert repr(DataProto()).startswith("DataProto of 0 rows\nbatch")
