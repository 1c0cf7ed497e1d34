"""The split of prompts over rollout engines by expected lengths, on worker groups of a tiny model."""

import numpy as np
import pytest
import torch

from hybridflow.config import load_config
from hybridflow.controller import ClassWithInitArgs, Dispatch, ResourcePool, WorkerGroup, register
from hybridflow.protocol import DataProto
from hybridflow.trainers.generation_schedule import GenerationSchedule
from hybridflow.workers import ActorRolloutWorker
from hybridflow.workers.generating import ROLLOUT_COLUMNS

EXPECTED = "rollout.schedule=expected"


@pytest.fixture
def build(tiny_model):
    """Return `build(engines, "key=value", ...)`, which returns a schedule and its worker group."""
    threads = torch.get_num_threads()

    def build(engines, *overrides, cls=ActorRolloutWorker):
        defaults = [f"model.path={tiny_model()}", "model.dtype=float64", "rollout.group_size=2", *overrides]
        config = load_config(None, ["controller.threads=1", "data.max_response_length=8", *defaults])
        group = WorkerGroup(
            ResourcePool([engines]),
            ClassWithInitArgs(cls, config=config),
            meshes={"rollout": {"data": engines, "tensor": 1}},
        )
        return GenerationSchedule(config, group), group

    yield build
    torch.set_num_threads(threads)


def prompts(*first_tokens):
    """Return prompts of three tokens, each in a separate group."""
    ids = torch.tensor([[token, 6, 7] for token in first_tokens])
    columns = {"prompts": ids, "prompt_mask": torch.ones_like(ids, dtype=torch.bool)}
    columns["group_ids"] = torch.arange(len(ids))
    sources = np.array(["a"] * len(ids), dtype=object)
    return DataProto.from_dict(columns, {"data_sources": sources}, meta_info={"noise_key": [0, 0, 0]})


def generate(schedule, batch):
    """Return the scheduled prompts and their rollouts."""
    scheduled, engines = schedule.scheduled(batch)
    return scheduled, schedule.generate(scheduled, engines)


