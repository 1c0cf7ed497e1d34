"""Teach a small real model to add: `python examples/small_model.py MODEL`, on the CPU of a laptop.

MODEL is a directory or a name on the hub of a model that was trained on text, such as SmolLM2-135M-Instruct. The page
docs/small_model.md says how the wording and the settings were chosen, and what a good run looks like.
"""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import hybridflow

EXAMPLES = "12 + 45 = 57\n38 + 26 = 64\n50 + 17 = 67\n41 + 39 = 80\n"
WORDINGS = {
    "examples": lambda a, b: f"{EXAMPLES}{a} + {b} =",
    "plain": lambda a, b: f"{a} + {b} =",
    "chat": lambda a, b: f"What is {a} + {b}? Answer with the number only.",
}
"""Prompts of the same problem. "chat" goes through the chat template; the others are continued as they are."""

SETTINGS = {
    "algorithm.advantage": "grpo",
    "model.dtype": "bfloat16",
    "data.train_batch_size": 16,
    "data.max_prompt_length": 96,
    "data.max_response_length": 6,
    "rollout.group_size": 8,
    "rollout.stop_strings": ["\n"],
    "actor.mini_batch_size": 0,
    "actor.optimizer.warmup_steps": 2,
    "trainer.val_every": 8,
    "trainer.save_every": 16,
    "trainer.keep_checkpoints": 1,
}


def problems(seed: int, count: int, wording: str) -> list[dict]:
    """Return rows with different sums of two numbers from 10 to 99."""
    drawn = random.Random(seed).sample([(a, b) for a in range(10, 100) for b in range(10, 100)], count)
    return [{"prompt": WORDINGS[wording](a, b), "answer": str(a + b)} for a, b in drawn]


def is_sum(completion: str, answer: str, **_: object) -> float:
    """Return 1.0 if the response is the sum and nothing else."""
    return float(completion.strip() == answer)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the model, train it, and measure it again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--wording", choices=WORDINGS, default="examples")
    parser.add_argument("--before-only", action="store_true", help="measure the model and stop")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/small_model"))
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-5)
    args = parser.parse_args(arguments)
    rows = problems(0, 2256, args.wording)
    held_out, training = rows[:208], rows[208:]
    run = hybridflow.train(
        args.model,
        prompts=training,
        val_prompts=held_out,
        reward=is_sum,
        run_dir=args.run_dir,
        **SETTINGS,
        **{
            "data.chat_template": args.wording == "chat",
            "trainer.total_steps": args.steps,
            "actor.optimizer.lr": args.lr,
        },
    )
    before = run.evaluate(held_out)["val/score/mean"]
    print(f"before: {before:.3f} of {len(held_out)} held-out sums are right")
    if args.before_only:
        return
    run.fit()
    print(f"after: {run.evaluate(held_out)['val/score/mean']:.3f}, before: {before:.3f}")


if __name__ == "__main__":
    main()
