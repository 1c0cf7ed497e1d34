"""A failure on one of two ranks is an error on both, with the cause, and nothing is applied."""

import json
from pathlib import Path

import pytest

from fixtures.layout_program import rows_for_losses

pytestmark = [pytest.mark.runs, pytest.mark.own_run("grpo: a rank that fails")]

PROGRAM = Path(__file__).parent / "failure_program.py"


@pytest.fixture(scope="module")
def outcomes(rollout_rows, tiny_model, run_world, tmp_path_factory):
    """Run all scenarios, and return the record of each scenario and rank."""
    out = tmp_path_factory.mktemp("failures")
    rows_for_losses(rollout_rows).save_to_disk(out / "rows")
    run_world(PROGRAM, 2, tiny_model("qwen2"), out / "rows", out, returncodes=(0, 7))
    records = {path.stem.rpartition("_"): json.loads(path.read_text()) for path in out.glob("*_[01].json")}
    return {(scenario, int(rank)): record for (scenario, _, rank), record in records.items()}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("scenario", "problem"), [("nan_loss", "row 6: loss nan"), ("nan_gradient", "not finite")])
def test_a_step_that_is_not_finite_on_one_rank_is_an_error_on_both(outcomes, scenario, problem, rank):
    outcome = outcomes[scenario, rank]
    assert (outcome["raised"], outcome["unchanged"]) == ("NonFiniteError", True)
    assert problem in outcome["message"]
    assert "row 6: loss" in outcome["message"]  # the fourth row of the second rank
    assert outcome["message"].count("row ") == 1


def test_training_continues_after_a_rejected_step(outcomes):
    assert outcomes["after", 0]["raised"] == outcomes["after", 1]["raised"] == ""
    assert outcomes["after", 0]["norm"] == outcomes["after", 1]["norm"] > 0


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        ("unknown_token", "has a vocabulary of 40 entries, but the rows have token ids from 0 to 40"),
        ("too_long", "memory.max_tokens_per_micro_batch=9"),
    ],
)
def test_bad_rows_on_one_rank_are_an_error_on_both(outcomes, scenario, words, rank):
    outcome = outcomes[scenario, rank]
    assert outcome["raised"] == "BatchError"
    assert "rank 1: " in outcome["message"]
    assert words in outcome["message"]


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
