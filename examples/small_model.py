"""Teach a small real model to add, or a task of reasoning-gym, on a laptop: `python examples/small_model.py MODEL`.

MODEL is a directory or a name on the hub of a model that was trained on text, such as SmolLM2-135M-Instruct. The page
docs/small_model.md says how the wording and the settings were chosen, and what a good run looks like.
"""

import argparse
import random
import warnings
from ast import literal_eval
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hybridflow

EXAMPLES = "12 + 45 = 57\n38 + 26 = 64\n50 + 17 = 67\n41 + 39 = 80\n"
WORDINGS = {
    "examples": lambda a, b: f"{EXAMPLES}{a} + {b} =",
    "plain": lambda a, b: f"{a} + {b} =",
    "chat": lambda a, b: f"What is {a} + {b}? Answer with the number only.",
}
"""Prompts of the same problem. "chat" goes through the chat template; the others are continued as they are."""

SUMS = "sums"
TASKS = {
    SUMS: {"data.max_prompt_length": 96, "data.max_response_length": 6},
    "needle_haystack": {"data.max_prompt_length": 160, "data.max_response_length": 10},
}
"""The longest prompts and responses of each task, in tokens."""

SIZES = {"needle_haystack": {"min_num_statements": 3, "max_num_statements": 6}}
"""Arguments of a task of reasoning-gym, by which its questions are easy enough."""

SETTINGS = {
    "algorithm.advantage": "grpo",
    "model.dtype": "bfloat16",
    "data.train_batch_size": 16,
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


def package() -> Any:
    """Import reasoning-gym."""
    with warnings.catch_warnings(action="ignore", category=SyntaxWarning):  # of cellpylib, which it imports
        import reasoning_gym
    return reasoning_gym


def questions(task: str, seed: int, count: int, wording: str) -> list[dict]:
    """Return rows with questions of a task of reasoning-gym; those of "examples" come after one that is solved."""
    solved, *entries = list(package().create_dataset(task, seed=seed, size=count + 1, **SIZES[task]))
    before = f"Question: {solved['question']}\nAnswer: {solved['answer']}\n\n" if wording == "examples" else ""
    ask = (lambda question: question) if wording == "chat" else lambda question: f"Question: {question}\nAnswer:"
    return [
        {"prompt": before + ask(entry["question"]), "answer": entry["answer"], "entry": repr(entry)}
        for entry in entries
    ]


def score(completion: str, entry: str, **_: object) -> float:
    """Return the task's own score of a response."""
    question = literal_eval(entry)
    own = package().get_score_answer_fn(question["metadata"]["source_dataset"])
    return float(own(completion.strip(), question))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the model, train it, and measure it again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--task", choices=TASKS, default=SUMS)
    parser.add_argument("--wording", choices=WORDINGS, default="examples")
    parser.add_argument("--before-only", action="store_true", help="measure the model and stop")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/small_model"))
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-5)
    args = parser.parse_args(arguments)
    is_sums = args.task == SUMS
    rows = problems(0, 2256, args.wording) if is_sums else questions(args.task, 0, 2256, args.wording)
    held_out, training = rows[:208], rows[208:]
    run = hybridflow.train(
        args.model,
        prompts=training,
        val_prompts=held_out,
        reward=is_sum if is_sums else score,
        run_dir=args.run_dir,
        **SETTINGS,
        **TASKS[args.task],
        **{
            "data.chat_template": args.wording == "chat",
            "trainer.total_steps": args.steps,
            "actor.optimizer.lr": args.lr,
        },
    )
    before = run.evaluate(held_out)["val/score/mean"]
    print(f"before: {before:.3f} of {len(held_out)} held-out {'sums' if is_sums else 'questions'} are right")
    if args.before_only:
        return
    run.fit()
    print(f"after: {run.evaluate(held_out)['val/score/mean']:.3f}, before: {before:.3f}")


if __name__ == "__main__":
    main()
