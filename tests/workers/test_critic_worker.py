import pytest
import torch

from hybridflow.checkpoint import saved_files
from hybridflow.engines import torch_engine
from hybridflow.errors import CheckpointError, ModelError, WorkerError
from hybridflow.protocol import DataProto
from hybridflow.workers import CriticWorker


@pytest.fixture
def trained(group, rollout_rows, with_mini_batches):
    """Return a critic after some steps towards returns of 1, and its rows."""
    rows = rollout_rows([2, 3, 1, 2], [3, 1, 4, 2])
    critic = group(CriticWorker, "critic.optimizer.lr=1e-2", "critic.value_clip=10")
    shape = rows.batch["response_mask"].shape
    losses = []
    for _ in range(5):
        batch = rows.union(critic.compute_values(rows)).union(DataProto.from_dict({"returns": torch.ones(shape)}))
        metrics = critic.update_critic(with_mini_batches(batch, [0, 1, 2, 3])).meta_info["metrics"]
        losses += metrics["critic/loss"]
    return critic, rows, losses


def test_a_new_critic_computes_value_zero(group, rollout_rows):
    values = group(CriticWorker).compute_values(rollout_rows([2, 1], [3, 2])).batch["values"]
    assert values.tolist() == [[0.0] * 3] * 2


def test_the_critic_learns_returns_and_saves_its_weights(trained, group, tmp_path):
    critic, rows, losses = trained
    assert losses[0] == pytest.approx(0.5)  # (0 - 1)^2 / 2
    assert losses == sorted(losses, reverse=True)
    (saved,) = critic.save(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["critic.json", "critic.safetensors"]
    assert sorted(saved) == sorted(saved_files(tmp_path, tmp_path.iterdir()))
    three = group(CriticWorker, num_workers=3)
    three.load(str(tmp_path))
    one_rank, three_ranks = (worker.compute_values(rows).batch["values"] for worker in (critic, three))
    torch.testing.assert_close(one_rank, three_ranks)
    mask = rows.batch["response_mask"]
    assert (one_rank[mask] > 0).all()
    assert (one_rank[~mask] == 0).all()


def test_the_value_of_a_token_does_not_depend_on_it(trained):
    critic, rows, _ = trained
    changed = rows[:1]
    last = changed.batch["input_ids"].clone()
    last[0, -2] = 3 + (last[0, -2] - 2) % 30  # the third and last of three response tokens; the fourth is padding
    changed.batch["input_ids"] = last
    assert changed.batch["response_mask"][0].tolist() == [True, True, True, False]
    assert torch.equal(critic.compute_values(changed).batch["values"], critic.compute_values(rows[:1]).batch["values"])


def test_the_critic_can_start_from_a_separate_model(group, tiny_model):
    own = group(CriticWorker, f"critic.model_path={tiny_model('llama', seed=5)}").workers[0].instance.engine
    shared = group(CriticWorker).workers[0].instance.engine
    name = next(name for name in own.parameters if "q_proj" in name)
    assert not torch.equal(own.parameters[name], shared.parameters[name])


def test_an_update_on_ranks_that_take_turns_raises(trained, group, with_mini_batches):
    critic, rows, _ = trained
    batch = rows.union(critic.compute_values(rows))
    batch = batch.union(DataProto.from_dict({"returns": batch.batch["values"].clone()}))
    with pytest.raises(WorkerError, match=r"needs a collective over its 2 ranks \(sum gradients\)"):
        group(CriticWorker, num_workers=2).update_critic(with_mini_batches(batch, [0, 1, 2, 3]))


@pytest.mark.parametrize("method", ["save", "load"])
def test_a_directory_that_this_node_does_not_have_is_an_error(group, tmp_path, method):
    with pytest.raises(
        CheckpointError, match=r"has no '.*/elsewhere'\. All nodes write into one directory; put trainer"
    ):
        getattr(group(CriticWorker), method)(str(tmp_path / "elsewhere"))


def test_a_background_save_reports_its_files_when_it_is_finished(group, tmp_path):
    critic = group(CriticWorker)
    assert critic.save(str(tmp_path), in_background=True) == [None]
    (saved,) = critic.finish_save()
    assert [file.path for file in saved] == ["critic.safetensors", "critic.json"]
    assert critic.finish_save() == [[]]


def test_out_of_memory_at_load_names_role_and_model(group, monkeypatch):
    def load(path, dtype):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(torch_engine, "load_value_model", load)
    message = r"out of memory in the start of critic, loading '.*': CUDA .*; use more ranks .*memory\.offload"
    with pytest.raises(ModelError, match=message):
        group(CriticWorker)
