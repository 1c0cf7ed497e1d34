"""The files that both sides of a GRPO step start from, in one directory: model, prompts, recipe."""

import json
from collections.abc import Mapping
from pathlib import Path

from hybridflow.data import prompt_row, write_prompt_file
from support import grpo_task as task
from support.models import MODELS, write_model, write_tokenizer
from support.workloads import draw_prompts

RECIPE = """
[model]
path = "{directory}/model"

[data]
train_files = ["{directory}/prompts.parquet"]
train_batch_size = {prompts_per_step}
max_prompt_length = {prompt_len}
max_response_length = {new_tokens}

[rollout]
group_size = {group_size}

[memory]
max_tokens_per_micro_batch = {num_tokens}

[algorithm]
advantage = "grpo"

[actor.optimizer]
lr = {learning_rate}

[reward]
function = "{reward_file}:reward"

[controller]
threads = {threads}

[trainer]
run_dir = "{directory}/run"
total_steps = {total_steps}
"""

MAX_TOKENS = 16384
"""Largest micro-batch, in tokens."""


def write_task(
    directory: Path,
    threads: int,
    prompts_per_step: int,
    *,
    vocabulary: int | None = None,
    sizes: Mapping[str, int] = task.SIZES,
) -> None:
    """Write `model/`, the same prompts as `prompts.parquet` and `prompts.json`, and hybridflow's `recipe.toml`.

    `vocabulary`: the entries of the model that `model/` has already; None: the small model is written.
    """
    if vocabulary is None:
        write_model(directory / "model", "small")
    write_tokenizer(directory / "model", vocabulary or MODELS["small"]["vocab_size"])
    prompts = [" ".join(map(str, ids)) for ids in draw_prompts("small", task.NUM_PROMPTS, sizes["prompt_len"])]
    rows = [
        prompt_row(data_source="benchmark", prompt=prompt, ground_truth="", split="train", index=index)
        for index, prompt in enumerate(prompts)
    ]
    write_prompt_file(directory / "prompts.parquet", rows)
    (directory / "prompts.json").write_text(json.dumps(prompts))
    tokens_of_step = prompts_per_step * sizes["group_size"] * (sizes["prompt_len"] + sizes["new_tokens"])
    recipe = RECIPE.format(
        directory=directory,
        prompts_per_step=prompts_per_step,
        prompt_len=sizes["prompt_len"],
        new_tokens=sizes["new_tokens"],
        group_size=sizes["group_size"],
        num_tokens=min(tokens_of_step, MAX_TOKENS),
        learning_rate=task.LEARNING_RATE,
        reward_file=task.__file__,
        threads=threads,
        total_steps=task.ENDLESS_STEPS,
    )
    (directory / "recipe.toml").write_text(recipe)
