"""On-policy distillation: a policy learns from a teacher on responses that it sampled itself."""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hybridflow.algorithms.guards import require_columns, require_mask
from hybridflow.errors import AlgorithmConfigError

SMALLEST_REST = 1e-12
"""Lower bound of the probability of all tokens but the candidates, so that its logarithm is finite."""


@torch.no_grad()
def distillation_advantages(
    *,
    old_log_probs: Float[Tensor, "batch response_len"],
    teacher_log_probs: Float[Tensor, "batch response_len"],
    response_mask: Bool[Tensor, "batch response_len"],
) -> tuple[Float[Tensor, "batch response_len"], Float[Tensor, "batch response_len"]]:
    """Return advantages and returns: log p_teacher - log p_policy of each sampled token, 0 where masked.

    The policy gradient of E[log p_teacher - log p_policy] at each token, without credit for later tokens: reverse KL
    token by token (https://arxiv.org/abs/2306.08543, equation 3; https://arxiv.org/abs/2306.13649, section 3.2).
    """
    require_columns("distillation_advantages", old_log_probs=old_log_probs, teacher_log_probs=teacher_log_probs)
    require_mask("distillation_advantages", "response_mask", response_mask, old_log_probs.shape, like="old_log_probs")
    advantages = torch.where(response_mask, teacher_log_probs - old_log_probs, 0.0)
    return advantages, advantages.clone()


@torch.no_grad()
def no_advantages(
    *, response_mask: Bool[Tensor, "batch response_len"]
) -> tuple[Float[Tensor, "batch response_len"], Float[Tensor, "batch response_len"]]:
    """Return zero advantages and returns: only other parts of the loss have a gradient."""
    zeros = torch.zeros(response_mask.shape, device=response_mask.device)
    return zeros, zeros.clone()


def teacher_kl(
    *,
    candidate_log_probs: Float[Tensor, "batch response_len candidates"],
    teacher_candidate_log_probs: Float[Tensor, "batch response_len candidates"],
    direction: Literal["reverse_kl", "forward_kl"],
) -> Float[Tensor, "batch response_len"]:
    """Return the KL of policy and teacher at each token, over the teacher's candidates and the rest as one outcome.

    forward: sum_j p_teacher log(p_teacher / p_policy), reverse: sum_j p_policy log(p_policy / p_teacher), with j over
    the candidates and the rest. Merging outcomes never increases a KL, so this is a lower bound, 0 where the two
    agree; with the whole vocabulary as candidates it is the KL itself. Differentiable in `candidate_log_probs`
    (https://arxiv.org/abs/2306.13649, equations 2 and 3). Raises AlgorithmError for another direction.
    """
    if direction not in ("reverse_kl", "forward_kl"):
        raise AlgorithmConfigError(f"teacher_kl: direction={direction!r} is not one of reverse_kl, forward_kl.")
    policy, teacher = _with_rest(candidate_log_probs), _with_rest(teacher_candidate_log_probs)
    first, second = (policy, teacher) if direction == "reverse_kl" else (teacher, policy)
    return (first.exp() * (first - second)).sum(-1)


def _with_rest(log_probs: Tensor) -> Tensor:
    """Return the candidates' log-probs with the log-prob of all other tokens appended."""
    rest = 1 - log_probs.exp().sum(-1, keepdim=True)
    return torch.cat([log_probs, rest.clamp(min=SMALLEST_REST).log()], dim=-1)
