"""Planted faults are seen by the comparison of `hybridflow certify` that they break, and named by it."""

import json
import shutil

import pytest
import torch

from hybridflow.checkpoint import CheckpointStore, load_state, save_state
from hybridflow.rollout.weight_sync.fingerprint import placed_fingerprints
from hybridflow.trainers.certify.equality import difference_within, different_elements, equality_of
from hybridflow.trainers.certify.in_process import compare_log_probs, compare_weights, replay

STEP = 6
"""The last step of the canonical runs."""


def test_a_reordered_reduction_in_the_trainer_is_named_by_row_and_token():
    logits = torch.randn(3, 4, 4096, generator=torch.Generator().manual_seed(0))
    sampled = -logits.exp().sum(-1).log()
    reordered = -sum(logits.exp().unbind(-1), torch.zeros(3, 4)).log()
    mask = torch.ones(3, 4)
    assert compare_log_probs(sampled, sampled.clone(), mask).difference == ""
    found = compare_log_probs(sampled, reordered, mask)
    row, token = (sampled != reordered).nonzero()[0].tolist()
    assert found.compared == "3 rows, 12 tokens"
    assert f"the first is row {row}, token {token}: {float(sampled[row, token]):.9g} when sampled" in found.difference
    mask[sampled != reordered] = 0  # tokens of a prompt are not compared
    assert compare_log_probs(sampled, reordered, mask).difference == ""


def test_a_changed_bit_of_a_delivered_weight_is_named():
    weights = {name: torch.randn(5, 3) for name in ("embed", "head")}
    sent = placed_fingerprints(weights.items())
    shared = compare_weights(sent, [placed_fingerprints(weights.items())], in_one_process=True)
    assert (shared.compared, shared.difference) == ("2 tensors, which are the same memory", "")
    copies = {name: weight.clone() for name, weight in weights.items()}
    delivered = [placed_fingerprints(copies.items())]
    copies["head"].view(torch.uint8)[4, 11] ^= 1
    delivered.append(placed_fingerprints(copies.items()))
    assert compare_weights(sent, delivered[:1], in_one_process=False).difference == ""
    found = compare_weights(sent, delivered, in_one_process=False)
    assert found.compared == "2 tensors, by fingerprint, on 2 ranks"
    assert found.difference == "rank 1: 1 of 2 tensors differ, the first is head"


def test_the_first_value_that_differs_is_named_with_its_distance():
    assert difference_within("", {"loss": 0.5, "x": float("nan")}, {"loss": 0.5, "x": float("nan")}) == ""
    assert difference_within("", {"loss": 0.5}, {"loss": 0.25}) == "loss is 0.25, not 0.5 (by 0.25)"
    assert difference_within("", {"loss": 0.5}, {}) == "loss is missing, not 0.5"
    assert difference_within("", {"a": {"b": [1, 2]}}, {"a": {"b": [1, 3]}}) == "a.b.1 is 3, not 2 (by 1)"
    assert different_elements(torch.zeros(2), torch.zeros(2)) == ""
    assert different_elements(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])).startswith("1 of 2 elements differ")
    assert different_elements(torch.zeros(2), torch.zeros(3)) == "torch.float32 (3,), not torch.float32 (2,)"


@pytest.fixture
def copy(grpo_run, tmp_path):
    return shutil.copytree(grpo_run, tmp_path / "copy")


def change_rows(run, name, step, change):
    """Change the row of a step in a file of a run."""
    rows = [json.loads(line) for line in (run / name).read_text().splitlines()]
    change(next(row for row in rows if row["step"] == step))
    (run / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.runs
def test_runs_are_equal_to_their_copies_and_to_resumed_ones(grpo_run, ppo_run, resumed_run, copy):
    found = equality_of(grpo_run, copy)
    assert (found.difference, found.compared.split(", ")[:2]) == ("", ["6 steps", "144 rows"])
    assert equality_of(ppo_run, resumed_run, after=3, with_controller=False).difference == ""


@pytest.mark.runs
def test_a_skipped_row_is_named(grpo_run, copy):
    def skip(row):
        for values in row.values():
            if isinstance(values, list):
                del values[7]

    change_rows(copy, "rollouts.jsonl", 4, skip)
    found = equality_of(grpo_run, copy)
    assert found.difference.startswith("step 4: row 7")
    assert found.difference.endswith("(23 values, not 24)")
    assert equality_of(grpo_run, copy, after=4).difference == ""


@pytest.mark.runs
def test_a_metric_that_differs_is_named(grpo_run, copy):
    change_rows(copy, "metrics.jsonl", 3, lambda row: row.update({"actor/loss": row["actor/loss"] + 1e-12}))
    assert equality_of(grpo_run, copy).difference.startswith("step 3: actor/loss is ")
    shutil.copy(grpo_run / "metrics.jsonl", copy)
    change_rows(copy, "metrics.jsonl", 3, lambda row: row.update(step=99))
    assert equality_of(grpo_run, copy).difference == "step 3: it is missing in the other run"


@pytest.mark.runs
@pytest.mark.parametrize("state", ["actor", "controller"])
def test_a_changed_bit_of_a_checkpoint_is_named(grpo_run, copy, state):
    store = CheckpointStore(copy / "checkpoints", keep=9)
    contents = {name: load_state(store.path(STEP) / name) for name in store.open(STEP).components}
    if state == "actor":
        contents["actor"]["model"]["model.norm.weight"].view(torch.uint8)[2] ^= 1
    else:
        contents["controller"]["loader"]["batch_in_epoch"] += 1
    with store.begin(STEP, store.open(STEP).info) as directory:
        for name, values in contents.items():
            save_state(values, directory / name)
    found = equality_of(grpo_run, copy)
    expected = {
        "actor": "tensor model/model.norm.weight of actor: 1 of 32 elements differ",
        "controller": "controller.",
    }
    assert found.difference.startswith(f"step {STEP}: {expected[state]}")


@pytest.mark.runs
def test_a_damaged_checkpoint_is_a_difference(grpo_run, copy):
    file = copy / f"checkpoints/step_{STEP:06d}/actor.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert "actor.safetensors' is damaged" in equality_of(grpo_run, copy).difference


@pytest.mark.runs
@pytest.mark.own_run("grpo: its last step is learned again")
def test_a_step_that_is_not_learned_again_alike_is_named(copy, tmp_path, restores_the_process):
    change_rows(copy, "metrics.jsonl", STEP, lambda row: row.update({"actor/grad_norm": row["actor/grad_norm"] * 2}))
    found = replay(copy, tmp_path / "scratch")["replayed"]
    assert found.difference.startswith(f"step {STEP}: actor/grad_norm is ")