def lengths_of(batch, lengths):
    """Return a batch with two responses of the given lengths to each prompt."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    rows = batch.union(DataProto.from_dict({"response_mask": mask}))
    return rows.repeat(2, interleave=True)


def test_even_is_one_call_of_the_group_on_unchanged_prompts(build):
    schedule, group = build(2)
    batch = prompts(5, 8, 9)
    kept, rows = generate(schedule, batch)
    assert kept is batch
    assert schedule.scheduled(batch) == (batch, [])
    assert schedule.note(lengths_of(batch, [1, 2, 3])) == {}
    assert schedule.state_dict() == {}
    whole = group.generate_sequences(batch)
    assert torch.equal(rows.get().batch["rollout_log_probs"], whole.batch["rollout_log_probs"])


@pytest.mark.parametrize("schedule", ["even", "expected"])
def test_a_batch_that_begins_and_is_finished_equals_a_generated_one(build, schedule):
    schedule, _ = build(2, f"rollout.schedule={schedule}")
    schedule.note(lengths_of(prompts(5, 8, 9), [1, 8, 7]))
    others = ("raw_prompts", "prompt_texts", "ground_truths", "extra_infos")
    texts = DataProto.from_dict({}, {name: np.array(["a", "b", "c"], dtype=object) for name in others})
    batch, engines = schedule.scheduled(prompts(5, 8, 9).union(texts))
    whole = schedule.generate(batch, engines).get()
    finish = schedule.begin(batch, engines)
    rows = finish().get()
    for name in ("responses", "rollout_log_probs", "rollout_versions"):
        assert torch.equal(rows.batch[name], whole.batch[name])


def test_without_history_or_with_too_few_prompts_the_group_splits(build):
    schedule, _ = build(3, EXPECTED)
    kept, engines = schedule.scheduled(prompts(5, 8, 9))
    assert engines == []
    assert kept.batch["expected_lengths"].tolist() == [0, 0, 0]
    schedule.note(lengths_of(prompts(5, 8), [4, 2]))
    kept, engines = schedule.scheduled(prompts(5, 8))
    assert engines == []
    assert kept.batch["expected_lengths"].tolist() == [4, 2]


def test_engines_get_equal_tokens_and_longest_prompts_first(build):
    schedule, _ = build(2, EXPECTED)
    batch = prompts(5, 8, 9, 10)
    assert schedule.note(lengths_of(batch, [1, 8, 7, 2])) == {}
    scheduled, engines = schedule.scheduled(prompts(9, 8, 5, 10))
    assert engines == [[1, 2], [0, 3]]  # lengths 8, 1 and 7, 2
    assert scheduled.batch["engine_ids"].tolist() == [1, 0, 0, 1]
    assert scheduled.batch["expected_lengths"].tolist() == [7, 8, 1, 2]
    metrics = schedule.note(lengths_of(scheduled, [7, 8, 2, 2]))
    assert metrics["schedule/length_error"] == pytest.approx(0.25 / 4.75)
    # tokens of a group: 2 (3 + length) = 20, 22, 10, 10; even: 42 and 20; scheduled: 32 and 30
    assert metrics["schedule/imbalance_even"] == pytest.approx(42 / 31 - 1)
    assert metrics["schedule/imbalance"] == pytest.approx(32 / 31 - 1)


def test_scheduled_responses_equal_those_of_the_even_split(build):
    even, _ = build(3)
    scheduled, _ = build(3, EXPECTED)
    batch = prompts(5, 8, 9, 10, 11, 12, 13)
    _, expected = generate(even, batch)
    _, first = generate(scheduled, batch)  # learns
    scheduled.note(batch.repeat(2, interleave=True).union(first))
    kept, second = generate(scheduled, batch)
    assert sorted(set(kept.batch["engine_ids"].tolist())) == [0, 1, 2]
    for rows in (first.get(), second.get()):
        for name in ROLLOUT_COLUMNS:
            if name == "rollout_log_probs":
                torch.testing.assert_close(rows.batch[name], expected.get().batch[name], rtol=1e-12, atol=1e-12)
            elif name in rows.batch:
                assert torch.equal(rows.batch[name], expected.get().batch[name]), name
            else:
                assert rows.non_tensor_batch[name].tolist() == expected.get().non_tensor_batch[name].tolist()


def test_a_restored_schedule_assigns_the_same_prompts(build):
    schedule, _ = build(2, EXPECTED)
    schedule.note(lengths_of(prompts(5, 8, 9, 10), [1, 8, 7, 2]))
    _, engines = schedule.scheduled(prompts(5, 8, 9, 10, 11))
    restored, _ = build(2, EXPECTED)
    restored.load_state_dict(schedule.state_dict())
    assert restored.scheduled(prompts(5, 8, 9, 10, 11))[1] == engines
    assert restored.state_dict()["capacities"] == [1.0, 1.0]
    restored.load_state_dict({})  # a checkpoint that was saved with "even"
    assert restored.scheduled(prompts(5, 8, 9, 10, 11))[1] == engines


class UnequalWorker(ActorRolloutWorker):
    """A worker whose second rank has three times the memory of the first."""

    @register(Dispatch.ONE_TO_ALL)
    def free_cache_bytes(self) -> int:
        return 1000 + 2000 * self.rank


@pytest.mark.parametrize(("deterministic", "sizes"), [("false", [3, 9]), ("true", [6, 6])])
def test_engines_with_more_memory_get_more_unless_deterministic(build, deterministic, sizes):
    schedule, _ = build(2, EXPECTED, f"trainer.deterministic={deterministic}", cls=UnequalWorker)
    schedule.note(lengths_of(prompts(*range(5, 17)), [2] * 12))
    _, engines = schedule.scheduled(prompts(*range(5, 17)))
    assert [len(rows) for rows in engines] == sizes


def test_free_memory_on_a_cpu_is_what_the_configuration_allows(build):
    assert build(2)[1].free_cache_bytes() == [0, 0]
    assert build(2, "rollout.kv_cache_bytes=4096")[1].free_cache_bytes() == [4096, 4096]
