"""TRL's GRPOTrainer in its own training loop, which waits for a request before each step.

The reply has the seconds of the step, of generation and of training, and the peak memory so far.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from support.counting import require_lengths
from support.grpo_task import ENDLESS_STEPS, SIZES, score
from support.serve import Channel, peak_resident_bytes
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class WatchedTrainer(GRPOTrainer):
    """A GRPOTrainer that keeps the times of each step's parts and its samples."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.watched: dict[str, Any] = {}
        super().__init__(*args, **kwargs)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = super()._generate(*args, **kwargs)
        self.watched.pop("training_began", None)
        self.watched["generation_s"] = time.perf_counter() - start
        return result

    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        inputs = super()._prepare_inputs(*args, **kwargs)
        self.watched["inputs"] = inputs  # of one part of the update
        self.watched.setdefault("training_began", time.perf_counter())
        return inputs


class OnRequest(TrainerCallback):
    """A callback that waits for a request before each step and replies after it; training ends with the requests."""

    def __init__(self, channel: Channel, watched: dict[str, Any], sizes: dict[str, int]) -> None:
        self.channel, self.watched, self.sizes = channel, watched, sizes
        self.requests: Iterator[dict[str, Any]] = channel.requests()
        self.start = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if next(self.requests, None) is None:
            raise SystemExit(0)  # the training loop cannot be stopped otherwise before its first step
        self.start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        end = time.perf_counter()
        inputs, parts = self.watched["inputs"], self.sizes["accumulation"]
        num_rows = self.sizes["prompts_per_step"] * self.sizes["group_size"] // parts
        require_lengths(inputs["prompt_mask"].sum(-1).tolist(), [self.sizes["prompt_len"]] * num_rows)
        require_lengths(inputs["completion_mask"].sum(-1).tolist(), [self.sizes["new_tokens"]] * num_rows)
        self.channel.reply(
            seconds=end - self.start,
            generation_s=self.watched["generation_s"],
            training_s=end - self.watched["training_began"],
            num_tokens=parts * int(inputs["prompt_mask"].sum() + inputs["completion_mask"].sum()),
            peak_resident_bytes=peak_resident_bytes(),
        )


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return the score of each response; TRL's reward function."""
    return [score(ids) for ids in completion_ids]


def main() -> None:
    channel = Channel()
    torch.set_num_threads(channel.options["threads"])
    path = channel.options["path"]
    prompts = json.loads(Path(channel.options["prompts"]).read_text())
    sizes = channel.options.get("sizes", SIZES)
    num_rows = sizes["prompts_per_step"] * sizes["group_size"]
    trainer = WatchedTrainer(
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir="trl",
            use_cpu=not torch.cuda.is_available(),
            bf16=channel.options["dtype"] == "bfloat16",
            per_device_train_batch_size=num_rows // sizes["accumulation"],
            gradient_accumulation_steps=sizes["accumulation"],
            gradient_checkpointing=False,
            num_generations=sizes["group_size"],
            num_iterations=1,
            generation_kwargs={"min_new_tokens": sizes["new_tokens"], "top_k": 0},
            max_steps=ENDLESS_STEPS,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            seed=0,
            **channel.options["settings"],
        ),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=AutoTokenizer.from_pretrained(path),
    )
    trainer.add_callback(OnRequest(channel, trainer.watched, sizes))
    channel.ready(torch.get_num_threads(), trl=trl.__version__, torch=torch.__version__)
    trainer.train()


if __name__ == "__main__":
    main()
