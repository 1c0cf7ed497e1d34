"""Sequences that the embedded engine samples: alone, and where other sequences were before."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from hybridflow.protocol import DataProto
from hybridflow.rollout.base import Request, SamplingParams
from hybridflow.rollout.embedded import EmbeddedRollout


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
