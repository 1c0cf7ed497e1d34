import json
import shutil

import numpy as np
import pytest
import torch

from hybridflow.errors import FieldError, RolloutError
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.workers import ActorRolloutWorker
from hybridflow.workers.generating import DATASET_COLUMNS

ALL = [0, 1, 2, 3]


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
def actors(group):
    """Return a function that builds ranks which generate two responses to a prompt."""

    def build(*changes, **options):
        return group(ActorRolloutWorker, "rollout.group_size=2", "actor.optimizer.lr=1e-2", *changes, **options)

    return build


def in_order(rows):
    return rows.reorder(rows.batch["group_ids"].argsort(stable=True))


def assert_same_rows(found, expected):
    names = ("responses", "response_mask", "input_ids", "attention_mask", "position_ids", "rollout_versions")
    for name in names:
        assert torch.equal(found.batch[name], expected.batch[name]), name
    torch.testing.assert_close(found.batch["rollout_log_probs"], expected.batch["rollout_log_probs"])
    for name in ("solution_texts", "finish_reasons"):
        assert found.non_tensor_batch[name].tolist() == expected.non_tensor_batch[name].tolist()


def assert_log_probs_agree(actor, rows, atol=1e-5):
    computed = actor.compute_log_probs(rows).batch["old_log_probs"]
    torch.testing.assert_close(computed, rows.batch["rollout_log_probs"], atol=atol, rtol=0)


def test_three_ranks_generate_the_same_as_one(actors):
    one, three = (actors(num_workers=count).generate_sequences(FOUR) for count in (1, 3))
    assert len(one) == 8
    assert_same_rows(three, one)
    for rows in (one, three):
        padding = rows.batch["responses"][~rows.batch["response_mask"]]
        assert set(padding.tolist()) <= {rows.meta_info["pad_token_id"]}
    batch = FOUR.repeat(2, interleave=True).union(one).batch
    for name, parts in (("input_ids", ("prompts", "responses")), ("attention_mask", ("prompt_mask", "response_mask"))):
        assert torch.equal(batch[name], torch.cat([batch[part] for part in parts], 1).to(batch[name].dtype))


def test_parts_of_a_batch_hold_the_same_rows_as_the_whole_batch(actors):
    actor = actors()
    whole = actor.generate_sequences(FOUR)
    actor.begin_sequences(FOUR)
    parts = [actor.next_sequences(FOUR[start:end]) for start, end in ((0, 1), (1, 3), (3, 4))]
    assert [len(part) for part in parts] == [2, 4, 2]
    rows, prompts_of_rows = in_order(DataProto.concat(parts)), FOUR.repeat(2, interleave=True)
    assert_same_rows(rows, whole)
    assert rows.non_tensor_batch["ground_truths"].tolist() == prompts_of_rows.non_tensor_batch["ground_truths"].tolist()
    for name in ("prompts", "group_ids"):
        assert torch.equal(rows.batch[name], prompts_of_rows.batch[name])
    with pytest.raises(RolloutError, match="has 0 groups left"):
        actor.next_sequences(FOUR[:1])


def test_replicas_generate_parts_of_their_own(actors):
    actor = actors(num_workers=3)
    whole, parts = actor.generate_sequences(FOUR), []
    for engine, own in zip(actor.replicas("rollout"), [FOUR[:2], FOUR[2:3], FOUR[3:]], strict=True):
        engine.begin_sequences(own)
        parts.append(engine.next_sequences.remote(own))
    rows = in_order(DataProtoFuture.concat(parts).get())
    assert rows.batch["group_ids"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert torch.equal(rows.batch["responses"], whole.batch["responses"])


def test_sampling_log_probs_equal_those_of_the_trainer(actors):
    actor = actors("rollout.temperature=0.7", "model.dtype=float64")
    rows = actor.generate_sequences(FOUR)
    assert rows.batch["rollout_log_probs"].dtype == torch.float64
    assert_log_probs_agree(actor, rows, 1e-12)


def test_sampling_noise_depends_on_key_and_group_not_on_the_batch(actors):
    actor = actors()
    whole = actor.generate_sequences(FOUR).batch["responses"]
    assert torch.equal(actor.generate_sequences(FOUR).batch["responses"], whole)
    half = actor.generate_sequences(FOUR[2:]).batch["responses"]
    assert torch.equal(half, whole[4:, : half.shape[1]])
    other = actor.generate_sequences(prompts([5, 6, 7], noise_key=(0, 0, 1))).batch["responses"]
    assert not torch.equal(other[:, :3], whole[:2, :3])


def test_validation_uses_its_own_temperature_and_group_size(actors):
    actor = actors("validation.group_size=1", "validation.temperature=0")
    rows = actor.generate_validation_sequences(FOUR)
    assert len(rows) == 4
    others = FOUR.select()
    others.meta_info = {"noise_key": [9, 9, 9]}
    assert torch.equal(actor.generate_validation_sequences(others).batch["responses"], rows.batch["responses"])


def test_each_stop_id_of_the_generation_config_stops_a_response(actors, tiny_model, tmp_path):
    shutil.copytree(tiny_model(), tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(20, 24))}))
    rows = actors(f"model.path={tmp_path}/model").generate_sequences(FOUR)
    stops = {1, *range(20, 24)}  # 1 is the tokenizer's stop id
    reasons = rows.non_tensor_batch["finish_reasons"].tolist()
    for tokens, mask, reason in zip(rows.batch["responses"], rows.batch["response_mask"], reasons, strict=True):
        written = tokens[mask].tolist()
        assert reason == ("stop" if written[-1] in stops else "length")
        assert not stops & set(written[:-1])
        assert len(written) == 6 or reason == "stop"
    assert set(reasons) == {"stop", "length"}


