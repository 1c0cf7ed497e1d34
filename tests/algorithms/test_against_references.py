"""All functions against scalar references on random ragged batches, and their invariance to row order and padding."""

import inspect
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fixtures import references
from fixtures.references import random_column, random_mask
from hybridflow.algorithms import (
    ADVANTAGES,
    AGGREGATIONS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    aggregate_loss,
    clipped_value_loss,
    kl_loss,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
)
from hybridflow.algorithms.declarations import ESTIMATORS

NAN = float("nan")
MANY, FEW = (settings(deadline=None, derandomize=True, max_examples=number) for number in (100, 40))
BATCH = given(rng=st.randoms(use_true_random=True))

GROUP_SIZE_OF = {"pass@k": 3}
PARAMETERS: dict[str, list[Any]] = {
    "gamma": [1.0, 0.9, 0.0],
    "lam": [1.0, 0.95, 0.0],
    "norm_by_std": [True, False],
    "whiten_advantages": [True, False],
    "k": [1, 2, 3],
    "success_score": [1.0, 0.5],
    "component_weights": [(1.0, 0.5), (2.0, -1.0)],
    "clip_ratio_low": [0.2, 0.05, 0.0, 1.0],
    "clip_ratio_high": [0.28, 0.05, 0.0, 1.0],
    "clip_ratio_dual": [3.0, None, 1.05],
    "max_behavior_weight": [5.0, 1.0],
    "tau_pos": [1.0, 2.0],
    "tau_neg": [1.05, 3.0],
    "divergence": ["tv", "kl"],
    "max_divergence": [0.15, 0.01],
    "penalty_coef": [1.0, 0.1],
}


def arguments_of(function: Any, rng: random.Random, columns: dict[str, Any]) -> dict[str, Any]:
    wanted = inspect.signature(function).parameters
    drawn = {name: rng.choice(PARAMETERS[name]) for name in wanted if name in PARAMETERS}
    return {**{key: value for key, value in columns.items() if key in wanted}, **drawn}


def advantage_batch(name: str, rng: random.Random) -> dict[str, Any]:
    num_groups, width = rng.randint(1, 4), rng.randint(1, 7)
    sizes = [rng.randint(GROUP_SIZE_OF.get(name, 1), 5) for _ in range(num_groups)]
    labels = rng.sample([-(2**62), -1, 0, 5, 2**62], num_groups)
    group_ids = [label for label, size in zip(labels, sizes, strict=True) for _ in range(size)]
    rng.shuffle(group_ids)
    mask = random_mask(rng, len(group_ids), width)
    columns: dict[str, Any] = {
        "group_ids": group_ids,
        "response_mask": mask,
        "scores": [rng.choice([0.0, 0.1, 1.0, rng.gauss(0, 3)]) for _ in group_ids],
        "baseline_scores": [rng.gauss(0, 1) for _ in group_ids],
        "reward_components": [[rng.choice([0.0, 1.0, 0.3]), rng.choice([0.0, 1.0, 0.7])] for _ in group_ids],
    }
    for column in ("token_level_rewards", "values", "old_log_probs", "teacher_log_probs"):
        columns[column] = random_column(column, rng, mask)
    # the token's own square, and those of the rest of the vocabulary
    columns["sum_squared_probs"] = [
        [math.exp(2 * x) + rng.random() * (1 - math.exp(x)) ** 2 for x in row] for row in columns["old_log_probs"]
    ]
    return arguments_of(ADVANTAGES[name], rng, columns)


def loss_batch(name: str, rng: random.Random) -> dict[str, Any]:
    mask = random_mask(rng, rng.randint(1, 5), rng.randint(1, 7))
    new, near = random_column("log_probs", rng, mask), rng.choice([0.0, 0.02, 0.5])

    def beside() -> list[list[float]]:
        return [[min(x + rng.gauss(0, near), -1e-4) for x in row] for row in new]

    per_row = [[rng.choice([0.0, rng.gauss(0, 1)])] for _ in mask]
    columns = {
        "log_probs": new,
        "old_log_probs": beside(),
        "rollout_log_probs": beside(),
        "advantages": random_column("advantages", rng, mask) if rng.random() < 0.5 else per_row,
        "response_mask": mask,
        "selected_tokens": [[rng.random() < 0.3 for _ in row] for row in mask],
    }
    return arguments_of(POLICY_LOSSES[name], rng, columns)


