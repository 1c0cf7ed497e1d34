import math
from itertools import pairwise

import pytest
import torch

from hybridflow.algorithms import (
    candidate_log_probs_from_logits,
    teacher_kl,
    top_log_probs_from_logits,
)


def logs(*probs):
    return torch.tensor([[probs]], dtype=torch.float64).log()


def test_kl_over_candidates_and_the_rest_by_hand():
    # policy 0.5, 0.3 and a rest of 0.2; teacher 0.25, 0.25 and a rest of 0.5
    columns = {"candidate_log_probs": logs(0.5, 0.3), "teacher_candidate_log_probs": logs(0.25, 0.25)}
    reverse = 0.5 * math.log(2) + 0.3 * math.log(1.2) + 0.2 * math.log(0.4)
    forward = 0.25 * math.log(0.5) + 0.25 * math.log(0.25 / 0.3) + 0.5 * math.log(2.5)
    assert teacher_kl(**columns, direction="reverse_kl").tolist() == [[pytest.approx(reverse)]]
    assert teacher_kl(**columns, direction="forward_kl").tolist() == [[pytest.approx(forward)]]


@pytest.mark.parametrize("direction", ["reverse_kl", "forward_kl"])
def test_all_candidates_give_the_exact_kl_and_gradient(direction):
    generator = torch.Generator().manual_seed(0)
    policy, teacher = torch.randn(2, 4, 5, 7, dtype=torch.float64, generator=generator)
    policy.requires_grad_()

    ids, teacher_top = top_log_probs_from_logits(teacher, 7)
    found = teacher_kl(
        candidate_log_probs=candidate_log_probs_from_logits(policy, ids),
        teacher_candidate_log_probs=teacher_top,
        direction=direction,
    )
    p, t = policy.log_softmax(-1), teacher.log_softmax(-1)
    whole = ((p.exp() * (p - t)) if direction == "reverse_kl" else (t.exp() * (t - p))).sum(-1)
    torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-9)
    (grad,) = torch.autograd.grad(found.sum(), policy, retain_graph=True)
    (wanted,) = torch.autograd.grad(whole.sum(), policy)
    torch.testing.assert_close(grad, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("direction", ["reverse_kl", "forward_kl"])
def test_fewer_candidates_never_increase_the_kl(direction):
    generator = torch.Generator().manual_seed(1)
    policy, teacher = torch.randn(2, 20, 1, 9, dtype=torch.float64, generator=generator)

    def kl(k, policy):
        ids, top = top_log_probs_from_logits(teacher, k)
        at = candidate_log_probs_from_logits(policy, ids)
        return teacher_kl(candidate_log_probs=at, teacher_candidate_log_probs=top, direction=direction)

    values = [kl(k, policy) for k in (1, 3, 6, 9)]
    assert all((fewer <= more + 1e-9).all() for fewer, more in pairwise(values))
    assert all((value >= 0).all() for value in values)
    torch.testing.assert_close(kl(3, teacher), torch.zeros(20, 1, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_candidates_with_all_probability_stay_finite(dtype):
    policy = torch.tensor([[[40.0, -40.0, 0.0]]], dtype=dtype, requires_grad=True)
    teacher = torch.tensor([[[-40.0, 40.0, 0.0]]], dtype=dtype)
    for direction in ("reverse_kl", "forward_kl"):
        ids, top = top_log_probs_from_logits(teacher, 2)
        at = candidate_log_probs_from_logits(policy, ids)
        kl = teacher_kl(candidate_log_probs=at, teacher_candidate_log_probs=top, direction=direction)
        (grad,) = torch.autograd.grad(kl.sum(), policy)
        assert torch.isfinite(kl).all()
        assert torch.isfinite(grad).all()
