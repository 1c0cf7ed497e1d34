"""Directories whose weights are quantized: they load as transformers dequantizes them, or say what converts them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from fixtures.families import write_family
from fixtures.quantized import FP8, MXFP4, WHOLE, describe, quantize
from hybridflow.checkpoint import export_model
from hybridflow.errors import ModelError
from hybridflow.models.loading import load_causal_lm, model_config
from hybridflow.models.quantized_weights import Fp8, Mxfp4
from hybridflow.models.stored_model import ModelTensors, StoredModel


@pytest.mark.parametrize(
    ("kind", "quantization", "theirs"),
    [
        ("qwen3", FP8, FineGrainedFP8Config),
        ("qwen3_moe", FP8, FineGrainedFP8Config),
        ("qwen3", WHOLE, FineGrainedFP8Config),
        ("gpt_oss", MXFP4, Mxfp4Config),
    ],
)
def test_quantized_directories_load_as_transformers_dequantizes_them(tmp_path, kind, quantization, theirs):
    quantize(write_family(tmp_path / "model", kind, hidden_size=32, intermediate_size=64), quantization)
    expected = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32, quantization_config=theirs(dequantize=True)
    ).state_dict()
    ours = load_causal_lm(tmp_path / "model")
    assert ours.state_dict().keys() == expected.keys()
    for name, weight in ours.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=0, msg=name)
    export_model(ours.state_dict(), tmp_path / "model", tmp_path / "exported")
    assert "quantization_config" not in json.loads((tmp_path / "exported" / "config.json").read_text())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32).state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in ours.state_dict().items())


def test_blocks_of_8_bits_at_the_edge_are_smaller():
    form = Fp8({"weight_block_size": [2, 2]})
    numbers = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 10.0], [0.5, 2.0]])
    assert form.scales_shape([4, 3, 3]) == [4, 2, 2]
    assert form.weight(numbers, scales).tolist() == [[1, 2, 30], [4, 5, 60], [3.5, 4, 18]]


def test_numbers_of_4_bits_are_pairs_with_a_common_power_of_two():
    form = Mxfp4({})
    numbers = torch.tensor([[0x10, 0x32, 0x54, 0x76], [0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8).view(1, 2, 1, 4)
    weight = form.weight(numbers, torch.tensor([127, 129], dtype=torch.uint8).view(1, 2, 1))
    positive = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert weight[0].T.tolist() == [positive, [-4 * number for number in positive]]


def test_a_rank_reads_and_dequantizes_its_own_experts_only(tmp_path):
    quantize(write_family(tmp_path, "gpt_oss", intermediate_size=64), MXFP4)
    model = load_causal_lm(tmp_path)
    with StoredModel(tmp_path) as files:
        stored, name = ModelTensors(model, files), "model.layers.1.mlp.experts.down_proj"
        some = stored.read_experts(name, 1, 3)
        assert some is not None
        assert torch.equal(some.float(), model.get_parameter(name)[1:3])


def scales(change):
    def damage(directory):
        weights = load_file(directory / "model.safetensors")
        name = next(name for name in weights if name.endswith("_scale_inv"))
        change(weights, name)
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})

    return damage


def are_of_32_bits(weights, name):
    numbers = name.removesuffix("_scale_inv")
    weights[numbers] = weights[numbers].int()


def is_cut(weights, name):
    weights[name] = weights[name][:1]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (scales(lambda weights, name: weights.pop(name)), r"proj\.weight in .* is stored as F8_E4M3, .* lacks scales"),
        (scales(lambda weights, name: weights.pop(name[: -len("_scale_inv")])), r"_scale_inv are the scales of .*miss"),
        (scales(are_of_32_bits), r"proj\.weight is stored as I32, not as F8_E4M3 or F8_E5M2; copy the files again"),
        (scales(is_cut), r"_scale_inv has shape \[1, 3\] in the weights, but \[2, 3\] by config\.json for"),
        (lambda d: describe(d, FP8 | {"weight_block_size": [16]}), r"weight_block_size=\[16\] is not a list of two"),
        (
            lambda d: describe(d, {"quant_method": "gptq"}),
            r"method='gptq'\); .* fp8 and mxfp4; use the original weights",
        ),
        (lambda d: describe(d, {"bits": 4}), r"method=None\).*use the original weights, which the model's card names"),
        (lambda d: describe(d, {"quant_method": "bitsandbytes"}), r"install bitsandbytes; python .*\.dequantize\(\)"),
        (lambda d: describe(d, {"quant_method": "compressed-tensors"}), r"t\.CompressedTensorsConfig\(dequantize"),
        (lambda d: (d / "model.safetensors").rename(d / "x.gguf"), r"pip install gguf; python .*gguf_file='x\.gguf'"),
    ],
)
def test_forms_that_cannot_be_read_say_what_converts_them(tmp_path, damage, message):
    damage(quantize(write_family(tmp_path, "qwen3"), FP8))
    with pytest.raises(ModelError, match=message):
        load_causal_lm(tmp_path)


def test_a_directory_or_file_of_gguf_alone_says_what_converts_it(tmp_path):
    (tmp_path / "x.gguf").touch()
    for path in (tmp_path, tmp_path / "x.gguf"):
        with pytest.raises(ModelError, match=rf"from_pretrained\('{tmp_path}', dtype='bfloat16', gguf_file='x\.gguf'"):
            model_config(path)
