"""A failure on one of two ranks is an error on both, with the cause, and nothing is applied."""

import json
from pathlib import Path

import pytest
import torch

from hybridflow.protocol import DataProto

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "failure_program.py"


@pytest.fixture(scope="module")
def outcomes(rollout_rows, tiny_model, run_world, tmp_path_factory):
    """Run all scenarios, and return the record of each scenario and rank."""
    out = tmp_path_factory.mktemp("failures")
    batch = rollout_rows([3, 1, 5, 2, 4, 3, 1, 6, 2, 3], [4, 6, 1, 3, 6, 2, 5, 4, 3, 1], seed=1)
    names = ("old_log_probs", "ref_log_probs", "rollout_log_probs", "advantages", "values", "returns")
    shape, generator = batch.batch["response_mask"].shape, torch.Generator().manual_seed(2)
    columns = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name in names}
    batch.union(DataProto.from_dict(columns)).save_to_disk(out / "rows")
    run_world(PROGRAM, 2, tiny_model("qwen2"), out / "rows", out, returncodes=(0, 7))
    records = {path.stem.rpartition("_"): json.loads(path.read_text()) for path in out.glob("*_[01].json")}
    return {(scenario, int(rank)): record for (scenario, _, rank), record in records.items()}


@pytest.mark.parametrize("rank", [0, 1])
def test_nan_on_one_rank_is_an_error_on_both_that_names_the_row(outcomes, rank):
    outcome = outcomes["nan_loss", rank]
    assert outcome["raised"] == "NonFiniteError"
    assert "row 5: loss nan" in outcome["message"]  # the third row of the second rank
    assert outcome["message"].count("row ") == 1
    assert outcome["unchanged"]


@pytest.mark.parametrize("rank", [0, 1])
def test_non_finite_gradient_on_one_rank_names_its_row(outcomes, rank):
    outcome = outcomes["nan_gradient", rank]
    assert outcome["raised"] == "NonFiniteError"
    assert "row 5: loss" in outcome["message"]
    assert "gradient not finite" in outcome["message"]
    assert outcome["message"].count("row ") == 1
    assert outcome["unchanged"]


def test_training_continues_after_a_rejected_step(outcomes):
    assert outcomes["after", 0]["raised"] == outcomes["after", 1]["raised"] == ""
    assert outcomes["after", 0]["norm"] == outcomes["after", 1]["norm"] > 0


@pytest.mark.parametrize("rank", [0, 1])
def test_unknown_token_on_one_rank_is_an_error_on_both(outcomes, rank):
    outcome = outcomes["unknown_token", rank]
    assert outcome["raised"] == "BatchError"
    assert "rank 1: " in outcome["message"]
    assert "has a vocabulary of 40 entries, but the rows have token ids from 0 to 40" in outcome["message"]


@pytest.mark.parametrize("rank", [0, 1])
def test_too_long_sequence_on_one_rank_is_an_error_on_both(outcomes, rank):
    outcome = outcomes["too_long", rank]
    assert outcome["raised"] == "BatchError"
    assert "rank 1: row" in outcome["message"]
    assert "memory.max_tokens_per_micro_batch=9" in outcome["message"]


def test_axes_that_do_not_divide_ranks_are_an_error(outcomes):
    assert outcomes["mesh", 0]["raised"] == "ModelConfigError"
    assert "parallel.sequence=2 times parallel.tensor=2 does not divide the 2 ranks" in outcomes["mesh", 0]["message"]


def test_death_of_a_rank_in_a_collective_is_an_error_on_the_others(outcomes):
    outcome = outcomes["death", 0]
    assert outcome["raised"] == "LostWorkerError"
    assert "another rank" in outcome["message"]
    assert "imed out waiting" not in outcome["message"]  # the timeout of the process group is an hour


def test_out_of_memory_error_names_settings_and_later_steps_fail(outcomes):
    lost, after = outcomes["out_of_memory", 1], outcomes["after_out_of_memory", 1]
    assert lost["raised"] == "OutOfMemoryError"
    assert "out of memory in an update, nothing was applied" in lost["message"]
    assert "set a smaller memory.max_tokens_per_micro_batch" in lost["message"]
    assert after["raised"] == "WorkerError"
    assert "this rank is out of sync with the others since an earlier step failed" in after["message"]
    assert after["num_losses"] == 0