def test_an_on_policy_update_has_ratio_one_and_changes_generation(actors, learnable, with_mini_batches):
    actor, mask = actors(), learnable().batch["response_mask"]
    before = actor.compute_log_probs(learnable()).batch["old_log_probs"]
    metrics = actor.update_actor(with_mini_batches(learnable(), ALL)).meta_info["metrics"]
    assert metrics["actor/ppo_kl"] == metrics["actor/clipfrac"] == [0.0]
    # the ratio is 1, so the loss is minus the mean over 10 tokens of their rows' advantages
    assert metrics["actor/loss"] == pytest.approx([-(3 * 1.0 - 1 * 1.0 + 4 * 0.5 - 2 * 0.5) / 10])
    after = actor.compute_log_probs(learnable()).batch["old_log_probs"]
    assert (((after - before) * mask).sum(-1) > 0).tolist() == [True, False, True, False]
    rows = actor.generate_sequences(FOUR)
    assert rows.batch["rollout_versions"][rows.batch["response_mask"]].unique().tolist() == [1]
    assert_log_probs_agree(actor, rows)


def test_each_mini_batch_is_one_step_and_the_last_lr_is_reported(actors, learnable, with_mini_batches):
    actor = actors("actor.epochs=2", "actor.optimizer.warmup_steps=4")
    batch = learnable().union(actor.compute_log_probs(learnable()).select(batch_keys=["old_log_probs"]))
    metrics = actor.update_actor(with_mini_batches(batch, [0, 1], [2, 3], [3, 0])).meta_info["metrics"]
    assert metrics["actor/lr"] == pytest.approx([1e-2 * 3 / 4])
    assert actor.generate_sequences(FOUR).batch["rollout_versions"].max() == 3


def test_the_kl_loss_pulls_towards_the_reference(actors, learnable, with_mini_batches):
    actor = actors("algorithm.kl_in_loss=true")
    with pytest.raises(
        FieldError, match=r"ActorRolloutWorker\.update_actor needs 'ref_log_probs'.*It comes from: reference"
    ):
        actor.update_actor(with_mini_batches(learnable(), ALL))
    batch = learnable((0.0, 0.0, 0.0, 0.0))
    batch.batch["ref_log_probs"] = torch.where(batch.batch["response_mask"], -1.0, 0.0)
    first, second = (
        actor.update_actor(with_mini_batches(batch, ALL, kl_coef=2.0)).meta_info["metrics"] for _ in range(2)
    )
    assert first["actor/loss"] == pytest.approx([2 * first["actor/kl_loss"][0]])
    assert 0 < second["actor/kl_loss"][0] < first["actor/kl_loss"][0]


def test_an_engine_with_weights_of_its_own_frees_them_between_batches(actors):
    actor = actors("lora.rank=2")  # the base model is not the one to generate with
    expected = actor.generate_sequences(FOUR)
    rollout = actor.workers[0].instance.rollout
    assert sum(parameter.untyped_storage().nbytes() for parameter in rollout.model.parameters()) < 1000
    assert_same_rows(actor.generate_sequences(FOUR), expected)


def test_a_step_on_a_device_equals_one_on_the_cpu(actors, learnable, with_mini_batches, simulated_device):
    def run():
        actor = actors("lora.rank=2", "memory.offload={actor_rollout='idle'}")
        results = [actor.generate_sequences(FOUR).batch["responses"]]
        rows = learnable().union(actor.compute_log_probs(learnable()))
        metrics = actor.update_actor(with_mini_batches(rows, ALL)).meta_info["metrics"]
        results.append(actor.generate_sequences(FOUR).batch["responses"])
        results.append(actor.compute_log_probs(rows).batch["old_log_probs"])
        return metrics["actor/grad_norm"], results

    norm, results = run()
    with simulated_device.off():
        expected_norm, expected = run()
    assert norm == pytest.approx(expected_norm, rel=1e-4)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(results[:2], expected[:2], strict=True))
    torch.testing.assert_close(results[2], expected[2], rtol=1e-4, atol=1e-5)
