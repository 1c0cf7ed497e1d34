"""GRPO in one file: a tiny language model learns to sort digits, in less than a minute on a CPU.

    prompts ──generate──> responses ──score──> scores ──compare in groups──> advantages ──update──> new weights
       ^                                                                                                 │
       └──────────────────────────────────── the next step generates with them ──────────────────────────┘

A prompt is four digits; the right answer is the same digits in ascending order and a stop token. A warm start imitates
demonstrations that are right a third of the time. After that the model sees no answers: it samples eight responses to
each prompt, and right ones become more likely, wrong ones less (https://arxiv.org/abs/2402.03300).

The file has all steps of a hybridflow trainer, in order and without the trainer classes: read it from top to bottom.
Two runs print the same numbers.

    python examples/grpo_in_one_file.py [--steps N]
"""

import argparse
import itertools
import random
import tempfile
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from hybridflow.algorithms import aggregate_loss, grpo_advantages, kl_loss, masked_mean, ppo_policy_loss
from hybridflow.config import MemoryConfig, ModelConfig, OptimizerConfig
from hybridflow.engines import LossFunction, Outputs, TorchEngine
from hybridflow.protocol import DataProto
from hybridflow.rollout import EmbeddedRollout, Request, SamplingParams, generate, load_weights
from hybridflow.runtime.threads import set_deterministic, set_num_threads

SEED = 1
WARM_START_STEPS = 700
WARM_START_LEARNING_RATE = 2e-3
"""Learning rate of the supervised steps at the start."""
STEPS = 100
"""GRPO steps."""
BATCH_SIZE = 32
"""Prompts per step."""
GROUP_SIZE = 8
"""Responses per prompt, which are compared with each other."""
NUM_MINI_BATCHES = 2
"""Optimizer steps per GRPO step; from the second on, the policy differs from the one that generated."""
CLIP_RATIO = 0.2
KL_COEF = 0.01
"""Weight of the KL penalty against the reference, the model after the warm start."""
LEARNING_RATE = 3e-4
NUM_HELD_OUT = 150
"""Multisets of digits that no training prompt has, in any order."""
NUM_EVALUATED = 500
"""Prompts of held-out digits that the model is evaluated on."""

# ------------------------------------------------------------------------------------------------ the task

NUM_DIGITS = 4
DIGITS = range(10)
"""A digit is its own token id, so the task needs no tokenizer."""
STOP, PAD = 10, 11
VOCABULARY_SIZE = 12