def as_tensors(batch: dict[str, Any]) -> dict[str, Any]:
    dtypes = {"response_mask": torch.bool, "selected_tokens": torch.bool, "group_ids": torch.int64}
    return {
        name: value if name in PARAMETERS else torch.tensor(value, dtype=dtypes.get(name, torch.float64))
        for name, value in batch.items()
    }


def assert_rows(found: Tensor, wanted: list) -> None:
    """Compare one number per token, or one per row, with the reference."""
    found = (found if isinstance(wanted[0], list) else found[:, 0]).double()
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def assert_tokens(losses: Tensor, log_probs: Tensor, mask: list[list[bool]], reference: Callable[..., Any]) -> None:
    """Compare values of tokens and their gradient with `reference(row, position)`; both are 0 where masked."""
    losses.sum().backward()
    assert log_probs.grad is not None
    wanted = [[reference(i, t) if v else (0.0, 0.0) for t, v in enumerate(valid)] for i, valid in enumerate(mask)]
    for found, part in ((losses.detach(), 0), (log_probs.grad, 1)):
        assert_rows(found, [[token[part] for token in row] for row in wanted])


# Advantages


@pytest.mark.parametrize("name", ADVANTAGES)
@MANY
@BATCH
def test_advantages_and_returns_equal_their_reference(name, rng):
    batch = advantage_batch(name, rng)
    wanted = references.ADVANTAGES[name](**batch)
    advantages, returns = ADVANTAGES[name](**as_tensors(batch))
    assert_rows(advantages, wanted)
    assert_rows(returns, references.returns(name, wanted, **batch))
    assert not advantages.requires_grad
    assert advantages.data_ptr() != returns.data_ptr() or not advantages.numel()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_group_estimator_gives_0_to_single_responses(name):
    rng, largest = random.Random(f"{name} single"), 0.0
    for _ in range(20):
        columns = as_tensors(advantage_batch(name, rng))
        if "group_ids" in columns:
            columns["group_ids"] = torch.arange(len(columns["group_ids"]))
        columns |= {"k": 1} if "k" in columns else {}
        largest = max(largest, ADVANTAGES[name](**columns)[0].abs().max().item())
    assert (largest == 0) == (ESTIMATORS[name].compares_groups or ESTIMATORS[name].is_zero)


@pytest.mark.parametrize("name", ADVANTAGES)
@FEW
@BATCH
def test_an_estimator_ignores_row_order_group_ids_and_padding(name, rng):
    columns = as_tensors(advantage_batch(name, rng))
    before = ADVANTAGES[name](**columns)
    order = rng.sample(range(len(before[0])), len(before[0]))
    changed = {key: value[order] if isinstance(value, Tensor) else value for key, value in columns.items()}
    if "group_ids" in changed:
        changed["group_ids"] = torch.bitwise_not(changed["group_ids"])  # descending, and still all different
    for key, value in changed.items():
        if isinstance(value, Tensor) and value.dim() == 2 and key != "reward_components":
            changed[key] = padded(value, 3)
    for old, new in zip(before, ADVANTAGES[name](**changed), strict=True):
        width = old.shape[1]
        torch.testing.assert_close(new[:, :width], old[order], rtol=1e-12, atol=1e-12)
        assert not new[:, width:].any()


def padded(column: Tensor, width: int) -> Tensor:
    fill = False if column.dtype == torch.bool else NAN
    return torch.cat([column, column.new_full((len(column), width), fill)], dim=1)


# Policy losses


