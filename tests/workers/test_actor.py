"""The selection of tokens of a mini-batch does not depend on the split of its rows over ranks."""

from types import SimpleNamespace

import torch

from hybridflow.algorithms import covariances, select_kl_cov
from hybridflow.config import ActorConfig, Config, DataConfig
from hybridflow.protocol import DataProto
from hybridflow.workers.actor import with_selected_tokens

MASK = torch.tensor([[True, True, False], [True, True, True], [False, False, False], [True, False, False]])
LOG_PROBS = torch.tensor([[-0.1, -2.0, 9.0], [-3.0, -0.2, -1.0], [9.0, 9.0, 9.0], [-0.5, 9.0, 9.0]])
ADVANTAGES = torch.tensor([[1.0], [-1.0], [3.0], [2.0]])
META = {"seed_keys": [0, 5]}


def rows(ids: list[int]) -> DataProto:
    index = torch.tensor(ids)
    return DataProto.from_dict(
        {"row_ids": index, "response_mask": MASK[index], "advantages": ADVANTAGES[index], "values": LOG_PROBS[index]}
    )


def engine(others: list[list[int]]) -> SimpleNamespace:
    """Return an engine with known log-probs; other ranks have the rows `others`."""

    def gather(own):
        def of(ids):
            mask = MASK[ids]
            row, place = mask.nonzero(as_tuple=True)
            return torch.tensor(ids)[row] * 3 + place, LOG_PROBS[ids][mask], ADVANTAGES[ids].expand(mask.shape)[mask]

        return [own, *(of(ids) for ids in others)]

    return SimpleNamespace(forward=lambda rows, temperature: {"log_probs": rows.batch["values"]}, gather=gather)


def config(name: str, **kwargs) -> Config:
    return Config(
        actor=ActorConfig(policy_loss=name, policy_loss_kwargs=kwargs), data=DataConfig(max_response_length=3)
    )


def test_losses_without_selection_leave_rows_unchanged():
    batch = rows([0, 1])
    assert with_selected_tokens(config("ppo"), engine([]), batch, {}, 0) is batch


def test_selection_is_the_same_for_any_split_of_rows():
    chosen = select_kl_cov(
        covariances=covariances(LOG_PROBS[MASK], ADVANTAGES.expand(4, 3)[MASK]), seed=0, selected_share=0.5
    )
    expected = torch.zeros_like(MASK)
    expected[MASK] = chosen
    for own, others in (
        ([0, 1, 2, 3], []),
        ([3, 1, 0, 2], []),
        ([1, 2], [[3, 0]]),
        ([0], [[2], [3, 1]]),
        ([2], [[0, 1, 3]]),
    ):
        done = with_selected_tokens(config("kl-cov", selected_share=0.5), engine(others), rows(own), META, 1)
        assert torch.equal(done.batch["selected_tokens"], expected[own])


def test_random_selection_depends_on_seed_keys_and_optimizer_step():
    how = config("clip-cov", selected_share=0.2, cov_low=-100.0, cov_high=100.0)

    def drawn(meta, number):
        return with_selected_tokens(how, engine([]), rows([0, 1, 2, 3]), meta, number).batch["selected_tokens"].tolist()

    assert drawn(META, 0) == drawn(META, 0)
    assert len({str(drawn({"seed_keys": [0, step]}, number)) for step in range(3) for number in range(3)}) > 3


def test_a_mini_batch_without_tokens_selects_none():
    done = with_selected_tokens(config("kl-cov"), engine([]), rows([2]), META, 0)
    assert not done.batch["selected_tokens"].any()
