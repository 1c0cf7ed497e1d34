"""GRPO in one file: a tiny language model learns to sort digits, in less than a minute on a CPU.

    prompts ──generate──> responses ──score──> scores ──compare in groups──> advantages ──update──> new weights
       ^                                                                                                 │
       └──────────────────────────────────── the next step generates with them ──────────────────────────┘

A prompt is four digits, the right answer the same digits in ascending order and a stop token. A warm start imitates
somebody who is right a third of the time. From there on nobody shows the model an answer: of eight attempts at a
prompt it learns to do more of what was right, less of what was wrong (https://arxiv.org/abs/2402.03300).

Everything that a trainer of hybridflow does is here, in order and without the trainers: read it from top to bottom.
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
from hybridflow.runtime import set_deterministic, set_num_threads

SEED = 1
WARM_START_STEPS = 700
WARM_START_LEARNING_RATE = 2e-3
"""Of the supervised steps that come first."""
STEPS = 100
"""Of GRPO."""
BATCH_SIZE = 32
"""Prompts in one step."""
GROUP_SIZE = 8
"""Responses to each prompt, which are compared with each other."""
NUM_MINI_BATCHES = 2
"""Optimizer steps in one step; from the second on, the policy is no longer quite the one that generated."""
CLIP_RATIO = 0.2
KL_COEF = 0.01
"""How strongly the policy is held to the reference, the model after the warm start."""
LEARNING_RATE = 3e-4
NUM_HELD_OUT = 150
"""Sets of digits that no prompt of training has, in whatever order."""
NUM_EVALUATED = 500
"""Prompts made of them, on which the model is judged."""

# ------------------------------------------------------------------------------------------------ the task

NUM_DIGITS = 4
DIGITS = range(10)
"""Digits are their own token ids, so that the task needs no tokenizer."""
STOP, PAD = 10, 11
VOCABULARY_SIZE = 12


def split_problems(rng: random.Random) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Which digits to sort, as (training, held out)."""
    problems = list(itertools.combinations_with_replacement(DIGITS, NUM_DIGITS))
    rng.shuffle(problems)
    return problems[NUM_HELD_OUT:], problems[:NUM_HELD_OUT]


def draw_prompts(problems: list[tuple[int, ...]], count: int, rng: random.Random) -> Tensor:
    """Prompts (count, NUM_DIGITS): the digits of random problems in random order."""
    return torch.tensor([rng.sample(digits, NUM_DIGITS) for digits in rng.choices(problems, k=count)])


def demonstration(prompt: Sequence[int], rng: random.Random) -> list[int]:
    """The digits in some order, which is the right one about a third of the time, and the stop token."""
    return [*(sorted(prompt) if rng.random() < 1 / 3 else rng.sample(prompt, NUM_DIGITS)), STOP]


def score(prompt: Sequence[int], response: Sequence[int]) -> float:
    """1 for the sorted digits and the stop token, 0 for anything else."""
    return float(list(response) == [*sorted(prompt), STOP])


# ------------------------------------------------------------------------------------------------ the batch


def as_batch(prompts: Tensor, responses: Sequence[Sequence[int]]) -> DataProto:
    """Prompts (batch, prompt_len) and a response to each, as the columns that a model reads."""
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
    """`group_size` sampled responses to each prompt, in order, with `scores` and `group_ids`.

    A token's noise is a function of the noise key, the prompt's place, the index in the group and the token's position.
    """
    sampling = SamplingParams(max_new_tokens=NUM_DIGITS + 1, temperature=1.0, stop_token_ids=(STOP,))
    requests = [Request(i, ids, sampling, group_size, (*noise_key, i)) for i, ids in enumerate(prompts.tolist())]
    responses = [completion.token_ids for completion in generate(rollout, requests)]
    group_ids = torch.arange(len(prompts)).repeat_interleave(group_size)
    prompts = prompts[group_ids]
    scores = [score(ids, response) for ids, response in zip(prompts.tolist(), responses, strict=True)]
    marks = DataProto.from_dict({"scores": torch.tensor(scores), "group_ids": group_ids})
    return as_batch(prompts, responses).union(marks)


# ------------------------------------------------------------------------------------------------ the losses


def supervised_loss(batch: DataProto) -> LossFunction:
    """Cross-entropy of the response tokens."""
    num_tokens = int(batch.batch["response_mask"].sum())

    def loss(outputs: Outputs, rows: DataProto) -> tuple[Tensor, dict[str, float]]:
        mask = rows.batch["response_mask"]
        counts = {"num_tokens": num_tokens, "num_sequences": len(batch)}
        return aggregate_loss(-outputs["log_probs"], mask, "token-mean", **counts), {}

    return loss


def grpo_loss(mini_batch: DataProto) -> LossFunction:
    """The loss of one optimizer step as an engine wants it.

    The engine computes a mini-batch in parts. Each gives its share of the loss: a sum over its tokens, divided by the
    number of tokens of the whole mini-batch. The shares add up to the same gradient however the engine cuts.
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
    """One step of GRPO on prompts (batch, prompt_len); returns what it looked like."""
    # 1. A group of responses to each prompt, each with a score.
    batch = generate_group(rollout, prompts, GROUP_SIZE, noise_key=(SEED, step))
    scores, mask = batch.batch["scores"], batch.batch["response_mask"]

    # 2. One advantage a response: how far its score lies above its group's mean, in standard deviations.
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

    # 5. The rollout engine generates with the new weights from here on.
    load_weights(rollout, engine.weights(), version=engine.num_updates)
    return {"score": float(scores.mean()), "entropy": float(masked_mean(old["entropies"], mask)), **result.metrics}


# ------------------------------------------------------------------------------------------------ the run


def write_model(directory: str) -> None:
    """A Llama model with random weights as a Hugging Face directory, which is what an engine starts from."""
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
    """The model of a directory; without a learning rate it only computes."""
    optimizer = None if learning_rate is None else OptimizerConfig(lr=learning_rate, weight_decay=0.0)
    memory = MemoryConfig(max_tokens_per_micro_batch=4096)
    return TorchEngine(directory, "policy", model=ModelConfig(), memory=memory, optimizer=optimizer)


def warm_start(directory: str, problems: list[tuple[int, ...]], rng: random.Random) -> None:
    """Teach the model of the directory to imitate demonstrations, and save it there."""
    engine = build_engine(directory, WARM_START_LEARNING_RATE)
    for step in range(1, WARM_START_STEPS + 1):
        prompts = draw_prompts(problems, BATCH_SIZE * GROUP_SIZE, rng)
        batch = as_batch(prompts, [demonstration(prompt, rng) for prompt in prompts.tolist()])
        result = engine.update(batch, supervised_loss(batch))
        if step in (1, WARM_START_STEPS):
            print(f"warm start {step:4d}  loss {result.loss:.4f}", flush=True)
    engine.model.save_pretrained(directory)


def accuracy(rollout: EmbeddedRollout, prompts: Tensor) -> float:
    """The share of prompts for which one sampled response is right."""
    return float(generate_group(rollout, prompts, 1, noise_key=(SEED, -1)).batch["scores"].mean())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="a tiny language model learns to sort digits by GRPO")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of GRPO (default: {STEPS})")
    num_steps = parser.parse_args(arguments).steps

    set_num_threads(1)  # a model this small gains little from more, and rounding depends on their number
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
