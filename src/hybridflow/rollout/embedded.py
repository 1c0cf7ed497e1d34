"""The embedded rollout engine: generation with the trainer's own model and weights, in its process.

Sequences of all requests decode together in one batch of rows; a prompt is computed once for its whole group;
finished rows leave the batch when enough of them wait. Needs nothing but the model.
"""

from collections import deque
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybridflow.errors import RolloutError
from hybridflow.rollout.base import Completion, Request, SamplingParams
from hybridflow.rollout.kv_cache import DecodePlan, KVCache, PrefillPlan
from hybridflow.rollout.sampling import sample_tokens
from hybridflow.runtime import uniform

COMPACT_BELOW = 0.75
"""Finished rows are removed once less than this share of the rows is still running."""


class EmbeddedRollout:
    """Generates with `model`, whose parameters it shares: no copy of the weights is made."""

    def __init__(self, model: PreTrainedModel, *, max_running_sequences: int = 1024) -> None:
        self.model = model
        self.version = 0
        self.max_running_sequences = max_running_sequences
        self._waiting: deque[Request] = deque()
        self._finished: list[Completion] = []
        self._running: list[_Wave] = []

    def submit(self, request: Request) -> None:
        limit = self.model.config.max_position_embeddings
        length = len(request.prompt_ids) + request.sampling.max_new_tokens
        if not len(request.prompt_ids):
            raise RolloutError(f"request {request.request_id} has an empty prompt; give it at least one token.")
        if request.group_size < 1:
            raise RolloutError(
                f"request {request.request_id} has group_size={request.group_size}; it must be at least 1."
            )
        if length > limit:
            raise RolloutError(
                f"request {request.request_id}: {len(request.prompt_ids)} prompt tokens and {request.sampling.max_new_tokens} "
                f"new ones exceed the model's {limit} positions; shorten the prompt or data.max_response_length."
            )
        if request.group_size > self.max_running_sequences:
            raise RolloutError(
                f"request {request.request_id}: group_size={request.group_size} exceeds "
                f"rollout.max_running_sequences={self.max_running_sequences}; raise the latter."
            )
        vocabulary = self.model.get_input_embeddings().num_embeddings
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocabulary:
            raise RolloutError(f"request {request.request_id}: token ids must be in [0, {vocabulary}).")
        self._waiting.append(request)

    def has_unfinished(self) -> bool:
        return bool(self._waiting or self._running)

    @torch.no_grad()
    def step(self) -> None:
        self._admit()
        for wave in self._running:
            self._finished += wave.advance(self.version)
        self._running = [wave for wave in self._running if wave.num_running]

    def finished(self) -> list[Completion]:
        done, self._finished = self._finished, []
        return done

    def abort(self, request_id: int) -> None:
        waiting = [r for r in self._waiting if r.request_id == request_id]
        for request in waiting:
            self._waiting.remove(request)
            self._finished += [Completion(request_id, i, finish_reason="abort") for i in range(request.group_size)]
        stopped = [c for wave in self._running for c in wave.abort(request_id)]
        if not waiting and not stopped:
            raise RolloutError(f"request {request_id} is neither waiting nor running; it cannot be aborted.")
        self._finished += stopped
        self._running = [wave for wave in self._running if wave.num_running]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Share the given tensors' memory; where the model is the trainer's own they are its own already."""
        own = dict(self.model.named_parameters())
        missing = set(own)
        for name, tensor in weights:
            if name not in own or own[name].shape != tensor.shape:
                raise RolloutError(f"weight '{name}' {tuple(tensor.shape)} does not fit the rollout model.")
            own[name].data = tensor.detach()
            missing.discard(name)
        if missing:
            raise RolloutError(f"weights are missing: {', '.join(sorted(missing)[:5])}; every parameter must be given.")
        self.version = version

    def _admit(self) -> None:
        """Start waiting requests that fit; those with equal sampling parameters share a wave."""
        room = self.max_running_sequences - sum(wave.num_running for wave in self._running)
        admitted: dict[SamplingParams, list[Request]] = {}
        while self._waiting and self._waiting[0].group_size <= room:
            request = self._waiting.popleft()
            room -= request.group_size
            admitted.setdefault(request.sampling, []).append(request)
        for sampling, requests in admitted.items():
            wave = next((w for w in self._running if w.sampling == sampling), None)
            if wave is None:
                wave = _Wave(self.model, sampling)
                self._running.append(wave)
            wave.admit(requests)


class _Wave:
    """Sequences that decode together: one row each of the cache and of every array below."""

    def __init__(self, model: PreTrainedModel, sampling: SamplingParams) -> None:
        self.model, self.sampling = model, sampling
        config = model.config
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.device = model.device
        self.cache = KVCache(
            config.num_hidden_layers, config.num_key_value_heads or heads, head_dim, model.dtype, self.device
        )
        self.stop_ids = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=self.device)
        self.requests: list[tuple[int, int]] = []
        self.uniforms = np.zeros((0, sampling.max_new_tokens))
        self.tokens = torch.zeros(0, sampling.max_new_tokens, dtype=torch.int64, device=self.device)
        self.log_probs = torch.zeros(0, sampling.max_new_tokens, device=self.device)
        self.versions = torch.zeros(0, sampling.max_new_tokens, dtype=torch.int64, device=self.device)
        self.counts = torch.zeros(0, dtype=torch.int64, device=self.device)
        self.running = torch.zeros(0, dtype=torch.bool, device=self.device)
        self.num_running = 0
        self._first_logits: Tensor | None = None  # of rows that were admitted and have no token yet

    def admit(self, requests: list[Request]) -> None:
        """Compute each prompt once and give every sequence of its group a row."""
        prompts = [list(r.prompt_ids) for r in requests]
        lengths = torch.tensor([len(p) for p in prompts], device=self.device)
        plan = PrefillPlan(lengths.tolist(), {}, {})
        packed = torch.tensor([token for prompt in prompts for token in prompt], device=self.device)[None]
        position_ids = torch.cat([torch.arange(len(p), device=self.device) for p in prompts])[None]
        logits = self.model(
            packed,
            position_ids=position_ids,
            attention_plan=plan,
            use_cache=False,
            logits_to_keep=lengths.cumsum(0) - 1,
        ).logits[0]
        group_sizes = torch.tensor([r.group_size for r in requests], device=self.device)
        source = torch.arange(len(requests), device=self.device).repeat_interleave(group_sizes)
        layers = range(len(self.cache.keys))
        capacity = int(lengths.max()) + self.sampling.max_new_tokens
        self.cache.append(
            [plan.keys[i] for i in layers], [plan.values[i] for i in layers], source, lengths[source], capacity
        )
        self._first_logits = logits[source]
        self.requests += [(r.request_id, i) for r in requests for i in range(r.group_size)]
        positions = np.arange(self.sampling.max_new_tokens)
        noise = [uniform(*r.noise_key, np.arange(r.group_size)[:, None], positions[None]) for r in requests]
        self.uniforms = np.concatenate([self.uniforms, *noise])
        new = len(source)
        for name, fill in (("tokens", 0), ("log_probs", 0.0), ("versions", -1), ("counts", 0), ("running", True)):
            old = getattr(self, name)
            setattr(self, name, torch.cat([old, old.new_full((new, *old.shape[1:]), fill)]))
        self.num_running += new

    def advance(self, version: int) -> list[Completion]:
        """One more token for every running row; the completions that this finishes."""
        logits = self._next_logits()
        at = self.counts.clamp(max=self.sampling.max_new_tokens - 1)
        rows = torch.arange(len(at), device=self.device)
        uniforms = torch.from_numpy(self.uniforms[rows.cpu().numpy(), at.cpu().numpy()]).to(self.device)
        tokens, log_probs = sample_tokens(logits, uniforms, self.sampling)
        live = rows[self.running]
        self.tokens[live, at[live]] = tokens[live]
        self.log_probs[live, at[live]] = log_probs[live]
        self.versions[live, at[live]] = version
        self.counts[live] += 1
        stopped = torch.isin(tokens, self.stop_ids) & self.running
        ended = stopped | (self.running & (self.counts >= self.sampling.max_new_tokens))
        if not bool(ended.any()):
            return []
        done = self._complete(ended, stopped)
        self._compact()
        return done

    def abort(self, request_id: int) -> list[Completion]:
        chosen = torch.tensor([r == request_id for r, _ in self.requests], dtype=torch.bool, device=self.device)
        done = self._complete(chosen & self.running, torch.zeros_like(chosen))
        for completion in done:
            completion.finish_reason = "abort"
        return done

    def _next_logits(self) -> Tensor:
        """Logits (rows, vocabulary) of the next token: of new rows from their prompt, of the others by one decoding pass."""
        first, self._first_logits = self._first_logits, None
        old_rows = len(self.counts) - (0 if first is None else len(first))
        if first is not None and old_rows == 0:
            return first
        # Rows that start now decode along with a dummy token, at a place that their first real token overwrites.
        last = self.tokens.gather(1, (self.counts - 1).clamp(min=0)[:, None])
        logits = self.model(
            last,
            position_ids=self.cache.lengths[:, None],
            attention_plan=DecodePlan(self.cache),
            use_cache=False,
        ).logits[:, -1]
        advanced = self.running.clone()
        if first is not None:
            advanced[old_rows:] = False
            logits = torch.cat([logits[:old_rows], first])
        self.cache.lengths += advanced
        return logits

    def _complete(self, ended: Tensor, stopped: Tensor) -> list[Completion]:
        done = []
        tokens, log_probs, versions = (
            self.tokens[ended].tolist(),
            self.log_probs[ended].tolist(),
            self.versions[ended].tolist(),
        )
        for i, row in enumerate(ended.nonzero().flatten().tolist()):
            count = int(self.counts[row])
            reason = "stop" if bool(stopped[row]) else "length"
            done.append(
                Completion(*self.requests[row], tokens[i][:count], log_probs[i][:count], versions[i][:count], reason)
            )
        self.running &= ~ended
        self.num_running -= len(done)
        return done

    def _compact(self) -> None:
        if self.num_running >= COMPACT_BELOW * len(self.running):
            return
        rows = self.running.nonzero().flatten()
        self.cache.keep(rows)
        for name in ("tokens", "log_probs", "versions", "counts", "running"):
            setattr(self, name, getattr(self, name)[rows])
        self.uniforms = self.uniforms[rows.cpu().numpy()]
        self.requests = [self.requests[row] for row in rows.tolist()]
