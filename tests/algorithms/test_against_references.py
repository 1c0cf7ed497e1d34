"""All estimators and losses against scalar references, and their invariance to row order, group ids and padding."""

import inspect
import math
import random
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms import ADVANTAGES, POLICY_LOSSES
from hybridflow.algorithms.declarations import ESTIMATORS

REFERENCES = runpy.run_path(str(Path(__file__).with_name("references.py")))
NUM_BATCHES = 1000
NAN = float("nan")

GROUP_SIZE_OF = {"pass@k": 3}
PARAMETERS: dict[str, list[Any]] = {
    "gamma": [1.0, 0.9, 0.0],
    "lam": [1.0, 0.95, 0.0],
    "norm_by_std": [True, False],
    "whiten_advantages": [True, False],
    "k": [1, 2, 3],
    "success_score": [1.0, 0.5],
    "component_weights": [(1.0, 0.5), (2.0, -1.0)],
    "clip_ratio_low": [0.2, 0.05],
    "clip_ratio_high": [0.28, 0.05],
    "clip_ratio_dual": [3.0, None, 1.05],
    "max_behavior_weight": [5.0, 1.0],
    "tau_pos": [1.0, 2.0],
    "tau_neg": [1.05, 3.0],
    "divergence": ["tv", "kl"],
    "max_divergence": [0.15, 0.01],
    "penalty_coef": [1.0, 0.1],
}


def random_mask(rng: random.Random, num_rows: int, width: int) -> list[list[bool]]:
    """Draw a mask: most rows are a response and then padding, some have gaps, some are empty."""
    mask = []
    for _ in range(num_rows):
        length, density = rng.randint(0, width), rng.choice([1.0, 1.0, 0.6])
        mask.append([t < length and rng.random() < density for t in range(width)])
    return mask


def random_column(name: str, rng: random.Random, mask: list[list[bool]]) -> list[list[float]]:
    """Draw numbers where the mask is true, NaN elsewhere; log-probs are below 0."""

    def number() -> float:
        return -rng.expovariate(1.0) - 1e-3 if name.endswith("log_probs") else rng.gauss(0, 1)

    return [[number() if valid else NAN for valid in row] for row in mask]


def parameters_for(function: Any, rng: random.Random) -> dict[str, Any]:
    return {name: rng.choice(PARAMETERS[name]) for name in inspect.signature(function).parameters if name in PARAMETERS}


def advantage_batch(name: str, rng: random.Random) -> dict[str, Any]:
    """Return the columns of an estimator as lists, and its parameters."""
    function = ADVANTAGES[name]
    num_groups, width = rng.randint(1, 4), rng.randint(1, 7)
    sizes = [rng.randint(GROUP_SIZE_OF.get(name, 1), 5) for _ in range(num_groups)]
    labels = rng.sample([-(2**62), -1, 0, 5, 2**62], num_groups)
    group_ids = [label for label, size in zip(labels, sizes, strict=True) for _ in range(size)]
    rng.shuffle(group_ids)
    mask = random_mask(rng, len(group_ids), width)
    scores = [[0.0, 0.1, 1.0, rng.gauss(0, 3)] for _ in group_ids]
    columns: dict[str, Any] = {
        "group_ids": group_ids,
        "response_mask": mask,
        "scores": [rng.choice(choices) for choices in scores],
        "baseline_scores": [rng.gauss(0, 1) for _ in group_ids],
        "reward_components": [[rng.choice([0.0, 1.0, 0.3]), rng.choice([0.0, 1.0, 0.7])] for _ in group_ids],
        "token_level_rewards": random_column("token_level_rewards", rng, mask),
        "values": random_column("values", rng, mask),
        "old_log_probs": random_column("old_log_probs", rng, mask),
        "teacher_log_probs": random_column("teacher_log_probs", rng, mask),
    }
    # the token's own square, and those of the rest of the vocabulary
    columns["sum_squared_probs"] = [
        [math.exp(2 * x) + rng.random() * (1 - math.exp(x)) ** 2 for x in row] for row in columns["old_log_probs"]
    ]
    wanted = inspect.signature(function).parameters
    return {**{key: value for key, value in columns.items() if key in wanted}, **parameters_for(function, rng)}


