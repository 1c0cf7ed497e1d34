"""Slices of weights, from real processes on gloo, equal the whole weights; each planted bug is an error on all ranks."""

import json
from pathlib import Path

import pytest
import torch

from hybridflow.engines.resharding import Senders

PROGRAM = Path(__file__).parent / "resharding_program.py"
LAYOUTS = ("data 4, 2", "data 4, 4", "bfloat16", "tensor 2", "tensor 2, engine 4", "tensor 4", "host")
BY_ROWS = "model.layers.0.mlp.up_proj.weight"


def test_a_rank_sends_to_itself_what_it_holds():
    senders = Senders([((0, 4),), ((0, 4),), ((4, 8),), ((4, 8),)])
    assert [[rank for rank in range(4) if senders.sends(rank, to)] for to in range(4)] == [[0, 2], [1, 3], [0, 2], [1, 3]]


@pytest.fixture(scope="module")
def ranks(tiny_model, run_world, tmp_path_factory):
    output = tmp_path_factory.mktemp("resharding")
    run_world(PROGRAM, 4, tiny_model("qwen2", num_key_value_heads=4, intermediate_size=52, vocab_size=41), output)
    return [json.loads((output / f"{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_slices_equal_the_parts_of_whole_weights(ranks, layout):
    for rank in ranks:
        result = rank[layout]
        assert result["wrong"] == []
        assert "error" not in result
        names = {name.split(".")[-2] for name in result["sliced names"]}
        assert names == {"embed_tokens", "lm_head", "q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "share"),
    [("data 4, 2", 1 / 2), ("data 4, 4", 1 / 4), ("bfloat16", 1 / 2), ("host", 1 / 2), ("tensor 4", 1 / 2)],
)
def test_ranks_receive_less_than_whole_weights(ranks, layout, share):
    whole, sliced = (sum(rank[layout][key] for rank in ranks) for key in ("whole", "sliced"))
    assert sliced / whole == pytest.approx(share, abs=0.09)  # keys and norms are whole


@pytest.mark.slow
def test_equal_tensor_parallel_of_trainer_and_engine_stays_in_its_group(ranks):
    # A rank needs the other half of its slice, which one rank along the data axis holds. Norms and keys are whole.
    for rank in ranks:
        other = rank["tensor 2"]
        assert other["sliced"] < 0.5 * other["whole"]


@pytest.mark.slow
def test_weights_without_a_slice_on_every_rank_are_whole(ranks):
    for rank in ranks:
        assert rank["whole on one rank"]["wrong"] == rank["adapters"]["wrong"] == []
        assert BY_ROWS not in rank["whole on one rank"]["sliced names"]
        assert rank["whole on one rank"]["sliced names"]
        assert rank["adapters"]["sliced names"] == []


@pytest.mark.slow
def test_slices_that_are_not_the_whole_weight_are_errors(ranks):
    for rank in ranks:
        assert rank["overlap"]["error"] == (
            f"weight '{BY_ROWS}': the ranks of the rollout engines load 960 elements in different slices, but the "
            "weight has 1664."
        )
        assert rank["overlap"]["sliced names"] == []


@pytest.mark.slow
@pytest.mark.parametrize("bug", ["bit", "rows"])
def test_elements_changed_on_one_rank_are_an_error_on_all(ranks, bug):
    assert all("differ between the trainer and the slices" in rank[bug]["error"] for rank in ranks)
    assert ranks[1][bug]["wrong"]
    assert torch.tensor([len(rank[bug]["wrong"]) for rank in (ranks[0], *ranks[2:])]).sum() == 0
