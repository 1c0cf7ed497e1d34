"""Moves of an idle role's weights between devices, recorded without a GPU; `test_gpu` moves them for real."""

import torch
from torch import nn

from hybridflow.engines.offload import HOST, Offload


class Moves(Offload):
    """An offload that records the devices and stays on the host."""

    def move_to(self, device):
        self.devices = [*getattr(self, "devices", []), device.type]
        super().move_to(HOST)


def test_nested_contexts_move_weights_once():
    model = nn.Linear(2, 2)
    offload = Moves(model, model.parameters(), {}, torch.device("cuda"))
    with offload():
        with offload():
            pass
        assert offload.devices == ["cpu", "cuda"]
    assert offload.devices == ["cpu", "cuda", "cpu"]


def test_error_inside_context_moves_weights_back():
    offload = Moves(nn.Linear(2, 2), [], {}, torch.device("cuda"))
    try:
        with offload():
            raise ValueError
    except ValueError:
        pass
    assert offload.devices[-1] == "cpu"


def test_tensors_without_dimensions_move_too():
    """Fused AdamW keeps its step count on the device; the meta device stands for a GPU."""
    master = nn.Parameter(torch.ones(3))
    moments = {master: {"exp_avg": torch.ones(3), "step": torch.tensor(2.0)}}
    Offload(nn.Linear(2, 2), [], moments, torch.device("cuda")).move_to(torch.device("meta"))
    assert {value.device.type for value in moments[master].values()} == {"meta"}


def test_parameters_keep_identity_and_masters_and_moments_move():
    model, master = nn.Linear(2, 2), nn.Parameter(torch.ones(3))
    moments = {master: {"exp_avg": torch.ones(3), "step": torch.tensor(2.0)}}
    before = list(model.parameters())
    Offload(model, [*model.parameters(), master], moments, torch.device("cpu"))
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert moments[master]["step"] == 2
