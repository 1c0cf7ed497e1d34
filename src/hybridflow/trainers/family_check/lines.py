"""The lines of the check: each computes the rows of a copy in one layout, and compares them with another.

transformers' code, one row at a time = ours, one row at a time = packed = padded = prompts shared = other order
one prefill of the sampled tokens = decoding token by token = decoding in rows that others have used
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from hybridflow.config import MemoryConfig, ParallelConfig
from hybridflow.engines.packing import ModelInput, pack, pad
from hybridflow.engines.ranks import Ranks
from hybridflow.engines.row_forward import RowForward
from hybridflow.models.forward_of import forward_of
from hybridflow.models.loading import load_causal_lm
from hybridflow.protocol import DataProto
from hybridflow.rollout.base import Request, SamplingParams
from hybridflow.rollout.embedded import EmbeddedRollout
from hybridflow.trainers.family_check.copy import Copy, Values, values_of

LOG_PROBS, GRADIENTS = 2e-4, 1e-3
"""Largest difference of a log-prob, and of a parameter's gradient relative to its norm. Both are rounding in float32;
a leak of one token is hundreds of times larger."""
SMALL = 0.01
"""Gradients below this share of the largest are compared with it."""
RUNNING, CACHE_BYTES = 4, 2**26

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Difference:
    """The difference between two computations of the same rows; `error` if one of them failed."""

    log_probs: float = 0.0
    gradients: float | None = None
    parameter: str = ""
    """The parameter whose gradients differ most."""
    error: str = ""

    @property
    def is_ok(self) -> bool:
        """Whether the difference is rounding."""
        return not self.error and self.log_probs <= LOG_PROBS and (self.gradients or 0.0) <= GRADIENTS

    @property
    def text(self) -> str:
        """The outputs that differ, and by how much."""
        if self.error:
            return self.error
        found = []
        if not self.log_probs <= LOG_PROBS:
            found.append(f"log-probs differ by {self.log_probs:.2g} (at most {LOG_PROBS:g})")
        if self.gradients is not None and not self.gradients <= GRADIENTS:
            found.append(f"the gradient of {self.parameter} differs by {self.gradients:.1%} (at most {GRADIENTS:.1%})")
        return " and ".join(found)


def difference(found: Values, wanted: Values) -> Difference:
    """Compare log-probs by their largest difference, and gradients by the norm of theirs."""
    sizes = {name: float(gradient.norm()) for name, gradient in wanted.gradients.items()}
    typical = max((sizes[name] / gradient.numel() ** 0.5 for name, gradient in wanted.gradients.items()), default=0.0)

    def apart(name: str) -> float:
        gradient = wanted.gradients[name]
        scale = max(sizes[name], SMALL * typical * gradient.numel() ** 0.5)
        return float((found.gradients[name] - gradient).norm()) / scale if scale else 0.0

    apart_by_name = {name: apart(name) for name in wanted.gradients}
    worst = max(apart_by_name, key=apart_by_name.__getitem__)
    return Difference(largest(found.log_probs - wanted.log_probs), apart_by_name[worst], worst)


def largest(x: Tensor) -> float:
    """Return the largest absolute value; infinity if one is not finite."""
    return float(x.abs().nan_to_num(nan=torch.inf).max())


@dataclass(frozen=True)
class Sample:
    """A prompt, sampled tokens, and the log-probs with which they were sampled."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    log_probs: Sequence[float]


def prompt_of(rows: DataProto, row: int) -> list[int]:
    """Return the prompt of a row."""
    columns = rows.batch
    width = columns["input_ids"].shape[1] - columns["response_mask"].shape[1]
    return columns["input_ids"][row, :width][columns["attention_mask"][row, :width].bool()].tolist()


def decode(engine: EmbeddedRollout, prompts: Sequence[Sequence[int]], temperature: float) -> Iterator[Sample]:
    """Decode two responses to each prompt; those to the last prompt end first."""
    request = partial(_request, temperature)
    yield from _samples(engine, [request(i, prompt, 9 - 4 * i, group_size=2) for i, prompt in enumerate(prompts)])


def decode_after_others(
    engine: EmbeddedRollout, prompts: Sequence[Sequence[int]], temperature: float
) -> Iterator[Sample]:
    """Decode more sequences than may run, so that later ones get the rows and pages of others; then go on with some.

    The sequences that go on are kept ones, of which one has two continuations.
    """
    first, second = prompts  # of which the first has more than five tokens
    request = partial(_request, temperature)
    ended = list(
        _samples(
            engine,
            [
                request(0, first, 4, group_size=2, keep=True),
                request(1, second, 10),
                request(2, first[3:], 5, keep=True),
                request(3, first[5:], 6, group_size=3),
            ],
        )
    )
    yield from ended
    kept = [[*sample.prompt, *sample.tokens] for sample in ended if sample.prompt in (first, first[3:])]
    more = [request(4 + i, [*tokens, *second[: 6 - i]], 6 - i, group_size=1 + i) for i, tokens in enumerate(kept)]
    yield from _samples(engine, more)


