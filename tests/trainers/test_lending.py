"""The controller's part of lending (issue 43 removes it): the batch that is put together."""

from types import SimpleNamespace

import pytest
import torch

from hybridflow.config import load_config
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.trainers.begun import Begun
from hybridflow.trainers.lending import Lending

pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("rounds", "lent", "responses"),
    [
        ([[[], [4], [2]], [[1], [], []], [[], [], []]], [[2, 4], [1]], [100, 201, 202, 103, 204]),
        ([[[3], [3], []], [[], [], []]], [[3]], [100, 101, 102, 203, 104]),  # given by two engines
    ],
)
def test_lent_groups_are_in_the_places_of_their_prompts(rounds, lent, responses):
    answers, calls = iter(rounds), []

    def rows_of(rows, origin):
        ids = origin + rows.batch["group_ids"].repeat(2, 1).T.reshape(-1, 1)
        return DataProtoFuture.of(DataProto.from_dict({"responses": ids}))

    def generate(rows):
        calls.append(rows.batch["group_ids"].tolist())
        return rows_of(rows, 200)

    prompts = DataProto.from_dict({"group_ids": torch.arange(5)}, meta_info={"noise_key": [0, 0, 7]})
    rollout = SimpleNamespace(
        give_waiting=lambda batch, share: next(answers),
        mesh=lambda name: SimpleNamespace(axes={"data": 3, "tensor": 1}),
        begin_sequences=SimpleNamespace(remote=DataProtoFuture.of),
        finish_sequences=SimpleNamespace(remote=lambda begun: rows_of(prompts, 100)),
    )
    mesh = SimpleNamespace(axes={"data": 1, "tensor": 1})
    actor = SimpleNamespace(generate_sequences=SimpleNamespace(remote=generate), mesh=lambda name: mesh)
    lend = Lending(load_config(None, ["rollout.group_size=2"]), rollout, actor)  # pyright: ignore
    lendable = lend.begin(prompts)
    done = lend(Begun(7, (lendable.rows,), None, lendable))
    (part,) = done.parts
    assert part.get().batch["responses"].flatten().tolist()[::2] == responses
    assert calls == lent
    assert lend.metrics == {"sampling/lent_groups": float(sum(map(len, lent)))}
    assert lend(done) is done