@pytest.mark.parametrize("name", POLICY_LOSSES)
@MANY
@BATCH
def test_a_policy_loss_and_its_gradient_equal_their_reference(name, rng):
    batch = loss_batch(name, rng)
    columns, mask = as_tensors(batch), batch["response_mask"]
    columns["log_probs"].requires_grad_()
    loss = POLICY_LOSSES[name](**columns)
    of_rows = []
    for i, valid in enumerate(mask):
        places = [t for t, v in enumerate(valid) if v]
        given_columns = {key: value[i] for key, value in batch.items() if key not in PARAMETERS}
        wide = given_columns["advantages"] * (len(valid) if len(given_columns["advantages"]) == 1 else 1)
        given_columns["advantages"] = wide
        picked = {key: [row[t] for t in places] for key, row in given_columns.items()}
        losses, slopes = references.POLICY_LOSSES[name](
            *(picked[key] for key in ("log_probs", "old_log_probs", "advantages")),
            rollout=picked.get("rollout_log_probs"),
            selected=picked.get("selected_tokens"),
            **{key: value for key, value in batch.items() if key in PARAMETERS},
        ) if places else ([], [])  # fmt: skip
        of_rows.append(dict(zip(places, zip(losses, slopes, strict=True), strict=True)))
    assert_tokens(loss.token_losses, columns["log_probs"], mask, lambda i, t: of_rows[i][t])
    assert not loss.ratio.requires_grad
    assert not (loss.clipped | loss.clipped_dual)[~columns["response_mask"]].any()
    if name == "ppo":
        is_moving = (columns["advantages"] != 0) & columns["response_mask"]
        stopped = is_moving & (columns["log_probs"].grad == 0)
        assert torch.equal((loss.clipped | loss.clipped_dual), stopped)
        ratio, dual = (columns["log_probs"] - columns["old_log_probs"]).exp().detach(), batch["clip_ratio_dual"]
        assert torch.equal(loss.clipped_dual, is_moving & (columns["advantages"] < 0) & (ratio > (dual or math.inf)))
        torch.testing.assert_close(loss.ratio[columns["response_mask"]], ratio[columns["response_mask"]])