def split_problems(rng: random.Random) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Split the multisets of digits into (training, held out)."""
    problems = list(itertools.combinations_with_replacement(DIGITS, NUM_DIGITS))
    rng.shuffle(problems)
    return problems[NUM_HELD_OUT:], problems[:NUM_HELD_OUT]


def draw_prompts(problems: list[tuple[int, ...]], count: int, rng: random.Random) -> Tensor:
    """Draw prompts (count, NUM_DIGITS): the digits of random problems in random order."""
    return torch.tensor([rng.sample(digits, NUM_DIGITS) for digits in rng.choices(problems, k=count)])


def demonstration(prompt: Sequence[int], rng: random.Random) -> list[int]:
    """Return the digits, in the right order about a third of the time, and the stop token."""
    return [*(sorted(prompt) if rng.random() < 1 / 3 else rng.sample(prompt, NUM_DIGITS)), STOP]


def score(prompt: Sequence[int], response: Sequence[int]) -> float:
    """Return 1 for the sorted digits and the stop token, 0 for anything else."""
    return float(list(response) == [*sorted(prompt), STOP])


# ------------------------------------------------------------------------------------------------ the batch


def as_batch(prompts: Tensor, responses: Sequence[Sequence[int]]) -> DataProto:
    """Build the input columns of an engine from prompts (batch, prompt_len) and a response to each."""
    rows = [torch.tensor(response) for response in responses]
    padded = pad_sequence(rows, batch_first=True, padding_value=PAD)
    response_mask = torch.arange(padded.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
    return DataProto.from_dict(
        {
            "prompts": prompts,
            "responses": padded,
            "response_mask": response_mask,
            "input_ids": torch.cat([prompts, padded], dim=1),
            "attention_mask": torch.cat([torch.ones_like(prompts), response_mask.long()], dim=1),
        }
    )


def generate_group(rollout: EmbeddedRollout, prompts: Tensor, group_size: int, noise_key: tuple[int, ...]) -> DataProto:
    """Sample `group_size` responses to each prompt, in order, with `scores` and `group_ids`.

    The noise of a token depends on the noise key, the index of the prompt, the index in the group and the position.
    """
    sampling = SamplingParams(max_new_tokens=NUM_DIGITS + 1, temperature=1.0, stop_token_ids=(STOP,))
    requests = [Request(i, ids, sampling, group_size, (*noise_key, i)) for i, ids in enumerate(prompts.tolist())]
    responses = [completion.token_ids for completion in generate(rollout, requests)]
    group_ids = torch.arange(len(prompts)).repeat_interleave(group_size)
    prompts = prompts[group_ids]
    scores = [score(ids, response) for ids, response in zip(prompts.tolist(), responses, strict=True)]
    labels = DataProto.from_dict({"scores": torch.tensor(scores), "group_ids": group_ids})
    return as_batch(prompts, responses).union(labels)


# ------------------------------------------------------------------------------------------------ the losses


def supervised_loss(batch: DataProto) -> LossFunction:
    """Build the loss of supervised training: the cross-entropy of the response tokens."""
    num_tokens = int(batch.batch["response_mask"].sum())

    def loss(outputs: Outputs, rows: DataProto) -> tuple[Tensor, dict[str, float]]:
        mask = rows.batch["response_mask"]
        counts = {"num_tokens": num_tokens, "num_sequences": len(batch)}
        return aggregate_loss(-outputs["log_probs"], mask, "token-mean", **counts), {}

    return loss


def grpo_loss(mini_batch: DataProto) -> LossFunction:
    """Build the loss function of one optimizer step.

    The engine computes a mini-batch in micro-batches. The loss of each is a sum over its tokens, divided by the number
    of tokens of the whole mini-batch, so that the gradient does not depend on how the engine splits the mini-batch.
    """
    counts = {"num_tokens": int(mini_batch.batch["response_mask"].sum()), "num_sequences": len(mini_batch)}

    def loss(outputs: Outputs, rows: DataProto) -> tuple[Tensor, dict[str, float]]:
        columns, log_probs = rows.batch, outputs["log_probs"]
        mask = columns["response_mask"]
        policy = ppo_policy_loss(  # -min(ratio * A, clip(ratio) * A) of each token
            log_probs=log_probs,
            old_log_probs=columns["old_log_probs"],
            advantages=columns["advantages"],
            response_mask=mask,
            clip_ratio_low=CLIP_RATIO,
            clip_ratio_high=CLIP_RATIO,
            clip_ratio_dual=None,
        )
        ref_log_probs = columns["ref_log_probs"]
        token_kl = kl_loss(log_probs=log_probs, ref_log_probs=ref_log_probs, response_mask=mask, kl_estimator="k3")
        policy_share = aggregate_loss(policy.token_losses, mask, "token-mean", **counts)
        kl_share = aggregate_loss(token_kl, mask, "token-mean", **counts)
        clip_share = aggregate_loss(policy.clipped.float(), mask, "token-mean", **counts)
        return policy_share + KL_COEF * kl_share, {"kl": float(kl_share.detach()), "clipfrac": float(clip_share)}

    return loss


# ------------------------------------------------------------------------------------------------ the algorithm


def grpo_step(
    engine: TorchEngine, reference: TorchEngine, rollout: EmbeddedRollout, prompts: Tensor, step: int
) -> dict[str, float]:
    """Run one step of GRPO on prompts (batch, prompt_len); return its metrics."""
    # 1. A group of responses to each prompt, each with a score.
    batch = generate_group(rollout, prompts, GROUP_SIZE, noise_key=(SEED, step))
    scores, mask = batch.batch["scores"], batch.batch["response_mask"]

    # 2. One advantage per response: its score minus the mean of its group, in standard deviations of the group.
    advantages, _ = grpo_advantages(scores=scores, group_ids=batch.batch["group_ids"], norm_by_std=True)

    # 3. Log-probs of the responses under the policy before any update, and under the reference.
    old = engine.forward(batch, with_entropy=True)
    ref = reference.forward(batch)
    batch = batch.union(
        DataProto.from_dict(
            {"advantages": advantages, "old_log_probs": old["log_probs"], "ref_log_probs": ref["log_probs"]}
        )
    )

    # 4. One optimizer step for each mini-batch. Prompts were drawn in random order, and groups stay together.
    for mini_batch in batch.chunk(NUM_MINI_BATCHES):
        result = engine.update(mini_batch, grpo_loss(mini_batch))

    # 5. Weight sync: the rollout engine generates the next step with the new weights.
    load_weights(rollout, engine.weights(), version=engine.num_updates)
    return {"score": float(scores.mean()), "entropy": float(masked_mean(old["entropies"], mask)), **result.metrics}


# ------------------------------------------------------------------------------------------------ the run


def write_model(directory: str) -> None:
    """Write a Llama model with random weights as a Hugging Face directory, from which engines load it."""
    disable_progress_bar()
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=STOP,
        pad_token_id=PAD,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def build_engine(directory: str, learning_rate: float | None = None) -> TorchEngine:
    """Build an engine with the model of a directory; without a learning rate it cannot be trained."""
    optimizer = None if learning_rate is None else OptimizerConfig(lr=learning_rate, weight_decay=0.0)
    memory = MemoryConfig(max_tokens_per_micro_batch=4096)
    return TorchEngine(directory, "policy", model=ModelConfig(), memory=memory, optimizer=optimizer)


def warm_start(directory: str, problems: list[tuple[int, ...]], rng: random.Random) -> None:
    """Train the model of the directory to imitate demonstrations, and save it there."""
    engine = build_engine(directory, WARM_START_LEARNING_RATE)
    for step in range(1, WARM_START_STEPS + 1):
        prompts = draw_prompts(problems, BATCH_SIZE * GROUP_SIZE, rng)
        batch = as_batch(prompts, [demonstration(prompt, rng) for prompt in prompts.tolist()])
        result = engine.update(batch, supervised_loss(batch))
        if step in (1, WARM_START_STEPS):
            print(f"warm start {step:4d}  loss {result.loss:.4f}", flush=True)
    engine.model.save_pretrained(directory)


def accuracy(rollout: EmbeddedRollout, prompts: Tensor) -> float:
    """Return the share of prompts for which one sampled response is right."""
    return float(generate_group(rollout, prompts, 1, noise_key=(SEED, -1)).batch["scores"].mean())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="a tiny language model learns to sort digits by GRPO")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of GRPO (default: {STEPS})")
    num_steps = parser.parse_args(arguments).steps

    set_num_threads(1)  # more threads gain little here, and rounding depends on their number
    set_deterministic(True)
    rng = random.Random(SEED)
    problems, held_out = split_problems(rng)
    with tempfile.TemporaryDirectory() as directory:
        write_model(directory)
        warm_start(directory, problems, rng)
        engine, reference = build_engine(directory, LEARNING_RATE), build_engine(directory)
    rollout = EmbeddedRollout(engine.model)  # shares the engine's weights

    unseen = draw_prompts(held_out, NUM_EVALUATED, rng)
    before = accuracy(rollout, unseen)
    for step in range(1, num_steps + 1):
        metrics = grpo_step(engine, reference, rollout, draw_prompts(problems, BATCH_SIZE, rng), step)
        if step in (1, num_steps) or step % 10 == 0:
            print(f"step {step:4d}  " + "  ".join(f"{name} {value:.4f}" for name, value in metrics.items()), flush=True)
    after = accuracy(rollout, unseen)
    print(f"accuracy {before:.3f} -> {after:.3f} on {NUM_EVALUATED} held-out prompts in {num_steps} steps")


if __name__ == "__main__":
    main()
