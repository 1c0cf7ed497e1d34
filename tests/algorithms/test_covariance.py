import pytest
import torch

from hybridflow.algorithms import covariances, select_clip_cov, select_kl_cov
from hybridflow.errors import AlgorithmError

VALUES = torch.tensor([0.5, 3.0, 7.0, 1.0, 5.0, 2.0], dtype=torch.float64)


def test_covariances_by_hand():
    # log-probs -1, -2, -3 have mean -2; advantages 1, 0, 2 have mean 1
    found = covariances(torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([1.0, 0.0, 2.0]))
    assert found.tolist() == [0.0, 0.0, -1.0]


def test_clip_cov_draws_by_seed_from_tokens_within_the_bounds():
    seen = set()
    for seed in range(40):
        chosen = select_clip_cov(covariances=VALUES, seed=seed, selected_share=0.4)
        assert torch.equal(chosen, select_clip_cov(covariances=VALUES, seed=seed, selected_share=0.4))
        assert chosen.sum() == 2
        assert set(chosen.nonzero()[:, 0].tolist()) <= {1, 3, 4, 5}
        seen |= set(chosen.nonzero()[:, 0].tolist())
    assert seen == {1, 3, 4, 5}


def test_clip_cov_selects_all_if_too_few_are_within_the_bounds():
    chosen = select_clip_cov(covariances=VALUES, seed=0, selected_share=1.0, cov_low=2.5, cov_high=6.0)
    assert chosen.tolist() == [False, True, False, False, True, False]
    assert not select_clip_cov(covariances=VALUES, seed=0, cov_low=8.0, cov_high=9.0).any()


def test_kl_cov_selects_the_largest_and_at_least_one():
    assert select_kl_cov(covariances=VALUES, seed=0, selected_share=0.5).tolist() == [
        False,
        True,
        True,
        False,
        True,
        False,
    ]
    assert select_kl_cov(covariances=VALUES, seed=0).tolist() == [False, False, True, False, False, False]
    assert select_kl_cov(covariances=VALUES[:0], seed=0).tolist() == []


def test_a_share_out_of_range_is_rejected():
    with pytest.raises(AlgorithmError, match=r"selected_share=1\.5"):
        select_kl_cov(covariances=VALUES, seed=0, selected_share=1.5)