@pytest.mark.parametrize("name", POLICY_LOSSES)
@FEW
@BATCH
def test_a_policy_loss_ignores_row_order_and_padding(name, rng):
    columns = as_tensors(loss_batch(name, rng))
    loss = POLICY_LOSSES[name](**columns)
    num_rows, width = columns["log_probs"].shape
    order = rng.sample(range(num_rows), num_rows)
    changed = {}
    for key, value in columns.items():
        changed[key] = value[order] if isinstance(value, Tensor) else value
        if isinstance(value, Tensor) and value.shape[1] == width and (width > 1 or key != "advantages"):
            changed[key] = padded(changed[key], 2)
    permuted = POLICY_LOSSES[name](**changed)
    for field in ("token_losses", "clipped", "clipped_dual", "ratio"):
        before, after = getattr(loss, field)[order], getattr(permuted, field)
        torch.testing.assert_close(after[:, :width].double(), before.double(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", POLICY_LOSSES)
@FEW
@BATCH
def test_on_policy_every_loss_has_the_policy_gradient(name, rng):
    columns = as_tensors(loss_batch(name, rng))
    columns |= {key: columns["log_probs"].clone() for key in ("old_log_probs", "rollout_log_probs") if key in columns}
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
    assert set(getattr(references, names)) == set(table)


# Statistics, KL, values and aggregation


def token_columns(rng: random.Random, *names: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return columns as lists with a mask, and as tensors; the first one has a gradient."""
    mask = random_mask(rng, rng.randint(1, 5), rng.randint(0, 8))
    lists = {name: random_column(name, rng, mask) for name in names} | {"response_mask": mask}
    tensors = as_tensors(lists)
    tensors[names[0]].requires_grad_()
    return lists, tensors


@MANY
@BATCH
def test_statistics_over_a_mask_are_those_of_a_list(rng):
    _, tensors = token_columns(rng, "values")
    leaf, mask = tensors["values"], tensors["response_mask"]
    values = leaf.nan_to_num(0.5)[:, :1] if mask.shape[1] and rng.random() < 0.2 else leaf  # one for each row
    wide = values.expand(mask.shape)
    for dim, (lines, masks) in enumerate(((wide.T, mask.T), (wide, mask))):
        lists = [line[of_line].tolist() for line, of_line in zip(lines, masks, strict=True)]
        means = [math.fsum(line) / max(len(line), 1) for line in lists]
        assert masked_mean(values, mask, dim=dim).tolist() == pytest.approx(means)
    kept = wide[mask].tolist()
    mean = math.fsum(kept) / max(len(kept), 1)
    variance = math.fsum((value - mean) ** 2 for value in kept) / max(len(kept) - 1, 1)
    assert masked_sum(values, mask).item() == pytest.approx(math.fsum(kept))
    assert masked_mean(values, mask).item() == pytest.approx(mean)
    assert masked_var(values, mask).item() == pytest.approx(variance)
    whitened = masked_whiten(values, mask)
    expected = [(value - mean) / math.sqrt(variance + 1e-8) for value in kept]
    assert whitened[mask].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-9)
    assert whitened.shape == mask.shape
    assert not whitened[~mask].any()
    if values is leaf:
        masked_mean(values, mask).backward()
        assert torch.equal(leaf.grad, mask.double() / max(len(kept), 1))


@pytest.mark.parametrize(("name", "is_weighted"), [*((name, False) for name in KL_ESTIMATORS), ("k3", True)])
@MANY
@BATCH
def test_a_kl_and_its_gradient_equal_their_reference(name, is_weighted, rng):
    columns = ("log_probs", "ref_log_probs", *(["old_log_probs"] if is_weighted else []))
    lists, tensors = token_columns(rng, *columns)
    kl = kl_loss(**tensors, kl_estimator=name)
    reference = lambda i, t: references.kl(name, *(lists[column][i][t] for column in columns))  # noqa: E731
    assert_tokens(kl, tensors["log_probs"], lists["response_mask"], reference)


@MANY
@BATCH
def test_a_value_loss_and_its_gradient_equal_their_reference(rng):
    columns = ("new_values", "values", "returns")
    lists, tensors = token_columns(rng, *columns)
    loss = clipped_value_loss(**tensors, value_clip=0.4)
    reference = lambda i, t: references.value_loss(*(lists[column][i][t] for column in columns), 0.4)  # noqa: E731
    assert_tokens(loss.token_losses, tensors["new_values"], lists["response_mask"], reference)
    plain = 0.5 * (tensors["new_values"] - tensors["returns"]).square()
    assert torch.equal(loss.clipped, tensors["response_mask"] & (loss.token_losses > plain))


@pytest.mark.parametrize("mode", AGGREGATIONS)
@MANY
@BATCH
def test_an_aggregated_loss_is_that_of_its_parts_and_of_the_reference(mode, rng):
    lists, tensors = token_columns(rng, "losses")
    whole_leaf, mask = tensors["losses"], tensors["response_mask"]
    counts = {"num_tokens": int(mask.sum()), "num_sequences": int(mask.any(1).sum()), "max_response_length": 9}
    whole = aggregate_loss(whole_leaf, mask, mode, **counts)
    assert whole.item() == pytest.approx(references.aggregate(*lists.values(), mode, 9), rel=1e-12, abs=1e-14)
    whole.backward()

    order, leaf, total = rng.sample(range(len(mask)), len(mask)), whole_leaf.detach().requires_grad_(), 0.0
    cut = rng.randint(0, len(order))
    for rows in (order[:cut], order[cut:]):
        places = mask[rows].any(0).nonzero()
        stop = int(places.max()) + 1 if len(places) else 0  # a part may be narrower than the whole, or empty
        part = aggregate_loss(leaf[rows, :stop], mask[rows, :stop], mode, **counts)
        part.backward()
        total += part.item()
    assert total == pytest.approx(whole.item(), rel=1e-12, abs=1e-14)
    torch.testing.assert_close(leaf.grad, whole_leaf.grad, rtol=1e-12, atol=1e-14)
