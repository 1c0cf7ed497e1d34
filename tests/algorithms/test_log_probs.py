import math
import random
from inspect import unwrap

import pytest
import torch
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from hybridflow.algorithms import (
    entropy_from_logits,
    log_probs_and_entropy_from_logits,
    log_probs_from_logits,
    sum_squared_probs_from_logits,
)
from hybridflow.errors import AlgorithmError

INF = float("inf")


def reference_log_prob_and_entropy(logits: list[float], label: int, temperature: float) -> tuple[float, float]:
    """Compute softmax by its definition."""
    top = max(logits)
    weights = [math.exp((logit - top) / temperature) for logit in logits]
    total = math.fsum(weights)
    entropy = -math.fsum(w / total * math.log(w / total) for w in weights if w > 0)
    return math.log(weights[label] / total), entropy


def test_log_probs_of_odds_one_to_two_to_five():
    logits = torch.tensor([[1.0, 2.0, 5.0], [5.0, 2.0, 1.0]]).log()
    log_probs = log_probs_from_logits(logits, torch.tensor([2, 1]))
    assert log_probs.tolist() == pytest.approx([math.log(5 / 8), math.log(1 / 4)], rel=1e-6)


def test_entropy_of_fair_choices():
    logits = torch.tensor([[0.0, 0.0, -INF, -INF], [3.0, 3.0, 3.0, 3.0]])
    assert entropy_from_logits(logits).tolist() == pytest.approx([math.log(2), math.log(4)], rel=1e-6)


def test_entropy_of_a_certain_choice_is_zero():
    logits = torch.tensor([[0.0, -INF, -INF]])
    assert entropy_from_logits(logits).tolist() == [0]


