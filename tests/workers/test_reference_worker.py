import torch

from hybridflow.workers import ActorRolloutWorker, ReferenceWorker


def test_the_reference_equals_the_policy_before_its_first_update(group, rollout_rows):
    rows = rollout_rows([2, 3, 1, 2], [3, 1, 4, 2])
    policy = group(ActorRolloutWorker, "rollout.temperature=0.8").compute_log_probs(rows).batch["old_log_probs"]
    reference = group(ReferenceWorker, "rollout.temperature=0.8").compute_ref_log_probs(rows).batch["ref_log_probs"]
    assert torch.equal(reference, policy)


def test_three_ranks_compute_the_same_as_one(group, rollout_rows):
    rows = rollout_rows([2, 3, 1, 2], [3, 1, 4, 2])
    one, three = (group(ReferenceWorker, num_workers=n).compute_ref_log_probs(rows) for n in (1, 3))
    torch.testing.assert_close(one.batch["ref_log_probs"], three.batch["ref_log_probs"])


def test_the_reference_can_be_a_separate_model(group, rollout_rows, tiny_model):
    rows = rollout_rows([2, 1], [3, 2])
    own = group(ReferenceWorker, f"reference.model_path={tiny_model('llama', seed=5)}").compute_ref_log_probs(rows)
    assert not torch.equal(
        own.batch["ref_log_probs"], group(ReferenceWorker).compute_ref_log_probs(rows).batch["ref_log_probs"]
    )
