"""The form in which files have a model's tensors: read by the model's names, and made again from its tensors."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fixtures.families import write_family
from hybridflow.models.stored_model import ModelTensors, PublishedForm, StoredModel

SOME_FOR_ONE, ONE_FOR_SOME = "mixtral", "hrm_text"
"""Families whose files have several tensors for one of the model, and one for several."""


@pytest.mark.parametrize("kind", [SOME_FOR_ONE, ONE_FOR_SOME])
@pytest.mark.parametrize("as_published", [True, False])
def test_tensors_are_read_and_return_to_the_form_of_the_files(tmp_path, kind, as_published):
    write_family(tmp_path, kind, save_original_format=as_published)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tensors, del_conversions = model.state_dict(), model.__dict__.pop("_weight_conversions")
    assert bool(del_conversions) == as_published
    with StoredModel(tmp_path) as files:
        stored = ModelTensors(model, files)
        assert not stored.ignored
        assert all(torch.equal(stored.read(name), tensor) for name, tensor in tensors.items())
        some = {name: stored.read_experts(name, 1, 3) for name in tensors}
        assert all(part is None or torch.equal(part, tensors[name][1:3]) for name, part in some.items())
        read = {name.rpartition("experts.")[2] for name, part in some.items() if part is not None}
        assert read == ({"gate_up_proj", "down_proj"} if kind == SOME_FOR_ONE else set())
    form = PublishedForm(model, tensors)
    again = dict(form.stream(reversed(tensors.items()), {}))
    came = load_file(tmp_path / "model.safetensors")
    assert again.keys() == came.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in came.items())
    assert (len(form.unchanged({n: t.shape for n, t in tensors.items()})) == len(tensors)) is not as_published
