"""What workers with a model have in common: values on any number of ranks, padded copies, saves, start models."""

import pytest
import torch

from hybridflow.checkpoint import saved_files
from hybridflow.engines import build_model
from hybridflow.errors import CheckpointError, ModelError, WorkerError
from hybridflow.protocol import DataProto
from hybridflow.workers import ActorRolloutWorker, CriticWorker, OfflinePolicyWorker, ReferenceWorker

ALL = [0, 1, 2, 3]
WORKERS = {
    "actor": (ActorRolloutWorker, "compute_log_probs", "old_log_probs", "update_actor"),
    "critic": (CriticWorker, "compute_values", "values", "update_critic"),
    "offline": (OfflinePolicyWorker, "compute_log_probs", "old_log_probs", "update_sft"),
    "reference": (ReferenceWorker, "compute_ref_log_probs", "ref_log_probs", None),
}
LEARNING = [pytest.param(name, id=name) for name in ("actor", "critic", "offline")]
FASTER = ("actor.optimizer.lr=1e-2", "critic.optimizer.lr=1e-2", "offline.optimizer.lr=1e-2", "rollout.group_size=2")


class Of:
    """The worker of a name in `WORKERS`."""

    def __init__(self, group, name, **options):
        cls, self._compute, self._column, self._update = WORKERS[name]
        self.workers = group(cls, *FASTER, **options)

    def compute(self, rows):
        return getattr(self.workers, self._compute)(rows).batch[self._column]

    def update(self, batch):
        return getattr(self.workers, self._update)(batch).meta_info["metrics"]


@pytest.fixture
def rows(learnable):
    rows = learnable(more=("values",))
    return rows.union(DataProto.from_dict({"returns": torch.ones(rows.batch["response_mask"].shape)}))


@pytest.mark.parametrize("name", LEARNING)
def test_what_one_rank_learned_and_saved_is_computed_by_three(group, rows, with_mini_batches, tmp_path, name):
    one, three = Of(group, name), Of(group, name, num_workers=3)
    before = one.compute(rows)
    one.update(with_mini_batches(rows, ALL))
    (saved,) = one.workers.save(str(tmp_path))
    assert sorted(saved) == sorted(saved_files(tmp_path, tmp_path.iterdir()))
    three.workers.load(str(tmp_path))
    learned, mask = one.compute(rows), rows.batch["response_mask"]
    assert (learned[mask] != before[mask]).all()
    assert (learned[~mask] == 0).all()
    torch.testing.assert_close(three.compute(rows), learned)
    again = Of(group, name)
    again.workers.load(str(tmp_path))
    assert again.update(with_mini_batches(rows, ALL)) == one.update(with_mini_batches(rows, ALL))
    assert torch.equal(again.compute(rows), one.compute(rows))


@pytest.mark.parametrize("name", LEARNING)
def test_padded_copies_do_not_change_an_update(group, rows, with_mini_batches, name):
    copies = rows[:3]
    copies.batch["row_ids"] = torch.full((3,), -1)
    found = []
    for batch in (rows, DataProto.concat([rows, copies])):
        worker = Of(group, name)
        metrics = worker.update(with_mini_batches(batch, ALL))
        found.append(({key: value for key, value in metrics.items() if "prompts" not in key}, worker.compute(rows)))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("name", LEARNING)
def test_an_update_on_ranks_that_take_turns_raises(group, rows, with_mini_batches, name):
    with pytest.raises(WorkerError, match=r"needs a collective over its 2 ranks \(sum gradients\)"):
        Of(group, name, num_workers=2).update(with_mini_batches(rows, ALL))


def test_the_reference_equals_the_policy_before_its_first_update(group, rows, tiny_model):
    reference = Of(group, "reference").compute(rows)
    assert torch.equal(reference, Of(group, "actor").compute(rows))
    torch.testing.assert_close(Of(group, "reference", num_workers=3).compute(rows), reference)
    other = group(ReferenceWorker, f"reference.model_path={tiny_model('llama', seed=5)}")
    assert not torch.equal(other.compute_ref_log_probs(rows).batch["ref_log_probs"], reference)


def test_the_sft_loss_is_the_mean_cross_entropy_of_response_tokens(group, rows, with_mini_batches, tmp_path):
    offline = Of(group, "offline")
    log_probs = offline.compute(rows)
    metrics = offline.update(with_mini_batches(rows, ALL))
    assert metrics["sft/loss"] == pytest.approx([-float(log_probs.sum()) / 10])
    assert metrics["sft/lr"] == [1e-2]
    assert offline.compute(rows).sum() > log_probs.sum()
    offline.workers.save(str(tmp_path))
    actor = Of(group, "actor")
    actor.workers.load(str(tmp_path))  # a checkpoint of offline training is a policy
    assert torch.equal(actor.compute(rows), offline.compute(rows))


def test_a_critic_starts_at_zero_and_learns_returns(group, rows, with_mini_batches):
    critic, losses = Of(group, "critic"), []
    assert not critic.compute(rows).any()
    for _ in range(5):
        rows.batch["values"] = critic.compute(rows)
        losses += critic.update(with_mini_batches(rows, ALL))["critic/loss"]
    assert losses[0] == pytest.approx(0.5)  # (0 - 1)^2 / 2
    assert losses == sorted(losses, reverse=True)
    assert (critic.compute(rows)[rows.batch["response_mask"]] > 0).all()
    changed = rows[:1]  # the value of a token does not depend on it
    last = changed.batch["input_ids"].clone()
    last[0, -2] = 3 + (last[0, -2] - 2) % 30  # the third and last of three response tokens; the fourth is padding
    changed.batch["input_ids"] = last
    assert changed.batch["response_mask"][0].tolist() == [True, True, True, False]
    assert torch.equal(critic.compute(changed), critic.compute(rows[:1]))


def test_a_critic_can_start_from_a_separate_model(group, tiny_model):
    own = group(CriticWorker, f"critic.model_path={tiny_model('llama', seed=5)}").workers[0].instance.engine
    shared = group(CriticWorker).workers[0].instance.engine
    name = next(name for name in own.parameters if "q_proj" in name)
    assert not torch.equal(own.parameters[name], shared.parameters[name])


def test_a_background_save_reports_its_files_when_it_is_finished(group, tmp_path):
    critic = group(CriticWorker)
    assert critic.save(str(tmp_path), in_background=True) == [None]
    (saved,) = critic.finish_save()
    assert [file.path for file in saved] == ["critic.safetensors", "critic.json"]
    assert critic.finish_save() == [[]]
    for method in (critic.save, critic.load):
        with pytest.raises(
            CheckpointError, match=r"has no '.*/elsewhere'\. All nodes write into one directory; put trainer"
        ):
            method(str(tmp_path / "elsewhere"))


def test_out_of_memory_at_load_names_role_and_model(group, monkeypatch):
    def load(path, dtype):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(build_model, "load_value_model", load)
    message = r"out of memory in the start of critic, loading '.*': CUDA .*; use more ranks .*memory\.offload"
    with pytest.raises(ModelError, match=message):
        group(CriticWorker)
