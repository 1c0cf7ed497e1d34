"""The controller's part of lending: which groups training ranks take, and the batch that is put together."""

from types import SimpleNamespace

import pytest
import torch

from hybridflow.config import load_config
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.trainers.begun import Begun
from hybridflow.trainers.lending import Lending

OWN, LENT = 100, 200
"""Added to the id of a group in the responses of the engines, and of the training ranks."""


def rows_of(prompts, origin):
    return DataProtoFuture.of(
        DataProto.from_dict({"responses": origin + prompts.batch["group_ids"].repeat(2, 1).T.reshape(-1, 1)})
    )


@pytest.fixture
def lending():
    """Return a function that builds a batch of 5 prompts on 3 engines that give up groups, and lends 1 rank to it."""

    def build(*rounds):
        answers, calls = iter(rounds), []

        def give_waiting(batch, share):
            calls.append(("ask", batch, share))
            return next(answers)

        def generate(prompts):
            calls.append(("lend", prompts.batch["group_ids"].tolist()))
            return rows_of(prompts, LENT)

        mesh = [SimpleNamespace(axes={"data": ranks, "tensor": 1}) for ranks in (1, 3)]
        rollout = SimpleNamespace(
            give_waiting=give_waiting,
            mesh=lambda name: mesh[1],
            begin_sequences=SimpleNamespace(remote=DataProtoFuture.of),
            finish_sequences=SimpleNamespace(remote=lambda begun: rows_of(prompts, OWN)),
        )
        actor = SimpleNamespace(generate_sequences=SimpleNamespace(remote=generate), mesh=lambda name: mesh[0])
        prompts = DataProto.from_dict({"group_ids": torch.arange(5)}, meta_info={"noise_key": [0, 0, 7]})
        lend = Lending(load_config(None, ["rollout.group_size=2"]), rollout, actor)  # pyright: ignore
        lendable = lend.begin(prompts)
        return lend, Begun(7, (lendable.rows,), None, lendable), calls

    return build


def columns_of(begun):
    (part,) = begun.parts
    columns = part.get().batch
    return columns["group_ids"].tolist(), columns["responses"].flatten().tolist()


def test_lent_groups_are_in_the_places_of_their_prompts(lending):
    lend, begun, calls = lending([[], [4], [2]], [[1], [], []], [[], [], []])
    done = lend(begun)
    groups, responses = columns_of(done)
    assert groups == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert responses == [100, 100, 201, 201, 202, 202, 103, 103, 204, 204]
    ask = ("ask", [0, 0, 7], 1 / 8)  # half of the share of 1 of 4 ranks
    assert calls == [ask, ("lend", [2, 4]), ask, ("lend", [1]), ask]
    assert lend.metrics == {"sampling/lent_groups": 3.0}
    assert lend(done) is done  # completed: no engine is asked again
    assert len(calls) == 5
    assert lend.metrics == {"sampling/lent_groups": 3.0}


def test_without_waiting_groups_the_batch_is_that_of_the_engines(lending):
    lend, begun, _ = lending([[], [], []])
    done = lend(begun)
    assert done.parts == begun.parts
    assert lend.metrics == {"sampling/lent_groups": 0.0}


def test_a_group_given_by_two_engines_is_lent_once(lending):
    lend, begun, calls = lending([[3], [3], []], [[3], [], []], [[], [], []])
    assert columns_of(lend(begun))[1] == [100, 100, 101, 101, 102, 102, 203, 203, 104, 104]
    assert [call[1] for call in calls if call[0] == "lend"] == [[3]]


def test_a_restored_batch_is_not_lent(lending):
    lend, _, calls = lending()
    restored = Begun(7, (DataProtoFuture.of(DataProto.from_dict({"responses": torch.zeros(2, 1)})),))
    assert lend(restored) is restored
    assert calls == []
    assert lend.metrics == {"sampling/lent_groups": 0.0}
