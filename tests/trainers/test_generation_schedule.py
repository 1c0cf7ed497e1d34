"""The split of prompts over rollout engines: evenly, or (issue 43 removes it) by expected lengths."""

import numpy as np
import pytest
import torch

from hybridflow.config import load_config
from hybridflow.controller import ClassWithInitArgs, Dispatch, ResourcePool, WorkerGroup, register
from hybridflow.protocol import DataProto
from hybridflow.trainers.generation_schedule import GenerationSchedule
from hybridflow.trainers.length_history import LengthHistory, prompt_keys
from hybridflow.trainers.prompt_assignment import assign_prompts, expected_tokens, prefix_families
from hybridflow.workers import ActorRolloutWorker

EXPECTED = "rollout.schedule=expected"


@pytest.fixture
def build(tiny_model, restores_the_process):
    """Return `build(engines, "key=value", ...)`, which returns a schedule and its worker group."""

    def build(engines, *overrides, cls=ActorRolloutWorker):
        defaults = [f"model.path={tiny_model()}", "model.dtype=float64", "rollout.group_size=2", *overrides]
        config = load_config(None, ["controller.threads=1", "data.max_response_length=8", *defaults])
        meshes = {"rollout": {"data": engines, "tensor": 1}}
        group = WorkerGroup(ResourcePool([engines]), ClassWithInitArgs(cls, config=config), meshes=meshes)
        return GenerationSchedule(config, group), group

    return build


def prompts(*first_tokens):
    ids = torch.tensor([[token, 6, 7] for token in first_tokens])
    columns = {"prompts": ids, "prompt_mask": torch.ones_like(ids, dtype=torch.bool)}
    names = ("data_sources", "raw_prompts", "prompt_texts", "ground_truths", "extra_infos")
    texts = {name: np.array(["a"] * len(ids), dtype=object) for name in names}
    columns["group_ids"] = torch.arange(len(ids))
    return DataProto.from_dict(columns, texts, meta_info={"noise_key": [0, 0, 0]})


def lengths_of(batch, lengths):
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return batch.union(DataProto.from_dict({"response_mask": mask})).repeat(2, interleave=True)


def test_even_is_one_call_of_the_group_on_unchanged_prompts(build):
    schedule, group = build(2)
    batch = prompts(5, 8, 9)
    assert schedule.scheduled(batch) == (batch, [])
    assert schedule.note(lengths_of(batch, [1, 2, 3])) == schedule.state_dict() == {}
    whole = group.generate_sequences(batch).batch
    for rows in (schedule.generate(batch, []), schedule.begin(batch, [])()):
        for name in ("responses", "rollout_log_probs", "rollout_versions"):
            assert torch.equal(rows.get().batch[name], whole[name])


def test_free_memory_on_a_cpu_is_what_the_configuration_allows(build):
    assert build(2)[1].free_cache_bytes() == [0, 0]
    assert build(2, "rollout.kv_cache_bytes=4096")[1].free_cache_bytes() == [4096, 4096]


@pytest.mark.exhaustive
def test_engines_get_equal_tokens_and_longest_prompts_first(build):
    schedule, _ = build(2, EXPECTED)
    batch, engines = schedule.scheduled(prompts(5, 8, 9, 10))  # without history
    assert (engines, batch.batch["expected_lengths"].tolist()) == ([], [0] * 4)
    assert schedule.note(lengths_of(prompts(5, 8, 9, 10), [1, 8, 7, 2])) == {}
    scheduled, engines = schedule.scheduled(prompts(9, 8, 5, 10))
    assert engines == [[1, 2], [0, 3]]  # lengths 8, 1 and 7, 2
    assert scheduled.batch["engine_ids"].tolist() == [1, 0, 0, 1]
    restored, _ = build(2, EXPECTED)
    restored.load_state_dict(schedule.state_dict())
    assert restored.scheduled(prompts(9, 8, 5, 10))[1] == engines
    whole = build(2)[1].generate_sequences(prompts(9, 8, 5, 10)).batch
    for rows in (schedule.generate(scheduled, engines).get(), schedule.begin(scheduled, engines)().get()):
        assert torch.equal(rows.batch["responses"], whole["responses"])
    metrics = schedule.note(lengths_of(scheduled, [7, 8, 2, 2]))
    # tokens of a group: 2 (3 + length) = 20, 22, 10, 10; even: 42 and 20; scheduled: 32 and 30
    assert metrics["schedule/imbalance_even"] == pytest.approx(42 / 31 - 1)
    assert metrics["schedule/imbalance"] == pytest.approx(32 / 31 - 1)


class UnequalWorker(ActorRolloutWorker):
    """A worker whose second rank has three times the memory of the first."""

    @register(Dispatch.ONE_TO_ALL)
    def free_cache_bytes(self) -> int:
        return 1000 + 2000 * self.rank


@pytest.mark.exhaustive
@pytest.mark.parametrize(("deterministic", "sizes"), [("false", [3, 9]), ("true", [6, 6])])
def test_engines_with_more_memory_get_more_unless_deterministic(build, deterministic, sizes):
    schedule, _ = build(2, EXPECTED, f"trainer.deterministic={deterministic}", cls=UnequalWorker)
    schedule.note(lengths_of(prompts(*range(5, 17)), [2] * 12))
    assert [len(rows) for rows in schedule.scheduled(prompts(*range(5, 17)))[1]] == sizes


@pytest.mark.exhaustive
def test_a_prompt_is_expected_as_long_as_its_mean_its_source_or_all():
    history, restored = LengthHistory(), LengthHistory()
    history.note([1, 2, 3], ["a", "a", "b"], [10.0, 30.0, 80.0])
    restored.load_state_dict(history.state_dict())
    assert restored.expected([2, 8, 9, 10], ["a", "a", "b", "c"]).tolist() == [30, 20, 80, 40]
    history.note([1], ["a"], [20.0])
    assert history.expected([1], ["a"]).tolist() == [15]
    ids, mask = torch.tensor([[0, 5, 6], [5, 6, 0], [0, 5, 6]]), torch.tensor([[0, 1, 1], [1, 1, 0], [0, 1, 1]])
    first, shifted, other_source = prompt_keys(ids, mask, ["a", "a", "b"])
    assert first == shifted == -6841353820572609803 != other_source  # the same in every process


@pytest.mark.exhaustive
def test_prompts_are_assigned_by_load_capacity_and_family():
    # 9 -> a, 7 -> b, 6 -> b (13 < 15), 4 -> a (13 < 17), 2 -> a (15, as b; a comes first), 1 -> b
    assert assign_prompts([4, 7, 9, 1, 6, 2], range(6), [1, 1]) == [[2, 0, 5], [1, 4, 3]]
    assert assign_prompts([5, 4, 3], range(3), [1, 1000, 1]) == [[2], [0], [1]]
    assert assign_prompts([3, 2, 2], [0, 0, 1], [1, 1]) == [[0], [1, 2]]  # together: 5 and 2
    assert expected_tokens(np.array([2, 3]), np.array([5.0, 1.5]), 4).tolist() == [28, 18]
    first, second, third, fourth = prefix_families([[1, 2, 3, 4], [5, 6], [1, 2, 8, 9], [1, 7, 7, 7]])
    assert first == third
    assert len({first, second, fourth}) == 3
