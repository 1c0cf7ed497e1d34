import argparse
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from hybridflow.checkpoint import CheckpointStore, save_state
from hybridflow.cli import export
from hybridflow.errors import CheckpointError, ConfigError

transformers_logging.disable_progress_bar()


def run(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    export.add_arguments(parser)
    return export.run(parser.parse_args([str(argument) for argument in arguments]))


@pytest.fixture
def run_dir(tmp_path: Path, tiny_model) -> Path:
    """Make a run that trained from tmp_path/model and saved steps 10 and 20, with the step as its norm weight."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model())
    model.save_pretrained(tmp_path / "model")
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    for step in (10, 20):
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        weights["model.norm.weight"] = torch.full((32,), float(step))
        with store.begin(step) as directory:
            save_state({"model": weights}, directory / "actor")
    (tmp_path / "run" / "config.toml").write_text(f'[model]\npath = "{tmp_path / "model"}"\n')
    return tmp_path / "run"


def exported_step(directory: Path) -> float:
    return AutoModelForCausalLM.from_pretrained(directory).model.norm.weight[0].item()


def test_newest_checkpoint_of_run_is_exported(run_dir, tmp_path, capsys):
    assert run(run_dir, tmp_path / "out") == 0
    assert exported_step(tmp_path / "out") == 20.0
    wrote = f"wrote {tmp_path / 'out'} from {run_dir / 'checkpoints' / 'step_000020'}, weights in float32 (--dtype"
    assert wrote in capsys.readouterr().out


def test_the_chat_template_that_a_run_trained_with_is_exported(run_dir, tmp_path):
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"chat_template": "old", "eos_token": "a"}')
    (tmp_path / "model" / "chat_template.jinja").write_text("old")
    config = run_dir / "config.toml"
    for name, text in (("own", "old"), ("given", "{{ new }}")):
        config.write_text(config.read_text() + (f'chat_template = "{text}"\n' if name == "given" else ""))
        run(run_dir, tmp_path / name)
        assert (tmp_path / name / "chat_template.jinja").read_text() == text
    assert json.loads((tmp_path / "given" / "tokenizer_config.json").read_text()) == {"eos_token": "a"}


def test_step_and_dtype_can_be_chosen(run_dir, tmp_path, capsys):
    assert run(run_dir, tmp_path / "out", "--step", 10, "--dtype", "bfloat16") == 0
    assert exported_step(tmp_path / "out") == 10.0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
    assert "weights in bfloat16" in capsys.readouterr().out


def test_checkpoint_is_exported_by_relative_path_inside_its_run(run_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(run_dir / "checkpoints")
    assert run("step_000010", tmp_path / "out") == 0
    assert exported_step(tmp_path / "out") == 10.0


def test_moved_checkpoint_requires_model_option(run_dir, tmp_path):
    moved = (run_dir / "checkpoints" / "step_000010").rename(tmp_path / "best")
    with pytest.raises(ConfigError, match=r"config\.toml' does not exist.*set it with --model DIR"):
        run(moved, tmp_path / "out")
    assert run(moved, tmp_path / "out", "--model", tmp_path / "model") == 0
    assert exported_step(tmp_path / "out") == 10.0


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("run/checkpoints", (), "is neither a checkpoint nor a run with checkpoints"),
        ("run/checkpoints/step_000010", ("--step", 10), "--step 10 needs the directory of a run"),
        ("run", ("--step", 15), r"no checkpoint of step 15 in .*; there are 10, 20"),
    ],
)
def test_what_cannot_be_exported_is_an_error(run_dir, tmp_path, source, options, message):
    with pytest.raises((CheckpointError, ConfigError), match=message):
        run(tmp_path / source, tmp_path / "out", *options)


def test_moved_model_is_an_error(run_dir, tmp_path):
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"model\.path='.*model' of '.*' is not a directory here"):
        run(run_dir, tmp_path / "out")
