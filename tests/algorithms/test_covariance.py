import pytest
import torch

from hybridflow.algorithms import covariances, select_clip_cov, select_kl_cov
from hybridflow.errors import AlgorithmError

VALUES = torch.tensor([0.5, 3.0, 7.0, 1.0, 5.0, 2.0], dtype=torch.float64)


def test_covariances_by_hand():
    # log-probs -1, -2, -3 have mean -2; advantages 1, 0, 2 have mean 1
    found = covariances(torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([1.0, 0.0, 2.0]))
    assert found.tolist() == [0.0, 0.0, -1.0]


def test_clip_cov_draws_from_those_within_the_bounds_by_the_seed_alone():
    seen = set()
    for seed in range(40):
        chosen = select_clip_cov(covariances=VALUES, seed=seed, selected_share=0.4)
        assert torch.equal(chosen, select_clip_cov(covariances=VALUES, seed=seed, selected_share=0.4))
        assert chosen.sum() == 2
        assert set(chosen.nonzero()[:, 0].tolist()) <= {1, 3, 4, 5}
        seen |= set(chosen.nonzero()[:, 0].tolist())
    assert seen == {1, 3, 4, 5}


def test_clip_cov_takes_all_where_fewer_are_within_the_bounds_than_it_may():
    chosen = select_clip_cov(covariances=VALUES, seed=0, selected_share=1.0, cov_low=2.5, cov_high=6.0)
    assert chosen.tolist() == [False, True, False, False, True, False]
    assert not select_clip_cov(covariances=VALUES, seed=0, cov_low=8.0, cov_high=9.0).any()


def test_kl_cov_takes_the_largest_one_at_least():
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


def test_a_share_out_of_range_is_refused():
    with pytest.raises(AlgorithmError, match=r"selected_share=1\.5"):
        select_kl_cov(covariances=VALUES, seed=0, selected_share=1.5)
