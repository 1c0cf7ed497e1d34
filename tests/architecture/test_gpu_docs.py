"""The GPU page: its tables are those of the memory formula, and its commands and the README's run on the CPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.gpu_settings import sizes_of_models, tables
from hybridflow.config import load_config

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/gpu.md").read_text("utf-8")
README = (ROOT / "README.md").read_text("utf-8")
SMALL = (
    "model.dtype=float32 data.train_batch_size=2 data.max_response_length=4 validation.max_samples=2 "
    "rollout.group_size=2 trainer.total_steps=1 memory.max_tokens_per_micro_batch=2048"
)


QUICK_START = ("make setup", "prepare countdown", "recipes/gpu/")


def commands(text):
    """Return the commands of the quick start: setup, data, training on one GPU, training on eight."""
    blocks = re.findall(r"^```(?:bash|console)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    lines = [line.removeprefix("$ ").partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if any(part in line for part in QUICK_START)]


def test_tables_of_settings_equal_the_generated_ones(tmp_path):
    shown = PAGE.partition("<!-- generated: start -->")[2].partition("<!-- generated: end -->")[0].strip()
    assert shown == tables(sizes_of_models(tmp_path))


def test_readme_has_the_quick_start_of_the_page():
    assert len(commands(PAGE)) == 4
    assert commands(README) == commands(PAGE)


def test_readme_is_shorter_than_150_lines():
    assert len(README.splitlines()) < 150


@pytest.fixture
def checkout(tmp_path, tiny_model):
    """Return a directory with links to the recipes and the environment, and a tiny model under the name on the hub."""
    target = tmp_path / load_config(ROOT / "recipes/gpu/one_gpu.toml").model.path
    target.parent.mkdir()
    target.symlink_to(tiny_model(max_position_embeddings=512))
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parents[1])
    return tmp_path


def run(command, checkout, *more):
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([*command.split(), *more], cwd=checkout, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.ray)])
def test_quick_start_runs_with_a_tiny_model_on_the_cpu(checkout, ranks):
    _, data, *trainings = commands(PAGE)
    words = "w3 w4 {numbers} {target} w5"  # the tiny model knows no others
    run(f"{data} --train-size 8 --test-size 2", checkout, "--prompt-template", words)
    workers = f" controller.num_workers={ranks}" if ranks > 1 else ""
    run(f"{trainings[ranks - 1]} {SMALL}{workers}", checkout)
    name = "gpu" if ranks == 1 else "eight_gpus"
    assert (checkout / f"runs/{name}/metrics.jsonl").read_text()
