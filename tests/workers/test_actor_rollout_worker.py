import json
import shutil

import numpy as np
import pytest
import torch

from hybridflow.errors import FieldError, RolloutConfigError, RolloutError, WorkerError
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.rollout import EmbeddedRollout
from hybridflow.workers import ActorRolloutWorker
from hybridflow.workers.generating import DATASET_COLUMNS

GROUPS = ["rollout.group_size=2", "actor.optimizer.lr=1e-2"]


def prompts(*rows, noise_key=(0, 0, 0)):
    """Return left-padded prompts of these tokens, each in a separate group."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows])
    columns = {"prompts": ids, "prompt_mask": mask, "group_ids": torch.arange(len(rows))}
    others = [name for name in DATASET_COLUMNS if name not in columns]
    texts = {name: np.array([f"{name} {row}" for row in range(len(rows))], dtype=object) for name in others}
    return DataProto.from_dict(columns, texts, meta_info={"noise_key": list(noise_key)})


FOUR = prompts([5, 6, 7], [8], [9, 10], [11, 12, 13])


@pytest.fixture
def learnable(rollout_rows):
    """Return a function that builds four rows with the columns of an on-policy update."""

    def build(advantages=(1.0, -1.0, 0.5, -0.5)):
        rows = rollout_rows([2, 3, 1, 2], [3, 1, 4, 2])
        zeros = torch.zeros(rows.batch["response_mask"].shape)
        return rows.union(
            DataProto.from_dict({"advantages": torch.tensor(advantages)[:, None], "rollout_log_probs": zeros})
        )

    return build


def test_three_ranks_generate_the_same_as_one(group):
    one = group(ActorRolloutWorker, *GROUPS).generate_sequences(FOUR)
    three = group(ActorRolloutWorker, *GROUPS, num_workers=3).generate_sequences(FOUR)
    assert len(one) == 8
    for name in ("responses", "response_mask", "input_ids", "attention_mask", "position_ids", "rollout_versions"):
        assert torch.equal(one.batch[name], three.batch[name]), name
    torch.testing.assert_close(one.batch["rollout_log_probs"], three.batch["rollout_log_probs"])
    for name in ("solution_texts", "finish_reasons"):
        assert one.non_tensor_batch[name].tolist() == three.non_tensor_batch[name].tolist()


def test_parts_of_a_batch_hold_the_same_rows_as_the_whole_batch(group):
    actor = group(ActorRolloutWorker, *GROUPS)
    whole = actor.generate_sequences(FOUR)
    actor.begin_sequences(FOUR)
    parts = [actor.next_sequences(FOUR[start:end]) for start, end in ((0, 1), (1, 3), (3, 4))]
    assert [len(part) for part in parts] == [2, 4, 2]
    rows = DataProto.concat(parts)
    assert sorted(rows.batch["group_ids"].tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]
    rows = rows.reorder(rows.batch["group_ids"].argsort(stable=True))
    for name in ("responses", "response_mask", "input_ids", "attention_mask", "rollout_versions"):
        assert torch.equal(rows.batch[name], whole.batch[name]), name
    assert rows.non_tensor_batch["solution_texts"].tolist() == whole.non_tensor_batch["solution_texts"].tolist()
    prompts_of_rows = FOUR.repeat(2, interleave=True)
    assert rows.non_tensor_batch["ground_truths"].tolist() == prompts_of_rows.non_tensor_batch["ground_truths"].tolist()
    assert torch.equal(rows.batch["prompts"], prompts_of_rows.batch["prompts"])
    with pytest.raises(RolloutError, match="has 0 groups left"):
        actor.next_sequences(FOUR[:1])


def test_replicas_generate_parts_of_their_own(group):
    actor = group(ActorRolloutWorker, *GROUPS, num_workers=3)
    whole, parts = actor.generate_sequences(FOUR), []
    engines = actor.replicas("rollout")
    places = [FOUR[:2], FOUR[2:3], FOUR[3:]]
    for engine, own in zip(engines, places, strict=True):
        engine.begin_sequences(own)
        parts.append(engine.next_sequences.remote(own))
    rows = DataProtoFuture.concat(parts).get()
    assert torch.equal(rows.batch["group_ids"].sort().values, torch.arange(4).repeat_interleave(2))
    rows = rows.reorder(rows.batch["group_ids"].argsort(stable=True))
    assert torch.equal(rows.batch["responses"], whole.batch["responses"])


def test_three_ranks_compute_the_same_log_probs_as_one(group, rollout_rows):
    rows = rollout_rows([2, 3, 1, 2], [3, 1, 4, 2])
    one = group(ActorRolloutWorker).compute_log_probs(rows)
    three = group(ActorRolloutWorker, num_workers=3).compute_log_probs(rows)
    for name in ("old_log_probs", "entropies"):
        torch.testing.assert_close(one.batch[name], three.batch[name])
        assert (one.batch[name][~rows.batch["response_mask"]] == 0).all()


def test_input_ids_are_the_prompt_and_its_response(group):
    rows = group(ActorRolloutWorker, *GROUPS).generate_sequences(FOUR)
    batch = FOUR.repeat(2, interleave=True).union(rows).batch
    assert torch.equal(batch["input_ids"][:, :3], batch["prompts"])
    assert torch.equal(batch["input_ids"][:, 3:], batch["responses"])
    assert torch.equal(batch["attention_mask"][:, :3].bool(), batch["prompt_mask"])
    assert torch.equal(batch["attention_mask"][:, 3:].bool(), batch["response_mask"])


def test_sampling_log_probs_equal_those_of_the_trainer(group):
    actor = group(ActorRolloutWorker, *GROUPS, "rollout.temperature=0.7")
    rows = actor.generate_sequences(FOUR)
    computed = actor.compute_log_probs(rows).batch["old_log_probs"]
    torch.testing.assert_close(computed, rows.batch["rollout_log_probs"], atol=1e-5, rtol=0)


def test_generation_as_on_a_gpu_gives_the_same_tokens(group, monkeypatch):
    expected = group(ActorRolloutWorker, *GROUPS).generate_sequences(FOUR)
    monkeypatch.setattr(EmbeddedRollout, "_is_paged", lambda self: True)
    rows = group(ActorRolloutWorker, *GROUPS).generate_sequences(FOUR)
    assert torch.equal(rows.batch["responses"], expected.batch["responses"])
    torch.testing.assert_close(rows.batch["rollout_log_probs"], expected.batch["rollout_log_probs"], atol=1e-5, rtol=0)
    with pytest.raises(RolloutConfigError, match=r"raise rollout\.kv_cache_bytes=4096 "):
        group(ActorRolloutWorker, *GROUPS, "rollout.kv_cache_bytes=4096").generate_sequences(FOUR)


def test_sampling_noise_depends_on_key_and_group_not_on_the_batch(group):
    actor = group(ActorRolloutWorker, *GROUPS)
    whole = actor.generate_sequences(FOUR).batch["responses"]
    assert torch.equal(actor.generate_sequences(FOUR).batch["responses"], whole)
    half = actor.generate_sequences(FOUR[2:]).batch["responses"]
    assert torch.equal(half, whole[4:, : half.shape[1]])
    other = actor.generate_sequences(prompts([5, 6, 7], noise_key=(0, 0, 1))).batch["responses"]
    assert not torch.equal(other[:, :3], whole[:2, :3])


def test_validation_uses_its_own_temperature_and_group_size(group):
    actor = group(ActorRolloutWorker, *GROUPS, "validation.group_size=1", "validation.temperature=0")
    rows = actor.generate_validation_sequences(FOUR)
    assert len(rows) == 4
    others = prompts([5, 6, 7], [8], [9, 10], [11, 12, 13], noise_key=(9, 9, 9))
    assert torch.equal(actor.generate_validation_sequences(others).batch["responses"], rows.batch["responses"])


def test_each_stop_id_of_the_generation_config_stops_a_response(group, tiny_model, tmp_path):
    shutil.copytree(tiny_model(), tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(20, 24))}))
    rows = group(ActorRolloutWorker, *GROUPS, f"model.path={tmp_path}/model").generate_sequences(FOUR)
    stops = {1, *range(20, 24)}  # 1 is the tokenizer's stop id
    reasons = rows.non_tensor_batch["finish_reasons"].tolist()
    for tokens, mask, reason in zip(rows.batch["responses"], rows.batch["response_mask"], reasons, strict=True):
        written = tokens[mask].tolist()
        assert reason == ("stop" if written[-1] in stops else "length")
        assert not stops & set(written[:-1])
        assert len(written) == 6 or reason == "stop"
    assert set(reasons) == {"stop", "length"}


def test_an_on_policy_update_has_ratio_one_and_changes_generation(group, learnable, with_mini_batches):
    actor = group(ActorRolloutWorker, *GROUPS)
    before = actor.compute_log_probs(learnable()).batch["old_log_probs"]
    metrics = actor.update_actor(with_mini_batches(learnable(), [0, 1, 2, 3])).meta_info["metrics"]
    assert metrics["actor/ppo_kl"] == [0.0]
    assert metrics["actor/clipfrac"] == [0.0]
    # the ratio is 1, so the loss is minus the mean over 10 tokens of their rows' advantages
    assert metrics["actor/loss"] == pytest.approx([-(3 * 1.0 - 1 * 1.0 + 4 * 0.5 - 2 * 0.5) / 10])

    after = actor.compute_log_probs(learnable()).batch["old_log_probs"]
    better = ((after - before) * learnable().batch["response_mask"]).sum(-1)
    assert [float(change) > 0 for change in better] == [True, False, True, False]

    rows = actor.generate_sequences(FOUR)
    assert rows.batch["rollout_versions"][rows.batch["response_mask"]].unique().tolist() == [1]
    computed = actor.compute_log_probs(rows).batch["old_log_probs"]
    torch.testing.assert_close(computed, rows.batch["rollout_log_probs"], atol=1e-5, rtol=0)


def test_each_mini_batch_is_one_step_and_the_last_lr_is_reported(group, learnable, with_mini_batches):
    changes = [*GROUPS, "actor.epochs=2", "actor.optimizer.warmup_steps=4"]
    actor = group(ActorRolloutWorker, *changes)
    batch = learnable().union(actor.compute_log_probs(learnable()).select(batch_keys=["old_log_probs"]))
    metrics = actor.update_actor(with_mini_batches(batch, [0, 1], [2, 3], [3, 0])).meta_info["metrics"]
    assert metrics["actor/lr"] == pytest.approx([1e-2 * 3 / 4])
    versions = actor.generate_sequences(FOUR).batch["rollout_versions"]
    assert versions.max() == 3


def test_padded_copies_do_not_change_an_update(group, learnable, with_mini_batches):
    def weights_after(batch):
        actor = group(ActorRolloutWorker, *GROUPS)
        actor.update_actor(with_mini_batches(batch, [0, 1, 2, 3]))
        return actor.compute_log_probs(learnable()).batch["old_log_probs"]

    rows = learnable()
    copies = rows[:2]
    copies.batch["row_ids"] = torch.tensor([-1, -1])
    assert torch.equal(weights_after(DataProto.concat([rows, copies])), weights_after(rows))


def test_the_kl_loss_pulls_towards_the_reference(group, learnable, with_mini_batches):
    actor = group(ActorRolloutWorker, *GROUPS, "algorithm.kl_in_loss=true")
    mask = learnable().batch["response_mask"]
    reference = torch.where(mask, -1.0, 0.0)
    batch = learnable((0.0, 0.0, 0.0, 0.0)).union(DataProto.from_dict({"ref_log_probs": reference}))
    first = actor.update_actor(with_mini_batches(batch, [0, 1, 2, 3], kl_coef=2.0)).meta_info["metrics"]
    second = actor.update_actor(with_mini_batches(batch, [0, 1, 2, 3], kl_coef=2.0)).meta_info["metrics"]
    assert first["actor/loss"] == pytest.approx([2 * first["actor/kl_loss"][0]])
    assert 0 < second["actor/kl_loss"][0] < first["actor/kl_loss"][0]


def test_error_for_a_missing_column_names_its_producer(group, learnable, with_mini_batches):
    actor = group(ActorRolloutWorker, *GROUPS, "algorithm.kl_in_loss=true")
    with pytest.raises(
        FieldError, match=r"ActorRolloutWorker\.update_actor needs 'ref_log_probs'.*It comes from: reference"
    ):
        actor.update_actor(with_mini_batches(learnable(), [0, 1, 2, 3]))


def test_an_update_on_ranks_that_take_turns_raises(group, learnable, with_mini_batches):
    actor = group(ActorRolloutWorker, *GROUPS, num_workers=2)
    with pytest.raises(WorkerError, match=r"needs a collective over its 2 ranks \(sum gradients\)"):
        actor.update_actor(with_mini_batches(learnable(), [0, 1, 2, 3]))


def test_save_and_load_restore_weights_and_optimizer(group, learnable, with_mini_batches, tmp_path):
    actor = group(ActorRolloutWorker, *GROUPS)
    update = with_mini_batches(learnable(), [0, 1, 2, 3])
    actor.update_actor(update)
    actor.save(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["actor.json", "actor.safetensors"]

    other = group(ActorRolloutWorker, *GROUPS, num_workers=2)
    other.load(str(tmp_path))
    rows, others = actor.generate_sequences(FOUR), other.generate_sequences(FOUR)
    assert torch.equal(rows.batch["responses"], others.batch["responses"])
    assert torch.equal(rows.batch["rollout_versions"], others.batch["rollout_versions"])

    third = group(ActorRolloutWorker, *GROUPS)
    third.load(str(tmp_path))
    assert actor.update_actor(update).meta_info == third.update_actor(update).meta_info
    assert torch.equal(*(worker.compute_log_probs(learnable()).batch["old_log_probs"] for worker in (actor, third)))


def test_rollout_log_probs_keep_the_precision_of_the_model(group):
    single, double = group(ActorRolloutWorker, *GROUPS), group(ActorRolloutWorker, *GROUPS, "model.dtype=float64")
    assert single.generate_sequences(FOUR).batch["rollout_log_probs"].dtype == torch.float32
    rollouts = double.generate_sequences(FOUR)
    recomputed = double.compute_log_probs(rollouts).batch["old_log_probs"]
    assert rollouts.batch["rollout_log_probs"].dtype == torch.float64
    mask = rollouts.batch["response_mask"]
    assert (rollouts.batch["rollout_log_probs"] - recomputed)[mask].abs().max() < 1e-6


def test_padding_token_is_the_same_on_any_number_of_ranks(group):
    for num_workers in (1, 3):
        rollouts = group(ActorRolloutWorker, *GROUPS, num_workers=num_workers).generate_sequences(FOUR)
        padding = rollouts.batch["responses"][~rollouts.batch["response_mask"]]
        assert set(padding.tolist()) <= {rollouts.meta_info["pad_token_id"]}


@pytest.mark.parametrize("adapters", [0, 2])
@pytest.mark.parametrize("offload", ["", "memory.offload={actor_rollout='idle'}"])
def test_a_step_on_a_device_equals_one_on_the_cpu(
    group, learnable, with_mini_batches, simulated_device, adapters, offload
):
    def run():
        actor = group(ActorRolloutWorker, *GROUPS, f"lora.rank={adapters}", *filter(None, [offload]))
        results = [actor.generate_sequences(FOUR).batch["responses"]]
        rows = learnable().union(actor.compute_log_probs(learnable()))
        metrics = actor.update_actor(with_mini_batches(rows, [0, 1, 2, 3])).meta_info["metrics"]
        results.append(actor.generate_sequences(FOUR).batch["responses"])
        results.append(actor.compute_log_probs(rows).batch["old_log_probs"])
        return metrics["actor/grad_norm"], results

    norm, results = run()
    with simulated_device.off():
        expected_norm, expected = run()
    assert norm == pytest.approx(expected_norm, rel=1e-4)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(results[:2], expected[:2], strict=True))
    torch.testing.assert_close(results[2], expected[2], rtol=1e-4, atol=1e-5)
