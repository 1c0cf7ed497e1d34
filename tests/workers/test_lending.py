"""Both sides of lending (issue 43 removes it): a worker that gives up groups, and one that generates them."""

import pytest
import torch

from hybridflow.protocol import DataProto
from hybridflow.weight_sync import WeightReceiver, WeightSender
from hybridflow.workers import GivingWorker, InFlightGivingWorker, LendingActorWorker

pytestmark = pytest.mark.exhaustive
KEY = [0, 0, 3]


def prompts_of(size: int) -> DataProto:
    ids = torch.tensor([[5, 6, 7 + i] for i in range(size)])
    columns = {"prompts": ids, "prompt_mask": torch.ones_like(ids, dtype=torch.bool)}
    return DataProto.from_dict(columns | {"group_ids": 10 + torch.arange(size)}, meta_info={"noise_key": KEY})


@pytest.fixture
def pair(configure):
    """Return a function that builds both workers, with equal weights and memory for one group of two sequences."""

    def build(cls, *more):
        common = ["model.dtype=float64", "data.max_response_length=24", "rollout.group_size=2"]
        config = configure(*common, "rollout.max_running_sequences=2", *more)
        learner, engine = LendingActorWorker(config), cls(config)
        send, receive = learner.send_weights, engine.receive_weights
        announced = send(WeightSender.announce)
        receive(WeightReceiver.start, announced)
        for _ in range(announced.num_buckets):
            receive(WeightReceiver.receive, send(WeightSender.send))
        receive(WeightReceiver.finish)
        receive(WeightReceiver.check, send(WeightSender.compute_probe))
        return learner, engine

    return build


def begin(engine, prompts):
    begun = engine.begin_sequences(prompts)
    begun.meta_info |= prompts.meta_info
    return begun


IN_FLIGHT = ("trainer.lag=1", "algorithm.rollout_weights=token", "rollout.on_new_weights=keep-kv")


@pytest.mark.parametrize(("cls", "more"), [(GivingWorker, ()), (InFlightGivingWorker, IN_FLIGHT)])
def test_the_learner_generates_given_groups_with_the_same_tokens(pair, cls, more):
    learner, engine = pair(cls, *more)
    prompts = prompts_of(5)
    alone = engine.finish_sequences(begin(engine, prompts))
    begun = begin(engine, prompts)
    engine.take_schedule()
    assert engine.give_waiting(KEY, 0.5) == [13, 14]  # one group runs, four wait
    assert engine.give_waiting(KEY, 0.5) == [12]
    rows = engine.finish_sequences(begun)
    assert engine.give_waiting(KEY, 0.5) == []
    assert rows.non_tensor_batch["finish_reasons"][4:].tolist() == ["abort"] * 6
    assert rows.batch["response_mask"].sum(1).tolist()[4:] == [0] * 6
    lent = learner.generate_sequences(prompts.select_idxs([2, 3, 4]))
    for found, first in ((rows.slice(0, 4), 0), (lent, 4)):
        width = found.batch["responses"].shape[1]
        expected = alone.slice(first, first + len(found)).batch
        for name in ("responses", "response_mask", "rollout_log_probs", "rollout_versions"):
            assert torch.equal(found.batch[name], expected[name][:, :width]), name
        assert not expected["response_mask"][:, width:].any()
    events = [(row["event"], row["number"], row.get("groups")) for row in engine.take_schedule()]
    assert events == [("give", 3, [13, 14]), ("give", 3, [12])]


def test_groups_that_fit_in_memory_or_have_not_begun_are_not_given(pair):
    _, engine = pair(GivingWorker, "rollout.max_running_sequences=64")
    assert engine.give_waiting(KEY, 1.0) == []
    begun = begin(engine, prompts_of(5))
    assert engine.give_waiting(KEY, 1.0) == []
    assert engine.finish_sequences(begun).batch["response_mask"].any(1).all()