def as_tensors(batch: dict[str, Any], dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    def tensor(name: str, value: Any) -> Any:
        if name in PARAMETERS:
            return value
        if name in ("response_mask", "selected_tokens", "group_ids"):
            return torch.tensor(value, dtype=torch.int64 if name == "group_ids" else torch.bool)
        return torch.tensor(value, dtype=dtype)

    return {name: tensor(name, value) for name, value in batch.items()}


def as_rows(tensor: Tensor, like: Any) -> Any:
    return tensor[:, 0].tolist() if not isinstance(like[0], list) else tensor.tolist()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_estimator_equals_its_reference_on_1000_ragged_batches(name):
    rng = random.Random(name)
    for _ in range(NUM_BATCHES):
        batch = advantage_batch(name, rng)
        expected = REFERENCES["ADVANTAGES"][name](**batch)
        advantages, _ = ADVANTAGES[name](**as_tensors(batch))
        found, wanted = as_rows(advantages, expected), expected
        torch.testing.assert_close(
            torch.tensor(found, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64), rtol=1e-9, atol=1e-9
        )


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_group_estimator_gives_0_to_single_responses(name):
    rng = random.Random(f"{name} single")
    largest = 0.0
    for _ in range(20):
        columns = as_tensors(advantage_batch(name, rng))
        if "group_ids" in columns:
            columns["group_ids"] = torch.arange(len(columns["group_ids"]))
        if "k" in columns:
            columns["k"] = 1
        largest = max(largest, ADVANTAGES[name](**columns)[0].abs().max().item())
    assert (largest == 0) == (ESTIMATORS[name].compares_groups or ESTIMATORS[name].is_zero)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_estimator_ignores_row_order_group_ids_and_padding(name):
    rng = random.Random(f"{name} permuted")
    for _ in range(50):
        columns = as_tensors(advantage_batch(name, rng))
        advantages, returns = ADVANTAGES[name](**columns)
        num_rows = len(advantages)
        order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(rng.randrange(2**31)))
        changed = {}
        for key, value in columns.items():
            changed[key] = value[order] if isinstance(value, Tensor) else value
        if "group_ids" in changed:
            changed["group_ids"] = torch.bitwise_not(changed["group_ids"])  # descending, and still all different
        width = 3
        padded = ("token_level_rewards", "values", "old_log_probs", "teacher_log_probs", "sum_squared_probs")
        for key in ("response_mask", *padded):
            if key in changed:
                fill = False if key == "response_mask" else NAN
                changed[key] = torch.cat([changed[key], changed[key].new_full((num_rows, width), fill)], dim=1)
        for before, after in zip((advantages, returns), ADVANTAGES[name](**changed), strict=True):
            wanted = before[order]
            if after.shape[1] > wanted.shape[1]:
                assert torch.equal(after[:, wanted.shape[1] :], torch.zeros_like(after[:, wanted.shape[1] :]))
            torch.testing.assert_close(after[:, : wanted.shape[1]], wanted, rtol=1e-12, atol=1e-12)


