"""A whole GRPO step, against TRL's where its environment is there, and as a row of other frameworks' tables."""

import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from support.environments import ENVIRONMENTS, ROOT
from support.grpo_files import write_task
from support.side import Side
from support.trl_settings import trl_settings

from gpu_session.models import MODELS, TINY, write_sized_model
from gpu_session.record import Teller
from hybridflow.config import load_config

GOAL = 2.0
"""Times as fast as TRL's step that this project aims at."""


def step(teller: Teller, model: str, sizes: dict[str, int], tiny: bool) -> None:
    """Measure a step of a Llama with the sizes of `model`."""
    threads = torch.get_num_threads()
    has_trl = not tiny and (ROOT / ENVIRONMENTS["trl"] / "bin/python").exists()
    replies: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "model").mkdir()
        write_sized_model(directory / "model", model, tiny=tiny, family="Llama")
        vocabulary = (TINY if tiny else MODELS[model])["vocab_size"]
        write_task(directory, threads, sizes["prompts_per_step"], vocabulary=vocabulary, sizes=sizes)
        recipe = directory / "recipe.toml"
        options = {"path": str(directory / "model"), "prompts": str(directory / "prompts.json")}
        options |= {"recipe": str(recipe), "settings": trl_settings(load_config(recipe)), "sizes": sizes}
        for system in ("hybridflow", "trl") if has_trl else ("hybridflow",):
            named = {"task": "grpo", "threads": threads, "directory": directory, "make_target": "bench-grpo_step"}
            with ExitStack() as stack:
                side = stack.enter_context(Side(system, "bfloat16", **named, **options))
                side.ask()
                replies[system] = [side.ask() for _ in range(sizes["repeats"])]
    seconds = {system: median(reply["seconds"] for reply in found) for system, found in replies.items()}
    ours = replies["hybridflow"][-1]
    responses = sizes["prompts_per_step"] * sizes["group_size"]
    what = f"GRPO step, {responses} responses of {sizes['new_tokens']} tokens"
    compared = {"model": model, "peer": seconds.get("trl"), "against": f"TRL; goal: {GOAL:g} times as fast"}
    teller.figure(what, seconds["hybridflow"], "s", **compared)
    tokens = ours["num_tokens"]
    for stage, taken in (("generation", "generation_s"), ("training", "training_s"), ("whole step", "seconds")):
        teller.figure(f"GRPO step, {stage}", tokens / ours[taken], "tokens/s", model=model)
    length = sizes["prompt_len"] + sizes["new_tokens"]
    teller.note(
        "row of a performance table",
        row={
            "Model": model,
            "On/Off policy": "on policy",
            "T-Max sequence length": length,
            "G-Average seq len": length,
            "GPUs": 1,
            "G-GBS": responses,
            "T-GBS": responses,
            "Generation [TP]": "[1]",
            "Training [TP,FSDP]": "[1,1]",
            "Tokens/s/GPU": round(tokens / seconds["hybridflow"], 1),
            "Total step time (s)": round(seconds["hybridflow"], 3),
        },
    )
