import torch
from torch import nn

from hybridflow.models.parameters import replace_parameters


def test_tied_parameter_is_replaced_once_and_stays_tied():
    model = nn.ModuleDict({"embedding": nn.Embedding(3, 2), "head": nn.Linear(2, 3)})
    model["head"].weight = model["embedding"].weight
    names = []

    def made(name, parameter):
        names.append(name)
        return nn.Parameter(torch.full_like(parameter, 7.0))

    replace_parameters(model, made)
    assert names == ["embedding.weight", "head.bias"]
    assert model["head"].weight is model["embedding"].weight
    assert all((parameter == 7).all() for parameter in model.parameters())
