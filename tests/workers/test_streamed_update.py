"""An optimizer step on parts of a batch: equal to that on the whole batch, and errors between the parts."""

import pytest
import torch

from hybridflow.errors import BatchError, NonFiniteError
from hybridflow.protocol import DataProto
from hybridflow.workers import ActorWorker

FLOAT64 = ("model.dtype=float64", "actor.optimizer.lr=1e-2", "data.train_batch_size=2", "rollout.group_size=4")
PARTS = ((0, 2), (2, 3), (3, 5))
KL, OLD = "algorithm.kl_in_loss=true", "actor.old_log_probs_from=rollout"
WEIGHT = "algorithm.kl_importance_weight=true"
LOSSES = {
    "on-policy": (),
    "each sequence, KL": ("actor.loss_aggregation=seq-mean-token-mean", KL),
    "one sum, KL": ("actor.loss_aggregation=token-sum", KL),
    "sums, entropy": ("actor.loss_aggregation=seq-mean-token-sum", "actor.entropy_coef=0.1"),
    "normed, old log-probs": ("actor.loss_aggregation=seq-mean-token-sum-norm", OLD, KL),
    "weighted KL": (KL, WEIGHT),
    "weighted KL, old log-probs": (KL, WEIGHT, OLD),
    "gspo": ("actor.policy_loss=gspo", "actor.loss_aggregation=seq-mean-token-mean", OLD),
    "decoupled": ("actor.policy_loss=decoupled-ppo", KL, "actor.entropy_coef=0.01"),
    "weights": ("algorithm.rollout_weights=token",),
}


@pytest.fixture
def rows(rollout_rows):
    """Return five rows, one without response tokens, with all columns that a loss reads."""
    batch = rollout_rows([2, 3, 1, 2, 3], [3, 1, 4, 0, 6])
    mask, generator = batch.batch["response_mask"], torch.Generator().manual_seed(1)
    columns = {
        name: torch.randn(mask.shape, generator=generator, dtype=torch.float64) / 4 - 3 * name.endswith("probs")
        for name in ("old_log_probs", "rollout_log_probs", "ref_log_probs", "advantages")
    }
    columns["rollout_weights"] = columns["advantages"].abs()
    return batch.union(DataProto.from_dict(columns))


def part_of(rows, number, num_rows=5):
    start, end = PARTS[number]
    meta_info = {"part": [number, len(PARTS), num_rows], "kl_coef": 0.1}
    return DataProto.from_dict(dict(rows.batch[start:end].items()), meta_info=meta_info)


def learn(actor, rows, num_rows=5):
    return [actor.update_actor_in_parts(part_of(rows, number, num_rows)) for number in range(3)]


def state_of(group, tmp_path, name):
    (tmp_path / name).mkdir()
    group.save(str(tmp_path / name))
    return (tmp_path / name / "actor.safetensors").read_bytes()


def log_probs_of(actor, rows):
    return actor.compute_log_probs(rows).batch["old_log_probs"]


@pytest.mark.parametrize("loss", LOSSES)
def test_an_update_in_parts_equals_the_update_of_the_whole_batch(group, rows, with_mini_batches, loss):
    whole, streamed = (group(ActorWorker, *FLOAT64, *LOSSES[loss], total_updates=2) for _ in range(2))
    before = log_probs_of(whole, rows)
    for _ in range(2):
        expected = whole.update_actor(with_mini_batches(rows, [0, 1, 2, 3, 4], kl_coef=0.1)).meta_info["metrics"]
        results = learn(streamed, rows)
        assert [result.meta_info["metrics"] for result in results[:2]] == [{}, {}]
        metrics = results[2].meta_info["metrics"]
        assert list(metrics) == list(expected)
        varying = ("actor/shared_prompts", "perf/")
        for name, values in expected.items():
            if not name.startswith(varying):
                assert metrics[name] == pytest.approx(values, rel=1e-9, abs=1e-13), name
    after = log_probs_of(whole, rows)
    assert (after - before).abs().max() > 1e-3
    torch.testing.assert_close(log_probs_of(streamed, rows), after, rtol=1e-9, atol=1e-12)


def test_padded_copies_in_a_part_are_not_learned_from(group, rows, tmp_path):
    states = []
    for copies in (0, 2):
        actor = group(ActorWorker, *FLOAT64)
        for number in range(3):
            part = part_of(rows, number)
            if copies:
                copied = part[:1].repeat(copies)
                copied.batch["row_ids"] = torch.full((copies,), -1)
                part = DataProto.concat([part, copied])
                part.meta_info = part_of(rows, number).meta_info
            actor.update_actor_in_parts(part)
        states.append(state_of(actor, tmp_path, str(copies)))
    assert states[0] == states[1]


def test_a_missing_part_is_an_error_and_drops_the_gradients(group, rows, tmp_path):
    actor, other = (group(ActorWorker, *FLOAT64) for _ in range(2))
    with pytest.raises(BatchError, match="part 1 of an update cannot follow 0 added parts"):
        actor.update_actor_in_parts(part_of(rows, 1))
    actor.update_actor_in_parts(part_of(rows, 0))
    with pytest.raises(BatchError, match="part 2 of an update cannot follow 1 added parts"):
        actor.update_actor_in_parts(part_of(rows, 2))
    with pytest.raises(BatchError, match="the parts of a batch of 6 rows have 5 rows"):
        learn(actor, rows, num_rows=6)
    for each in (actor, other):
        learn(each, rows)
    assert state_of(actor, tmp_path, "after") == state_of(other, tmp_path, "clean")


def test_a_part_that_fails_drops_the_gradients_of_the_others(group, rows, with_mini_batches, tmp_path):
    actor, other = (group(ActorWorker, *FLOAT64) for _ in range(2))
    broken = part_of(rows, 1)
    broken.batch["input_ids"] = broken.batch["input_ids"] + 10**6
    actor.update_actor_in_parts(part_of(rows, 0))
    with pytest.raises(BatchError, match="has a vocabulary of 40 entries"):
        actor.update_actor_in_parts(broken)
    with pytest.raises(BatchError, match="part 2 of an update cannot follow 0 added parts"):
        actor.update_actor_in_parts(part_of(rows, 2))
    for each in (actor, other):
        each.update_actor(with_mini_batches(rows, [0, 1, 2, 3, 4], kl_coef=0.1))
    assert state_of(actor, tmp_path, "after") == state_of(other, tmp_path, "clean")


def test_a_loss_that_is_not_finite_names_rows_of_every_part(group, rows, tmp_path):
    actor = group(ActorWorker, *FLOAT64)
    before = state_of(actor, tmp_path, "before")
    rows.batch["advantages"][0] = float("inf")
    rows.batch["advantages"][4] = float("nan")
    with pytest.raises(NonFiniteError, match=r"row 0: loss .* row 4: loss nan"):
        learn(actor, rows)
    assert state_of(actor, tmp_path, "after") == before
