"""The tutorial example: it runs, and two runs print the same numbers."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_in_one_file.py"


@pytest.fixture
def example(monkeypatch):
    """Load the example as a module with a short warm start; restore the process settings that it changes."""
    spec = importlib.util.spec_from_file_location("grpo_in_one_file", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "WARM_START_STEPS", 5)
    num_threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield module
    torch.set_num_threads(num_threads)
    torch.use_deterministic_algorithms(deterministic)


def test_a_run_prints_the_same_numbers_again_and_others_with_another_seed(example, capsys, monkeypatch):
    outputs = []
    for seed in (example.SEED, example.SEED, example.SEED + 1):
        monkeypatch.setattr(example, "SEED", seed)
        example.main(["--steps", "3"])
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]
    names = [line.partition("loss" if "loss" in line else "score")[0].split() for line in outputs[0].splitlines()[:-1]]
    assert names == [["warm", "start", "1"], ["warm", "start", "5"], ["step", "1"], ["step", "3"]]
    last = outputs[0].splitlines()[-1]
    assert re.fullmatch(r"accuracy 0\.\d{3} -> 0\.\d{3} on 500 held-out prompts in 3 steps", last)


def test_a_response_scores_only_if_it_sorts_the_prompt_and_stops(example):
    assert example.score([3, 1, 2, 2], [1, 2, 2, 3, example.STOP]) == 1
    assert example.score([3, 1, 2, 2], [1, 2, 3, 2, example.STOP]) == 0
    assert example.score([3, 1, 2, 2], [1, 2, 2, 3]) == 0
    assert example.score([3, 1, 2, 2], [1, 2, 2, 3, 3]) == 0
