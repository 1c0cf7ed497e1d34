import pytest
import torch

from hybridflow.errors import WorkerError
from hybridflow.protocol import DataProto
from hybridflow.workers import ActorRolloutWorker, OfflinePolicyWorker

CHANGES = ["offline.optimizer.lr=1e-2"]


@pytest.fixture
def examples(rollout_rows):
    return rollout_rows([2, 3, 1, 2], [3, 1, 4, 2])


def test_the_loss_is_the_mean_cross_entropy_of_response_tokens(group, examples, with_mini_batches):
    worker = group(OfflinePolicyWorker, *CHANGES)
    log_probs = worker.compute_log_probs(examples).batch["old_log_probs"]
    metrics = worker.update_sft(with_mini_batches(examples, [0, 1, 2, 3])).meta_info["metrics"]
    assert metrics["sft/loss"] == pytest.approx([-float(log_probs.sum()) / 10])
    assert metrics["sft/lr"] == [1e-2]
    assert worker.compute_log_probs(examples).batch["old_log_probs"].sum() > log_probs.sum()


def test_padded_copies_do_not_change_an_update(group, examples, with_mini_batches):
    def log_probs_after(batch):
        worker = group(OfflinePolicyWorker, *CHANGES)
        metrics = worker.update_sft(with_mini_batches(batch, [0, 1, 2, 3])).meta_info["metrics"]
        return metrics, worker.compute_log_probs(examples).batch["old_log_probs"]

    copies = examples[:3]
    copies.batch["row_ids"] = torch.full((3,), -1)
    (metrics, padded), (expected_metrics, expected) = map(
        log_probs_after, (DataProto.concat([examples, copies]), examples)
    )
    assert metrics == expected_metrics
    assert torch.equal(padded, expected)


def test_three_ranks_compute_the_same_as_one(group, examples):
    one, three = (group(OfflinePolicyWorker, num_workers=n).compute_log_probs(examples) for n in (1, 3))
    torch.testing.assert_close(one.batch["old_log_probs"], three.batch["old_log_probs"])


def test_an_update_on_ranks_that_take_turns_raises(group, examples, with_mini_batches):
    with pytest.raises(WorkerError, match=r"needs a collective over its 2 ranks \(sum gradients\)"):
        group(OfflinePolicyWorker, num_workers=2).update_sft(with_mini_batches(examples, [0, 1, 2, 3]))


def test_a_checkpoint_of_offline_training_is_a_policy(group, examples, with_mini_batches, tmp_path):
    worker = group(OfflinePolicyWorker, *CHANGES)
    worker.update_sft(with_mini_batches(examples, [0, 1, 2, 3]))
    worker.save(str(tmp_path))
    actor = group(ActorRolloutWorker)
    actor.load(str(tmp_path))
    learned = worker.compute_log_probs(examples).batch["old_log_probs"]
    assert torch.equal(actor.compute_log_probs(examples).batch["old_log_probs"], learned)
