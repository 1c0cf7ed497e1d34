"""A small random model in a directory, with rows of tokens and what transformers' own code computes of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from hybridflow.models.loading import quiet_transformers, turn_off_dropout
from hybridflow.models.parameters import persistent_buffers
from hybridflow.protocol import DataProto

PROMPTS = (2, 17, 3)
"""Lengths of the prompts. A layer may forget quickly, so what a row has of another is seen after a short prompt."""
RESPONSES = ((24, 9), (16, 21), (33, 5))
"""Lengths of the responses to each prompt: rows of 8 to 38 tokens, most of them several times a window of the copy."""
FIRST_TOKEN = 3
NOISE, EMBEDDING, GAIN = 0.3, 0.3, 1.5
"""Scales of random numbers: added to vectors, of embeddings, and of matrices relative to their width."""


@dataclass(frozen=True)
class Values:
    """Log-probs of the response tokens of all rows, flattened, and the gradient of their weighted sum by parameter."""

    log_probs: Tensor
    gradients: Mapping[str, Tensor]


@dataclass(frozen=True)
class Copy:
    """A random model in `directory`, rows, a weight for each of their response tokens, and transformers' values."""

    directory: Path
    rows: DataProto
    weights: Tensor
    wanted: Values


def write_copy(config: PretrainedConfig, directory: Path, seed: int) -> Copy:
    """Write a random model of this configuration, and compute its rows by transformers' own code, one at a time."""
    generator = torch.Generator().manual_seed(seed)
    model_of: Any = AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.default_generator.manual_seed(seed)
        model = model_of.from_config(config, dtype=torch.float32, attn_implementation="eager")
        model.eval()
        turn_off_dropout(model)
        _randomize(model, generator)
        model.save_pretrained(directory)
    rows = rows_of(config.get_text_config().vocab_size, generator)
    weights = torch.randn(rows.batch["response_mask"].shape, generator=generator)

    def one(row: int) -> Tensor:
        columns, mask = rows.batch, rows.batch["response_mask"][row]
        ids = columns["input_ids"][row][columns["attention_mask"][row].bool()]
        logits = model(ids[None], use_cache=False).logits[0, :-1]
        found = logits.log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
        return torch.zeros(len(mask)).masked_scatter(mask, found[-int(mask.sum()) :])

    return Copy(directory, rows, weights, values_of(model, rows, weights, [[row] for row in range(len(rows))], one))


def values_of(
    model: nn.Module,
    rows: DataProto,
    weights: Tensor,
    parts: Sequence[Sequence[int]],
    log_probs_of: Callable[..., Tensor],
) -> Values:
    """Compute rows in parts, one backward pass each; `log_probs_of(*part)` returns (len(part), response_len)."""
    mask = rows.batch["response_mask"]
    found = torch.zeros(mask.shape)
    model.zero_grad(set_to_none=True)
    for part in parts:
        log_probs = log_probs_of(*part).reshape(len(part), -1)
        (log_probs * weights[list(part)] * mask[list(part)]).sum().backward()
        found[list(part)] = log_probs.detach()
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }
    model.zero_grad(set_to_none=True)
    return Values(found[mask], gradients)


def rows_of(vocabulary: int, generator: torch.Generator) -> DataProto:
    """Return rows with several responses to each prompt, in the layout of rollouts."""
    width, longest = max(PROMPTS), max(map(max, RESPONSES))
    columns = torch.arange(width + longest)
    ids, attention, response = [], [], []
    for prompt_len, lengths in zip(PROMPTS, RESPONSES, strict=True):
        prompt = torch.randint(FIRST_TOKEN, vocabulary, (width,), generator=generator)
        for length in lengths:
            tokens = torch.randint(FIRST_TOKEN, vocabulary, (longest,), generator=generator)
            is_real = (columns >= width - prompt_len) & (columns < width + length)
            ids.append(torch.cat([prompt, tokens]) * is_real)
            attention.append(is_real.long())
            response.append(is_real[width:])
    return DataProto.from_dict(
        {
            "input_ids": torch.stack(ids),
            "attention_mask": torch.stack(attention),
            "response_mask": torch.stack(response),
        }
    )


@torch.no_grad()
def _randomize(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Draw all weights, so that each changes the log-probs: none stays at zeros or ones that hide its loss."""

    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator).to(like)

    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for parameter in model.parameters():
        if id(parameter) in embeddings:
            parameter.copy_(EMBEDDING * noise(parameter))
        elif parameter.ndim < 2:
            parameter.add_(NOISE * noise(parameter))
        else:
            width = (parameter.shape[-1] * parameter.shape[-2]) ** 0.5
            parameter.copy_(GAIN * width**-0.5 * noise(parameter))
    for buffer in persistent_buffers(model).values():
        if buffer.is_floating_point():
            buffer.add_(NOISE * noise(buffer))
