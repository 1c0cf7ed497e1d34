"""Sequences that decode together, one token each a step.

A prompt is computed once for its whole group; finished rows leave when enough of them wait.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybridflow.errors import RolloutError
from hybridflow.rollout.base import Completion, FinishReason, Request, SamplingParams
from hybridflow.rollout.kv_cache import DecodePlan, KVCache, PrefillPlan
from hybridflow.rollout.sampling import sample_tokens
from hybridflow.runtime import uniform

COMPACT_BELOW = 0.75
"""Finished rows are removed once less than this share of the rows is still running."""

PREFILL_TOKENS = 16384
"""Prompts are computed in calls of at most so many tokens; a longer prompt is a call of its own."""


class Wave:
    """Requests with equal sampling parameters: a sequence is one row of the cache and of every tensor below."""

    def __init__(self, model: PreTrainedModel, sampling: SamplingParams) -> None:
        self.model, self.sampling = model, sampling
        self.num_running = 0
        device, width = model.device, sampling.max_new_tokens
        log_prob_dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
        self._cache = KVCache(device)
        self._stop_ids = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=device)
        self._names: list[tuple[int, int]] = []  # (request_id, index in the group)
        self._rows = {
            "uniforms": torch.zeros(0, width, dtype=torch.float64, device=device),
            "tokens": torch.zeros(0, width, dtype=torch.int64, device=device),
            "log_probs": torch.zeros(0, width, dtype=log_prob_dtype, device=device),
            "versions": torch.zeros(0, width, dtype=torch.int64, device=device),
            "counts": torch.zeros(0, dtype=torch.int64, device=device),
            "running": torch.zeros(0, dtype=torch.bool, device=device),
        }
        self._first_logits: list[Tensor] = []  # of rows that were admitted and have no token yet

    def admit(self, requests: Sequence[Request]) -> None:
        """Compute each prompt once and give every sequence of its group a row."""
        for part in _parts_of_prompts(requests):
            self._prefill(part)
        self._names += [(request.request_id, i) for request in requests for i in range(request.group_size)]
        positions = np.arange(self.sampling.max_new_tokens)[None]
        uniforms = [uniform(*r.noise_key, np.arange(r.group_size)[:, None], positions) for r in requests]
        for name, rows in self._rows.items():
            if name == "uniforms":
                new = torch.from_numpy(np.concatenate(uniforms)).to(rows)
            else:
                new = rows.new_full((sum(map(len, uniforms)), *rows.shape[1:]), name == "running")
            self._rows[name] = torch.cat([rows, new])
        self.num_running += sum(map(len, uniforms))

    def advance(self, version: int) -> list[Completion]:
        """One more token for every running row; the completions that this finishes."""
        logits = self._next_logits()
        rows = self._rows
        width = self.sampling.max_new_tokens
        next_uniforms = rows["uniforms"].gather(1, rows["counts"].clamp(max=width - 1)[:, None]).squeeze(1)
        tokens, log_probs = sample_tokens(logits, next_uniforms, self.sampling)
        live = rows["running"].nonzero().flatten()
        self._require_finite(log_probs, live)
        places = rows["counts"][live]
        rows["tokens"][live, places] = tokens[live]
        rows["log_probs"][live, places] = log_probs[live]
        rows["versions"][live, places] = version
        rows["counts"][live] += 1
        stopped = torch.isin(tokens, self._stop_ids)
        ended = (rows["running"] & (stopped | (rows["counts"] >= width))).nonzero().flatten()
        return self._finish(ended, stopped)

    def abort(self, request_id: int) -> list[Completion]:
        """The running sequences of a request, with what they have; they end here."""
        chosen = torch.tensor([name == request_id for name, _ in self._names], device=self._rows["running"].device)
        ended = (self._rows["running"] & chosen).nonzero().flatten()
        return self._finish(ended, None)

    def _prefill(self, requests: Sequence[Request]) -> None:
        device = self._rows["counts"].device
        lengths = [len(request.prompt_ids) for request in requests]
        plan = PrefillPlan(lengths)
        tokens = torch.tensor([token for request in requests for token in request.prompt_ids], device=device)
        logits = self.model(
            tokens[None],
            position_ids=torch.cat([torch.arange(length, device=device) for length in lengths])[None],
            attention_plan=plan,
            use_cache=False,
            logits_to_keep=torch.tensor(lengths, device=device).cumsum(0) - 1,
        ).logits[0]
        group_sizes = torch.tensor([request.group_size for request in requests], device=device)
        source = torch.arange(len(requests), device=device).repeat_interleave(group_sizes)
        self._cache.append(plan, source, capacity=max(lengths) + self.sampling.max_new_tokens)
        self._first_logits.append(logits[source])

    def _next_logits(self) -> Tensor:
        """Logits (rows, vocabulary) of the next token: of new rows from their prompts, of the others by one pass."""
        first, self._first_logits = self._first_logits, []
        num_old = len(self._names) - sum(map(len, first))
        if not num_old:
            return torch.cat(first)
        last = (self._rows["counts"][:num_old] - 1)[:, None]
        lengths = self._cache.lengths[:num_old]
        logits = self.model(
            self._rows["tokens"][:num_old].gather(1, last),
            position_ids=lengths[:, None],
            attention_plan=DecodePlan(self._cache, num_old),
            use_cache=False,
        ).logits[:, -1]
        lengths += self._rows["running"][:num_old]
        return torch.cat([logits, *first]) if first else logits

    def _finish(self, ended: Tensor, stopped: Tensor | None) -> list[Completion]:
        """The completions of rows that end here; `stopped` says for every row whether it drew a stop token."""
        if not len(ended):
            return []
        counts, stops = self._rows["counts"].tolist(), None if stopped is None else stopped.tolist()
        tokens, log_probs, versions = (self._rows[name][ended].tolist() for name in ("tokens", "log_probs", "versions"))
        done = []
        for i, row in enumerate(ended.tolist()):
            (request_id, index), count = self._names[row], counts[row]
            reason: FinishReason = "abort" if stops is None else "stop" if stops[row] else "length"
            done.append(
                Completion(request_id, index, tokens[i][:count], log_probs[i][:count], versions[i][:count], reason)
            )
        self._rows["running"][ended] = False
        self.num_running -= len(done)
        if self.num_running < COMPACT_BELOW * len(self._names):
            self._keep(self._rows["running"].nonzero().flatten())
        return done

    def _keep(self, rows: Tensor) -> None:
        self._cache.keep(rows)
        self._rows = {name: values[rows] for name, values in self._rows.items()}
        self._names = [self._names[row] for row in rows.tolist()]

    def _require_finite(self, log_probs: Tensor, live: Tensor) -> None:
        if not bool((finite := log_probs[live].isfinite()).all()):
            row = int(live[~finite][0])
            raise RolloutError(
                f"request {self._names[row][0]}: the model's logits are not finite, so no token can be sampled. Its "
                "weights have diverged: resume from an earlier checkpoint with a lower learning rate."
            )


def _parts_of_prompts(requests: Sequence[Request]) -> Iterator[list[Request]]:
    part: list[Request] = []
    used = 0
    for request in requests:
        if part and used + len(request.prompt_ids) > PREFILL_TOKENS:
            yield part
            part, used = [], 0
        part.append(request)
        used += len(request.prompt_ids)
    yield part