def _request(
    temperature: float, number: int, prompt: Sequence[int], count: int, group_size: int = 1, *, keep: bool = False
) -> Request:
    sampling = SamplingParams(count, temperature)
    return Request(number, prompt, sampling, group_size, noise_key=(number,), keep=keep, total_tokens=64)


def _samples(engine: EmbeddedRollout, requests: Sequence[Request]) -> Iterator[Sample]:
    for request in requests:
        engine.submit(request)
    prompts = {request.request_id: request.prompt_ids for request in requests}
    while engine.has_unfinished():
        engine.step()
        for done in engine.finished():
            yield Sample(prompts[done.request_id], done.token_ids, done.log_probs)


class Comparison:
    """Our values of a copy's rows, in each layout, and what the embedded engine samples."""

    def __init__(self, copy: Copy) -> None:
        self._copy, self._rows = copy, copy.rows
        self._model = load_causal_lm(copy.directory)
        self._forward = RowForward(
            str(copy.directory),
            "policy",
            self._model,
            forward_of(self._model),
            memory=MemoryConfig(),
            compute_dtype=torch.float32,
            ranks=Ranks(ParallelConfig(), CPU),
            device=CPU,
            fuses_log_probs=False,
        )

    def differences(self) -> Iterator[tuple[str, Callable[[], Difference]]]:
        """Yield each line and the function that computes it."""
        in_order, packed = range(len(self._rows)), partial(pack, share_prompts=False)
        yield "transformers", lambda: difference(self.alone, self._copy.wanted)
        yield "packed", partial(self._of_layout, packed, in_order)
        yield "order", partial(self._of_layout, packed, in_order[::-1])
        yield "padded", partial(self._of_layout, pad, in_order)
        yield "shared", partial(self._of_layout, partial(pack, attention="flex"), in_order)
        prompts = [prompt_of(self._rows, row) for row in (2, -1)]
        for storage in ("rows", "pages"):
            for name, samples in (("decoded", decode), ("reused", decode_after_others)):
                yield f"{name} {storage}", partial(self._of_samples, samples, prompts, storage == "pages")

    @property
    def without_gradient(self) -> list[str]:
        """The parameters that no row gives a gradient, also in transformers' own code."""
        return [name for name, gradient in self._copy.wanted.gradients.items() if not gradient.any()]

    @cached_property
    def alone(self) -> Values:
        """The values of each row in a pass of its own."""
        return self._values(partial(pack, share_prompts=False), [[row] for row in range(len(self._rows))])

    def _of_layout(self, arrange: Callable[[DataProto], ModelInput], order: Sequence[int]) -> Difference:
        return difference(self._values(arrange, [order]), self.alone)

    def _values(self, arrange: Callable[[DataProto], ModelInput], parts: Sequence[Sequence[int]]) -> Values:
        def log_probs_of(*part: int) -> Tensor:
            rows = self._rows.select_idxs(torch.tensor(part))
            return self._forward.compute(arrange(rows))["log_probs"]

        return values_of(self._model, self._rows, self._copy.weights, parts, log_probs_of)

    def _of_samples(
        self,
        samples: Callable[[EmbeddedRollout, Sequence[Sequence[int]], float], Iterator[Sample]],
        prompts: Sequence[Sequence[int]],
        is_paged: bool,
    ) -> Difference:
        engine = EmbeddedRollout(self._model, max_running_sequences=RUNNING, paged=is_paged, kv_cache_bytes=CACHE_BYTES)
        sampled = samples(engine, prompts, self._temperature)
        apart = [torch.tensor(sample.log_probs) - self._in_one_pass(sample) for sample in sampled]
        return Difference(largest(torch.cat(apart)))

    @property
    def _temperature(self) -> float:
        """A temperature at which a copy samples tokens whose log-probs depend on all that it sees.

        With tied embeddings a random model repeats its last token, almost surely whatever came before.
        """
        vocabulary = self._model.config.get_text_config().vocab_size
        return max(1.0, -float(self._copy.wanted.log_probs.mean()) / math.log(vocabulary))

    def _in_one_pass(self, sample: Sample) -> Tensor:
        """Return the log-probs of a sample's tokens in a pass of training."""
        ids = torch.tensor([[*sample.prompt, *sample.tokens]])
        is_sampled = torch.ones(1, len(sample.tokens), dtype=torch.bool)
        row = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "response_mask": is_sampled}
        outputs = self._forward.compute(pack(DataProto.from_dict(row)), temperature=self._temperature)
        return outputs["log_probs"].detach()[0]
