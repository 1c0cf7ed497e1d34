"""What an idle role has where; moved to another device for real only by the GPU checks."""

import torch
from torch import nn

from hybridflow.engines.offload import HOST, Offload


class Moves(Offload):
    """Records where it would move to."""

    def move_to(self, device):
        self.places = [*getattr(self, "places", []), device.type]
        super().move_to(HOST)


def test_it_waits_on_the_host_and_calls_within_each_other_move_once():
    model = nn.Linear(2, 2)
    offload = Moves(model, model.parameters(), {}, torch.device("cuda"))
    with offload():
        with offload():
            pass
        assert offload.places == ["cpu", "cuda"]
    assert offload.places == ["cpu", "cuda", "cpu"]


def test_an_error_within_takes_it_back_as_well():
    offload = Moves(nn.Linear(2, 2), [], {}, torch.device("cuda"))
    try:
        with offload():
            raise ValueError
    except ValueError:
        pass
    assert offload.places[-1] == "cpu"


def test_parameters_stay_the_objects_they_are_and_masters_and_moments_move_along():
    model, master = nn.Linear(2, 2), nn.Parameter(torch.ones(3))
    moments = {master: {"exp_avg": torch.ones(3), "step": torch.tensor(2.0)}}
    before = list(model.parameters())
    Offload(model, [*model.parameters(), master], moments, torch.device("cpu"))
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert moments[master]["step"] == 2
