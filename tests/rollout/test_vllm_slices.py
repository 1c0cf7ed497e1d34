"""Ranks that share a vLLM engine load their slices of the trainer's shards, without gathering whole weights."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hybridflow.errors import RolloutError
from hybridflow.models.loading import load_causal_lm
from hybridflow.rollout import Request, SamplingParams, generate, load_weights

pytestmark = pytest.mark.vllm

PROGRAM = Path(__file__).parent / "vllm_slices_rank.py"
WRONG = "model.layers.1.mlp.down_proj.weight"
FOUR_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}
LAYOUTS = {
    "data 2, 1 key-value head": (2, 1, 2, "float32", {}),
    "data 4, tied": (4, 1, 2, "bfloat16", {"tie_word_embeddings": True, "num_key_value_heads": 2}),
    "tensor 2 x data 2, tied": (4, 2, 2, "float32", {"tie_word_embeddings": True, "num_key_value_heads": 2}),
    "tensor 2": (2, 2, 2, "bfloat16", {"vocab_size": 128, "num_key_value_heads": 2}),
    "data 4, engine on 4": (4, 1, 4, "float32", FOUR_HEADS),
}
"""Ranks, trainer's tensor parallel size, engine's, dtype, and the model; its vocabulary of 40 is padded to 64."""
REPRESENTATIVE = "data 2, 1 key-value head"


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name == REPRESENTATIVE else pytest.mark.exhaustive, id=name) for name in LAYOUTS
    ],
)
def run(request, tiny_model, run_world, tmp_path_factory):
    """Run the program in a layout, and return the results of its ranks."""
    num_ranks, trainer_tensor, rollout_tensor, dtype, config = LAYOUTS[request.param]
    path, output = tiny_model("qwen2", **config), tmp_path_factory.mktemp("slices")
    unseeded = [] if request.param == REPRESENTATIVE else ["unseeded"]
    run_world(PROGRAM, num_ranks, path, trainer_tensor, rollout_tensor, dtype, output, *unseeded)
    ranks = [json.loads((output / f"{rank}.json").read_text()) for rank in range(num_ranks)]
    return SimpleNamespace(layout=request.param, ranks=ranks, dtype=getattr(torch, dtype), path=path)


def test_slices_give_vllm_the_same_bits_as_whole_weights(run):
    for result in run.ranks:
        packed = {name for name in result["names"] if name.startswith("packed")}
        assert {"packed model.layers.1.self_attn.qkv_proj", "packed model.layers.1.mlp.down_proj"} <= packed
        assert "model.embed_tokens.weight" in result["names"]
        assert result["different"] == []
        assert result["same tokens"]
        assert result["left in shared memory"] == []


def test_ranks_that_share_an_engine_equal_one_rank(run):
    from fixtures.vllm_engines import lend_engine

    if run.dtype != torch.float32:
        pytest.skip("rounding differs between layouts")
    for seed_requests in (True, False) if run.layout != REPRESENTATIVE else (True,):
        engine = lend_engine(run.path, max_model_len=64, seed_requests=seed_requests)
        load_weights(engine, load_causal_lm(run.path).named_parameters(), 1)
        wanted = [Request(i, [5 + i, 6, 7], SamplingParams(8, temperature=i / 2), 2, (0, i)) for i in range(3)]
        expected = generate(engine, wanted)
        for result in run.ranks:
            for (token_ids, log_probs), alone in zip(result[f"seeds {seed_requests}"], expected, strict=True):
                assert token_ids == alone.token_ids
                assert log_probs == pytest.approx(alone.log_probs, abs=1e-4)


def test_ranks_receive_little_more_than_what_they_load_and_do_not_hold(run):
    _, _, rollout_tensor, _, config = LAYOUTS[run.layout]
    sliced, whole = (sum(result[key] for result in run.ranks) for key in ("sliced", "whole"))
    if run.layout == "tensor 2":  # the same slices on both sides, so that nothing is sent
        assert (sliced, whole > 0) == (0, True)
        return
    names = {name.split(".")[-2] for name in run.ranks[0]["boxes"]}
    by_heads = {"q_proj"} if config.get("num_key_value_heads", 1) < rollout_tensor == 2 else {"q_proj", "k_proj"}
    assert by_heads | {"o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens"} <= names
    assert not {"norm", "input_layernorm"} & names
    assert sliced < whole * (1 / rollout_tensor + 0.12)  # norms, and keys and values of shared heads, are whole


def test_wrong_slices_are_errors_and_a_later_sync_succeeds(run):
    for result in run.ranks:
        other = result["errors"]["another rank's slice"]
        assert other.startswith(f"WeightSyncError: weight '{WRONG}': the engine reads the elements")
        twice = result["errors"]["the slice of one rank twice"]
        assert twice.startswith(f"WeightSyncError: weight '{WRONG}': the ranks of the rollout engines load")
        assert result["different after errors"] == []


def test_slices_are_those_that_the_loaders_of_vllm_read(tiny_model, monkeypatch):
    from vllm.model_executor.parameter import RowvLLMParameter

    from fixtures.vllm_engines import lend_engine

    engine = lend_engine(tiny_model("qwen2"))
    wanted = [Request(0, [5, 6, 7], SamplingParams(8, temperature=1.0), 2, (0, 0))]
    before = generate(engine, wanted)

    def load_half(self, loaded_weight):
        self.data[:, 8:24].copy_(loaded_weight[:, 8:24])

    def load_twice(self, loaded_weight):
        self.data.copy_(2 * loaded_weight)

    names = [f"model.layers.{i}.{name}.weight" for i in range(2) for name in ("self_attn.o_proj", "mlp.down_proj")]
    expected = dict.fromkeys(names, ((0, 64), (8, 24)))
    for load, boxes in ((load_half, expected), (load_twice, {})):  # computed with, so it needs whole weights
        with monkeypatch.context() as patch:
            patch.setattr(RowvLLMParameter, "load_row_parallel_weight", load)
            assert engine.boxes_to_load() == boxes
    assert engine.boxes_to_load() == {}  # with one rank, all of each weight
    assert generate(engine, wanted) == before
    engine.start_loading(engine._shapes)
    with pytest.raises(RolloutError, match="while weights are being loaded"):
        engine.boxes_to_load()
    engine.abandon_loading()
    load_weights(engine, load_causal_lm(tiny_model("qwen2")).named_parameters(), version=0)
    assert generate(engine, wanted) == before
