import ast
from pathlib import Path

import numpy as np
import torch

import hybridflow.protocol
from hybridflow.protocol import FIELDS, DataProto

SMALL = (torch.int16,)  # dtypes that no literal has
DOCUMENTATION = Path(__file__).parents[2] / "docs" / "data_proto.md"


def test_every_field_is_described_and_pads_if_it_has_a_length():
    for name, field in FIELDS.items():
        assert (field.name, field.shape[0]) == (name, "batch")
        assert all((field.description, field.producer, field.consumer))
        has_length = any("len" in axis for axis in field.shape)
        assert (field.padding_side is not None) == (field.padding_value is not None) == has_length
        for value in (field.padding_value, field.duplicate_value):
            if value is not None and isinstance(field.dtype, torch.dtype):
                assert torch.full((2, 3), value).to(field.dtype).tolist() == [[value] * 3] * 2


def test_examples_form_one_batch_with_the_declared_dtypes_and_shapes():
    batch = DataProto.from_single_dict(
        {
            field.name: torch.tensor(
                ast.literal_eval(field.example), dtype=field.dtype if field.dtype in SMALL else None
            )
            if field.is_tensor
            else np.array(ast.literal_eval(field.example), dtype=object)
            for field in FIELDS.values()
        }
    )
    lengths = {"batch": 2, "prompt_len": 3, "response_len": 2, "seq_len": 5, "candidates": 2, "components": 2}
    for field in FIELDS.values():
        column = (batch.batch if field.is_tensor else batch.non_tensor_batch)[field.name]
        assert column.dtype == field.dtype
        shape = [lengths.get(axis, 1) for axis in field.shape]  # "response_len|1" has length 1 in the examples
        assert list(column.shape) == shape


def test_documentation_table_equals_the_glossary():
    lines = DOCUMENTATION.read_text().splitlines()
    for field in FIELDS.values():
        dtype = str(field.dtype).removeprefix("torch.") if field.is_tensor else "object"
        padding = "" if field.padding_side is None else f"{field.padding_side}, {field.padding_value}"
        copied = "copied" if field.duplicate_value is None else field.duplicate_value
        line = (
            f"| `{field.name}` | ({', '.join(field.shape)}) | {dtype} | {padding} | {copied} "
            f"| `{field.example}` | {field.description} | {field.producer} | {field.consumer} |"
        ).replace("len|1", "len or 1")
        assert line in lines


def test_documentation_names_every_public_name():
    text = DOCUMENTATION.read_text()
    for name in hybridflow.protocol.__all__:
        assert f"`{name}" in text or f"## {name}" in text
    for method in vars(DataProto):
        assert method.startswith("_") or method in text