def test_temperature_divides_the_logits():
    logits = torch.tensor([[0.0, math.log(16)]])
    log_probs, entropies = log_probs_and_entropy_from_logits(logits, torch.tensor([1]), temperature=2.0)
    assert log_probs.item() == pytest.approx(math.log(4 / 5), rel=1e-6)
    assert entropies.item() == pytest.approx(-(0.8 * math.log(0.8) + 0.2 * math.log(0.2)), rel=1e-6)


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_equals_the_scalar_reference_for_any_chunk_size(chunk_size, temperature):
    rng = random.Random(chunk_size)
    for _ in range(50):
        vocab, rows = rng.randint(1, 9), rng.randint(1, 4)
        scale = rng.choice([0.1, 3.0, 100.0])
        logits = [[rng.gauss(0, scale) for _ in range(vocab)] for _ in range(rows)]
        labels = [rng.randrange(vocab) for _ in range(rows)]
        log_probs, entropies = log_probs_and_entropy_from_logits(
            torch.tensor(logits, dtype=torch.float64),
            torch.tensor(labels),
            temperature=temperature,
            chunk_size=chunk_size,
        )
        for row in range(rows):
            if scale == 100.0:  # the definition underflows where the streamed one does not
                assert math.isfinite(log_probs[row])
                continue
            log_prob, entropy = reference_log_prob_and_entropy(logits[row], labels[row], temperature)
            assert log_probs[row].item() == pytest.approx(log_prob, rel=1e-12, abs=1e-12)
            assert entropies[row].item() == pytest.approx(entropy, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("chunk_size", [2, 5, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradients_equal_finite_differences(chunk_size, temperature):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 7, dtype=torch.float64, generator=generator).requires_grad_()
    labels = torch.randint(0, 7, (2, 3), generator=generator)
    settings = {"temperature": temperature, "chunk_size": chunk_size}
    assert gradcheck(lambda x: log_probs_from_logits(x, labels, **settings), (logits,))
    assert gradcheck(lambda x: entropy_from_logits(x, **settings), (logits,))
    assert gradcheck(lambda x: log_probs_and_entropy_from_logits(x, labels, **settings), (logits,))


@pytest.mark.parametrize("chunk_size", [2, 64])
def test_impossible_tokens_have_no_gradient_and_cause_no_nan(chunk_size):
    logits = torch.tensor([[-INF, -INF, 0.0, 1.0, -INF]], dtype=torch.float64, requires_grad=True)
    log_probs, entropies = log_probs_and_entropy_from_logits(logits, torch.tensor([3]), chunk_size=chunk_size)
    (log_probs + entropies).sum().backward()
    p = math.e / (1 + math.e)
    entropy = -(p * math.log(p) + (1 - p) * math.log(1 - p))
    expected = 1 - p - p * (math.log(p) + entropy)
    assert logits.grad is not None
    assert logits.grad[0].tolist() == pytest.approx([0, 0, -expected, expected, 0])


def test_unused_entropies_do_not_change_the_gradient():
    logits = torch.tensor([[0.5, -1.0, 2.0]], requires_grad=True)
    labels = torch.tensor([1])
    log_probs, _ = log_probs_and_entropy_from_logits(logits, labels)
    (with_entropy,) = torch.autograd.grad(log_probs.sum(), logits)
    (alone,) = torch.autograd.grad(log_probs_from_logits(logits, labels).sum(), logits)
    assert torch.equal(with_entropy, alone)


def test_outputs_without_a_gradient_need_none():
    logits = torch.tensor([[0.5, -1.0, 2.0]], requires_grad=True)
    log_probs, entropies = log_probs_and_entropy_from_logits(logits, torch.tensor([1]))
    (entropies.sum() + 0 * log_probs.detach().sum()).backward()
    (alone,) = torch.autograd.grad(entropy_from_logits(logits).sum(), logits)
    assert logits.grad is not None
    assert torch.equal(logits.grad, alone)


@pytest.mark.parametrize("chunk_size", [16, 1000])
def test_bfloat16_logits_are_computed_in_float32(chunk_size):
    logits = torch.randn(5, 100, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    labels = torch.tensor([0, 99, 50, 15, 16])
    log_probs = log_probs_from_logits(logits, labels, chunk_size=chunk_size)
    expected = torch.log_softmax(logits.detach().double(), -1).gather(1, labels[:, None])[:, 0]
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs.detach().double(), expected, rtol=1e-6, atol=0)
    log_probs.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16
    one_hot = torch.nn.functional.one_hot(labels, 100)
    expected_grad = one_hot - torch.softmax(logits.detach().double(), -1)
    torch.testing.assert_close(logits.grad.double(), expected_grad, rtol=2**-8, atol=0)


def test_a_view_of_logits_gives_the_gradient_of_the_view():
    logits = torch.randn(2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    labels = torch.tensor([[0, 1, 2], [3, 4, 0]])
    log_probs_from_logits(logits[:, :-1], labels, chunk_size=2).sum().backward()
    assert logits.grad is not None
    assert logits.grad[:, -1].tolist() == [[0] * 5] * 2
    expected = torch.nn.functional.one_hot(labels, 5) - torch.softmax(logits.detach()[:, :-1], -1)
    torch.testing.assert_close(logits.grad[:, :-1], expected)


def test_the_logits_are_not_written_to():
    logits = torch.tensor([[0.5, -1.0, 2.0]])
    before = logits.clone()
    leaf = logits.requires_grad_()
    log_probs, entropies = log_probs_and_entropy_from_logits(leaf, torch.tensor([1]))
    (log_probs + entropies).sum().backward()
    assert torch.equal(logits.detach(), before)


def test_no_float32_copy_of_all_logits_exists():
    class LargestTensor(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, list | tuple) else [result]:
                if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                    self.numel = max(self.numel, tensor.numel())
            return result

    logits = torch.zeros(4, 1000, dtype=torch.bfloat16, requires_grad=True)
    with LargestTensor() as largest:
        log_probs, entropies = log_probs_and_entropy_from_logits(
            logits, torch.zeros(4, dtype=torch.int64), chunk_size=100
        )
        (log_probs + entropies).sum().backward()
    assert 0 < largest.numel <= 4 * 100


def test_no_tokens_give_no_log_probs():
    logits = torch.zeros(0, 5, requires_grad=True)
    log_probs, entropies = log_probs_and_entropy_from_logits(logits, torch.zeros(0, dtype=torch.int64))
    (log_probs.sum() + entropies.sum()).backward()
    assert log_probs.shape == entropies.shape == (0,)


def test_a_label_outside_the_vocabulary_is_rejected():
    with pytest.raises(AlgorithmError, match="from -100 to 2, but the vocabulary has 3"):
        log_probs_from_logits(torch.zeros(2, 3), torch.tensor([2, -100]))
    with pytest.raises(AlgorithmError, match="from 3 to 3, but the vocabulary has 3"):
        log_probs_from_logits(torch.zeros(1, 3), torch.tensor([3]))


def test_labels_of_another_shape_name_both_shapes():
    with pytest.raises(AlgorithmError, match=r"labels has shape \(3,\), but logits has shape \(2, 3\)"):
        unwrap(log_probs_from_logits)(torch.zeros(2, 3), torch.tensor([0, 1, 2]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"temperature": 0.0}, "temperature=0.0"), ({"temperature": INF}, "temperature=inf"), ({"chunk_size": 0}, "=0")],
)
def test_settings_out_of_range_are_rejected(settings, message):
    with pytest.raises(AlgorithmError, match=message):
        entropy_from_logits(torch.zeros(2, 3), **settings)


def test_empty_or_integer_logits_are_rejected():
    with pytest.raises(AlgorithmError, match=r"shape \(2, 0\)"):
        entropy_from_logits(torch.zeros(2, 0))
    with pytest.raises(AlgorithmError, match=r"torch\.int64"):
        unwrap(entropy_from_logits)(torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(AlgorithmError, match=r"labels is torch\.int32"):
        unwrap(log_probs_from_logits)(torch.zeros(2, 3), torch.tensor([0, 1], dtype=torch.int32))


@pytest.mark.parametrize("chunk_size", [1, 3, 8192])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_sums_of_squared_probabilities_equal_those_of_softmax(chunk_size, temperature):
    logits = 3 * torch.randn(4, 5, 17, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits[0, 0, 3] = -torch.inf
    expected = (logits / temperature).softmax(-1).square().sum(-1)
    found = sum_squared_probs_from_logits(logits, temperature=temperature, chunk_size=chunk_size)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert sum_squared_probs_from_logits(logits.bfloat16()).dtype == torch.float32
