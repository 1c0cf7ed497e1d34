"""Runs with wrong devices end in one line, before a model is loaded."""

import pytest
import torch


@pytest.mark.parametrize("backend", ["local", "ray"])
@pytest.mark.parametrize("value", ["7", "abc"])
def test_a_run_with_gpus_that_do_not_exist_is_an_error(hybridflow, task, tmp_path, monkeypatch, value, backend):
    if torch.cuda.is_available():
        pytest.skip("for a machine without a GPU")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    done = hybridflow("train", task / "rl.toml", f"trainer.run_dir={tmp_path / 'run'}", f"controller.backend={backend}")
    assert done.status == 2
    (line,) = [line for line in done.err.splitlines() if "CUDA_VISIBLE_DEVICES" in line]
    assert f"CUDA_VISIBLE_DEVICES='{value}' is invalid: it names 1 GPUs, but CUDA finds 0 of them" in line
    assert "Traceback" not in done.err


def test_a_run_with_hidden_gpus_computes_on_the_cpu(hybridflow, task, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = hybridflow("train", task / "rl.toml", f"trainer.run_dir={tmp_path / 'run'}", "trainer.total_steps=1")
    assert done.status == 0, done.err