def loss_batch(name: str, rng: random.Random) -> dict[str, Any]:
    function = POLICY_LOSSES[name]
    mask = random_mask(rng, rng.randint(1, 5), rng.randint(1, 7))
    new = random_column("log_probs", rng, mask)
    near = rng.choice([0.0, 0.02, 0.5])

    def beside() -> list[list[float]]:
        return [
            [min(x + rng.gauss(0, near), -1e-4) if v else NAN for x, v in zip(*row, strict=True)]
            for row in zip(new, mask, strict=True)
        ]

    wide = rng.random() < 0.5
    advantages = (
        random_column("advantages", rng, mask) if wide else [[rng.choice([0.0, rng.gauss(0, 1)])] for _ in mask]
    )
    columns = {
        "log_probs": new,
        "old_log_probs": beside(),
        "rollout_log_probs": beside(),
        "advantages": advantages,
        "response_mask": mask,
        "selected_tokens": [[rng.random() < 0.3 for _ in row] for row in mask],
    }
    wanted = inspect.signature(function).parameters
    return {**{key: value for key, value in columns.items() if key in wanted}, **parameters_for(function, rng)}


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_loss_and_its_gradient_equal_their_reference(name):
    rng = random.Random(name)
    for _ in range(NUM_BATCHES):
        batch = loss_batch(name, rng)
        columns = as_tensors(batch)
        log_probs = columns["log_probs"].requires_grad_()
        loss = POLICY_LOSSES[name](**columns)
        loss.token_losses.sum().backward()
        gradient = log_probs.grad
        assert gradient is not None
        settings = {key: value for key, value in batch.items() if key in PARAMETERS}
        for i, valid in enumerate(batch["response_mask"]):
            places = [t for t, v in enumerate(valid) if v]
            assert not loss.token_losses[i][~torch.tensor(valid)].any()
            assert not gradient[i][~torch.tensor(valid)].any()
            if not places:
                continue
            advantages = batch["advantages"][i]
            losses, slopes = REFERENCES["POLICY_LOSSES"][name](
                [batch["log_probs"][i][t] for t in places],
                [batch["old_log_probs"][i][t] for t in places],
                [advantages[t if len(advantages) > 1 or len(valid) == 1 else 0] for t in places],
                rollout=[batch["rollout_log_probs"][i][t] for t in places] if "rollout_log_probs" in batch else None,
                selected=[batch["selected_tokens"][i][t] for t in places] if "selected_tokens" in batch else None,
                **settings,
            )
            assert loss.token_losses[i, places].tolist() == pytest.approx(losses, rel=1e-9, abs=1e-12)
            assert gradient[i, places].tolist() == pytest.approx(slopes, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_loss_ignores_row_order_and_padding(name):
    rng = random.Random(f"{name} permuted")
    for _ in range(50):
        columns = as_tensors(loss_batch(name, rng))
        loss = POLICY_LOSSES[name](**columns)
        num_rows, width = columns["log_probs"].shape
        order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(rng.randrange(2**31)))
        changed = {}
        for key, value in columns.items():
            if isinstance(value, Tensor):
                value = value[order]
                if value.shape[1] == width and (width > 1 or key != "advantages"):
                    fill = False if value.dtype == torch.bool else NAN
                    value = torch.cat([value, value.new_full((num_rows, 2), fill)], dim=1)
            changed[key] = value
        permuted = POLICY_LOSSES[name](**changed)
        for field in ("token_losses", "clipped", "clipped_dual", "ratio"):
            before, after = getattr(loss, field)[order], getattr(permuted, field)
            torch.testing.assert_close(after[:, :width].double(), before.double(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_on_policy_every_loss_has_the_policy_gradient(name):
    rng = random.Random(f"{name} on-policy")
    for _ in range(50):
        columns = as_tensors(loss_batch(name, rng))
        columns |= {
            key: columns["log_probs"].clone() for key in ("old_log_probs", "rollout_log_probs") if key in columns
        }
        if "selected_tokens" in columns:
            columns["selected_tokens"] = torch.zeros_like(columns["response_mask"])
        if name == "gmpo":  # its gradient is that of a response's mean advantage
            columns["advantages"] = columns["advantages"][:, :1].nan_to_num(0.5)
        log_probs = columns["log_probs"].requires_grad_()
        POLICY_LOSSES[name](**columns).token_losses.sum().backward()
        wanted = torch.where(columns["response_mask"], -columns["advantages"], 0.0).expand(log_probs.shape)
        torch.testing.assert_close(log_probs.grad, wanted.contiguous(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("table", "names"), [(ADVANTAGES, "ADVANTAGES"), (POLICY_LOSSES, "POLICY_LOSSES")])
def test_every_entry_of_the_tables_has_a_reference(table, names):
    assert set(REFERENCES[names]) == set(table)
